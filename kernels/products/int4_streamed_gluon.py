"""A packed int4 weight times up to 64 vectors on Hopper, pipelined as streamed_product_gluon.py.

    producer   weight, groups ─TMA─► early stages │ preceding kernel has ended │ vectors ─TMA─► too
               weight, groups, vectors ─TMA─► each further stage, once it is empty
    the rest   a stage is full ─► words ─► registers ─► floats ─► wgmma ─► it is empty

Outputs are the 64 rows of wgmma and vectors its columns, 8, 16, 32 or 64: the fewer, the cheaper.
The four numbers of a word belong to inputs 32 apart (int4_weights.py), so that words in the
register layout of wgmma's left operand become four such operands in place. A group's sum is scaled
in float32.

The last program of an output tile to finish adds up the split-K shares, in their order.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..launched import cdiv, launched
from ..row_room import empty_rows, room_of
from .int4_triton import Int4Stages, _unpacked
from .int4_weights import CHUNK, PER_WORD, Int4Weight
from .streamed_product_gluon import _async_load, _stage_barriers

_CHUNK, _WORDS = gl.constexpr(CHUNK), gl.constexpr(CHUNK // PER_WORD)
_PER_WORD = gl.constexpr(PER_WORD)
_PRODUCER_REGISTERS = gl.constexpr(24)
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


def int4_streamed_product(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None,
    stages: Int4Stages,
    *,
    is_gated: bool = False,
) -> Tensor:
    """x [rows, inputs] @ weight [outputs, inputs]^T + bias -> [rows, outputs], 16-bit floats.

    At most 64 rows, with memory for `room_of` that many; groups of 128 inputs. `is_gated`:
    `ops.silu_and_mul` of the product, half as many outputs. Sums in float32; a row's sums do not
    depend on other rows.
    """
    num_rows, num_inputs = x.shape
    num_outputs = len(weight)
    width = num_outputs // 2 if is_gated else num_outputs
    out = empty_rows((num_rows, width), x)
    room = room_of(num_rows)
    num_tiles = cdiv(num_outputs, stages.outputs)
    num_chunks = num_inputs // CHUNK
    chunks = math.gcd(stages.chunks, num_chunks)
    shares = min(stages.shares, num_chunks // chunks)
    parts = out
    if shares > 1:
        size = shares * num_tiles * stages.outputs * room
        parts = torch.empty(size, dtype=torch.float32, device=x.device)
    box = stages.outputs // 2 if is_gated else stages.outputs
    _int4_streamed[(num_tiles, shares)](
        _boxes(torch.as_strided(x, (room, num_inputs), (num_inputs, 1)), room, CHUNK),
        _boxes(weight.data.view(-1, CHUNK // PER_WORD), box, CHUNK // PER_WORD),
        _boxes(weight.groups, 1, box),
        out if bias is None else bias,
        out,
        parts,
        weight.turns,
        num_rows,
        num_outputs,
        num_inputs,
        HAS_BIAS=bias is not None,
        IS_GATED=is_gated,
        ROWS=room,
        OUTPUTS=stages.outputs,
        CHUNKS=chunks,
        STAGES=stages.count * stages.chunks // chunks,
        EARLY=stages.early * stages.chunks // chunks,
        SHARES=shares,
        WARPS=stages.warps,
        num_warps=stages.warps,
        maxnreg=registers(stages, room),
        **launch_options(x.device),
    )
    return out


def registers(stages: Int4Stages, room: int) -> int:
    """Registers per thread on average: the fewer, the more programs fit on a multiprocessor.

    Threads that multiply get the fewest with which ptxas keeps products in flight (by trial).
    The producer warp counts as four, since Triton rounds it up.
    """
    sums = stages.outputs * room // (32 * stages.warps)
    tiles = stages.outputs // (16 * stages.warps)  # of 64 outputs
    wanted = 46 * tiles + 38 * stages.chunks - 42 + (1 + stages.chunks) * sums
    average = (min(240, max(72, wanted)) * stages.warps + 4 * 24) // (stages.warps + 4)
    return -(-average // 8) * 8


def _boxes(matrix: Tensor, num_rows: int, num_columns: int) -> TensorDescriptor:
    """A TMA descriptor that loads boxes of this size."""
    box = (num_rows, num_columns)
    return TensorDescriptor.from_tensor(matrix, list(box), layout_of(box, matrix.dtype))


_TYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.int16: gl.int16,
    torch.int32: gl.int32,
}


@functools.cache
def layout_of(box: tuple[int, int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """The layout of a box in shared memory."""
    if dtype == torch.int32:  # groups, which are stored linearly
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return gl.NVMMASharedLayout.get_default_for(list(box), _TYPES[dtype])


@gluon.jit
def _load_weight(
    matrix,
    groups,
    num_outputs,
    chunk,
    full,
    ws,
    gs,
    stage,
    CHUNKS: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Start loading a stage's part of the weight; `full` expects the vectors' bytes too."""
    BOX: gl.constexpr = matrix.block_shape[0]
    HALVES: gl.constexpr = ws.shape[1] // BOX
    num_bytes: gl.constexpr = CHUNKS * (HALVES * BOX * (_WORDS * 2 + 4) + ROWS * _CHUNK * 2)
    mbarrier.expect(full.index(stage), num_bytes)
    for index in gl.static_range(CHUNKS):
        for half in gl.static_range(HALVES):
            output = gl.program_id(0) * BOX + half * (num_outputs // 2)
            at = ws.index(stage * CHUNKS + index).slice(half * BOX, BOX, 0)
            corner = [(chunk + index) * num_outputs + output, 0]
            _async_load(matrix, corner, full.index(stage), at)
            of_groups = gs.index(stage * CHUNKS + index).slice(half * BOX, BOX, 1)
            _async_load(groups, [chunk + index, output], full.index(stage), of_groups)


@gluon.jit
def _load_vectors(vectors, chunk, full, xs, stage, CHUNKS: gl.constexpr):
    for index in gl.static_range(CHUNKS):
        corner = [0, (chunk + index) * _CHUNK]
        _async_load(vectors, corner, full.index(stage), xs.index(stage * CHUNKS + index))


@gluon.jit
def _fill(
    vectors,
    matrix,
    groups,
    xs,
    ws,
    gs,
    full,
    empty,
    num_outputs,
    begin,
    num_steps,
    CHUNKS: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
):
    """The producer warp: load each stage once it is empty."""
    STAGES: gl.constexpr = xs.shape[0] // CHUNKS
    ROWS: gl.constexpr = xs.shape[1]
    for step in range(gl.minimum(EARLY, num_steps)):
        chunk = begin + step * CHUNKS
        _load_weight(matrix, groups, num_outputs, chunk, full, ws, gs, step, CHUNKS, ROWS)
    wait_for_previous(PDL)
    let_next_in(PDL)
    for step in range(gl.minimum(EARLY, num_steps)):
        _load_vectors(vectors, begin + step * CHUNKS, full, xs, step, CHUNKS)
    for step in range(EARLY, num_steps):
        stage = step % STAGES
        chunk = begin + step * CHUNKS
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        _load_weight(matrix, groups, num_outputs, chunk, full, ws, gs, stage, CHUNKS, ROWS)
        _load_vectors(vectors, chunk, full, xs, stage, CHUNKS)


@gluon.jit
def _scale_of(both, sums):
    layout: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    scale = (both & -256).to(gl.float32, bitcast=True)
    return gl.convert_layout(scale, layout, assert_trivial=True)[:, None]


@gluon.jit
def _multiply(xs, ws, gs, full, empty, num_steps, sums, CHUNKS: gl.constexpr):
    """All warps but the producer: multiply each stage once it is full, and add up.

    A stage is released once its products are done, since they wait for all loads from it: a load
    that nothing waits for may still be in flight when TMA overwrites the stage.
    """
    STAGES: gl.constexpr = xs.shape[0] // CHUNKS
    of_sums: gl.constexpr = sums.type.layout
    layout: gl.constexpr = gl.DotOperandLayout(0, of_sums, 2)
    zeros = gl.zeros((sums.shape[0], sums.shape[1]), gl.float32, of_sums)
    for step in range(num_steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        part, scale = zeros, zeros
        for index in gl.static_range(CHUNKS):
            at = stage * CHUNKS + index
            x = xs.index(at)
            packed = ws.index(at).load(layout)
            both = gs.index(at).reshape((gs.shape[2],)).load(gl.SliceLayout(1, layout))
            zero, packed = gl.broadcast(gl.expand_dims(both & 0xFF, 1), packed)
            before, scale_before = part, scale
            part, scale = zeros, _scale_of(both, sums)
            for number in gl.static_range(_PER_WORD):  # four tiles, of one number per word
                values, packed = _unpacked(packed, zero, True, x.dtype)
                piece = x.slice(number * _WORDS, _WORDS, 1).permute((1, 0))
                part = warpgroup_mma(values, piece, part, use_acc=number > 0, is_async=True)
                if index > 0 and number == _PER_WORD // 2 - 1:  # the previous chunk is done
                    before = warpgroup_mma_wait(_PER_WORD // 2, deps=(before,))
                    sums += before * scale_before
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(empty.index(stage), count=1)
        sums += part * scale
    return sums, zeros  # a pair, since older Triton unpacks what is returned


@launched
@gluon.jit(do_not_specialize=["num_rows"])
def _int4_streamed(
    vectors,
    matrix,
    groups,
    bias,
    out,
    parts,
    turns,
    num_rows,
    num_outputs,
    num_inputs,
    HAS_BIAS: gl.constexpr,
    IS_GATED: gl.constexpr,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
    SHARES: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    type: gl.constexpr = vectors.dtype
    chunks: gl.constexpr = STAGES * CHUNKS
    xs = gl.allocate_shared_memory(type, [chunks, ROWS, _CHUNK], vectors.layout)
    ws = gl.allocate_shared_memory(gl.int16, [chunks, OUTPUTS, _WORDS], matrix.layout)
    gs = gl.allocate_shared_memory(gl.int32, [chunks, 1, OUTPUTS], groups.layout)
    full, empty = _stage_barriers(STAGES)
    tile, share = gl.program_id(0), gl.program_id(1)
    num_steps = num_inputs // (_CHUNK * CHUNKS)
    first, last = num_steps * share // SHARES, num_steps * (share + 1) // SHARES
    begin, count = first * CHUNKS, last - first
    sums = gl.zeros((OUTPUTS, ROWS), gl.float32, layout)
    sums, _ = gl.warp_specialize(
        [
            (_multiply, (xs, ws, gs, full, empty, count, sums, CHUNKS)),
            (
                _fill,
                (
                    vectors,
                    matrix,
                    groups,
                    xs,
                    ws,
                    gs,
                    full,
                    empty,
                    num_outputs,
                    begin,
                    count,
                    CHUNKS,
                    EARLY,
                    PDL,
                ),
            ),
        ],
        [1],
        [_PRODUCER_REGISTERS],
    )
    if SHARES > 1:
        of_tile: gl.constexpr = OUTPUTS * ROWS
        outputs = gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout))
        rows = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
        at = parts + tile * of_tile + outputs[:, None] * ROWS + rows[None, :]
        of_share = gl.num_programs(0).to(gl.int64) * of_tile
        gl.store(at + share * of_share, sums)
        _barrier()  # all threads' stores come before the counter's increment
        if gl.atomic_add(turns + tile, 1, sem="acq_rel") == SHARES - 1:
            gl.store(turns + tile, 0)
            sums = gl.zeros((OUTPUTS, ROWS), gl.float32, layout)
            for index in gl.static_range(SHARES):
                sums += gl.load(at + index * of_share, cache_modifier=".cg")
            _store(sums, bias, out, tile, num_rows, num_outputs, HAS_BIAS, IS_GATED)
    else:
        _store(sums, bias, out, tile, num_rows, num_outputs, HAS_BIAS, IS_GATED)


@gluon.jit
def _store(
    sums, bias, out, tile, num_rows, num_outputs, HAS_BIAS: gl.constexpr, IS_GATED: gl.constexpr
):
    """Store sums [outputs, rows]; if gated, all gates come before the up outputs."""
    type: gl.constexpr = out.dtype.element_ty
    layout: gl.constexpr = sums.type.layout
    OUTPUTS: gl.constexpr = sums.shape[0]
    ROWS: gl.constexpr = sums.shape[1]
    width = num_outputs
    if HAS_BIAS:
        of_tile = gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout))
        outputs = tile * OUTPUTS + of_tile
        if IS_GATED:
            is_up = of_tile // (OUTPUTS // 2)
            outputs = (tile - is_up) * (OUTPUTS // 2) + of_tile + is_up * (num_outputs // 2)
        sums += gl.load(bias + outputs, mask=outputs < num_outputs, other=0.0).to(gl.float32)[
            :, None
        ]
    if IS_GATED:  # round the products as if they had been stored
        width = num_outputs // 2
        across: gl.constexpr = OUTPUTS // 2
        pairs = sums.to(type).reshape((2, across, ROWS)).permute((2, 1, 0))
        threads: gl.constexpr = min(across // 4, 32)
        both: gl.constexpr = gl.BlockedLayout(
            [1, 4, 2], [32 // threads, threads, 1], [gl.num_warps(), 1, 1], [2, 1, 0]
        )
        gate, up = gl.split(gl.convert_layout(pairs, both))
        gate = gate.to(gl.float32)
        gated = (gate / (1.0 + gl.exp(-gate))).to(type).to(gl.float32)
        _store_tile((gated * up.to(gl.float32)).to(type), out, tile, num_rows, width)
    else:
        columns: gl.constexpr = min(OUTPUTS // 4, 32)
        of_rows: gl.constexpr = gl.BlockedLayout(
            [1, 4], [32 // columns, columns], [gl.num_warps(), 1], [1, 0]
        )
        turned = gl.convert_layout(sums.to(type).permute((1, 0)), of_rows)
        _store_tile(turned, out, tile, num_rows, width)


@gluon.jit
def _store_tile(values, out, tile, num_rows, width):
    """Store values [rows, outputs]."""
    layout: gl.constexpr = values.type.layout
    COLUMNS: gl.constexpr = values.shape[1]
    rows = gl.arange(0, values.shape[0], gl.SliceLayout(1, layout))
    columns = tile * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    at = out + rows[:, None] * width + columns[None, :]
    gl.store(at, values, mask=(rows < num_rows)[:, None] & (columns < width)[None, :])
