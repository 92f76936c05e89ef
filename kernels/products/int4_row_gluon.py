"""A packed int4 weight times one vector on Hopper, pipelined as streamed_product_gluon.py, in FP8.

    producer     weight, groups ─TMA─► early stages │ preceding kernel has ended │ vector ─TMA─► too
                 weight, groups, vector ─TMA─► each further stage, once it is empty
    two warps    a stage is full ─► vector ─► its parts in FP8, its sums ─► it is split
    four or more a stage is split ─► words ─► registers ─► numbers in FP8 ─► wgmma ─► it is empty

The kernel is bound by instructions per weight: eight numbers take 11 instructions as 16-bit floats
(int4_triton.py), 3 in FP8. A byte from 0 to 15 read as e4m3 is that number times 2^-9, since e4m3
is linear over its least exponents. A vector is split into the sum of four parts in e5m2 with three
significant bits each: every bit of float16, and of bfloat16 below 65,520, except what is less than
1e-7. So products are exact. The tensor cores keep 14 bits of a group's sum, which starts from the
contribution of the group's zero; sums are scaled and added up in float32.

A tile's rows are outputs, grouped by share of the inputs (split-K), and its columns are the parts,
each for all shares. Elements whose row and column have the same share are parts of products; the
others are not used. wgmma takes at least 8 columns: four parts of two shares. So a tile needs few
outputs, and programs, which go from tile to tile, need no sum across programs.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..launched import cdiv, launched, num_multiprocessors
from ..row_room import empty_rows
from .int4_triton import Int4Row
from .int4_weights import CHUNK, PER_WORD, Int4Weight
from .streamed_product_gluon import _async_load, _stage_barriers

_CHUNK, _BYTES = gl.constexpr(CHUNK), gl.constexpr(CHUNK // PER_WORD * 2)
_HALF = gl.constexpr(CHUNK // 2)
_PARTS = gl.constexpr(4)
_SPLITTING = gl.constexpr(2)  # warps
_SPLITTER_REGISTERS, _PRODUCER_REGISTERS = gl.constexpr(56), gl.constexpr(24)
_UNIT = gl.constexpr(2.0**-9)  # of a byte's number read as e4m3
# The upper bytes of four float16 numbers are these in e5m2, truncated; the remainder, times eight,
# is split likewise, three times.
_LEFT = """
    and.b32 upper, low, 0xFF00FF00;
    sub.rn.f16x2 low, low, upper;
    mul.rn.f16x2 low, low, eight;
    and.b32 upper, high, 0xFF00FF00;
    sub.rn.f16x2 high, high, upper;
    mul.rn.f16x2 high, high, eight;"""
_SPLIT = gl.constexpr(
    """{
    .reg .b32 low, high, upper, eight;
    mov.b32 low, $4;
    mov.b32 high, $5;
    mov.b32 eight, 0x48004800;"""
    + _LEFT.join(f"\n    prmt.b32 ${part}, low, high, 0x7531;" for part in range(4))
    + "}"
)
# $0: the lower numbers of four bytes; $1: the higher.
_UNPACK = gl.constexpr(
    """{
    and.b32 $0, $2, 0x0F0F0F0F;
    shr.u32 $1, $2, 4;
    and.b32 $1, $1, 0x0F0F0F0F;
    }"""
)


def int4_row_product(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None,
    way: Int4Row,
    *,
    is_gated: bool = False,
) -> Tensor:
    """x [1, inputs] @ weight [outputs, inputs]^T + bias -> [1, outputs], 16-bit floats.

    Groups of 128 inputs, an even number of them. `is_gated`: `ops.silu_and_mul` of the product,
    half as many outputs. The result has room for more rows.
    """
    halves = 2 if is_gated else 1
    width, num_chunks = len(weight) // halves, x.shape[1] // CHUNK
    out = empty_rows((1, width), x)
    shares = math.gcd(way.shares, num_chunks)
    of_share = num_chunks // shares
    chunks = math.gcd(way.chunks, of_share)
    outputs = way.rows // shares // halves  # per tile and half
    num_tiles = cdiv(width, outputs)
    in_shares = (shares, of_share, halves, width)
    box = (shares, 1, halves, outputs)
    _int4_row[(min(num_tiles, way.programs * num_multiprocessors(x.device)),)](
        _boxes(x.view(shares, of_share, CHUNK), (shares, chunks, CHUNK)),
        _boxes(weight.data.view(torch.uint8).view(*in_shares, -1), (*box, _BYTES.value)),
        _boxes(weight.groups.view(in_shares), box),
        out if bias is None else bias,
        out,
        num_tiles,
        width,
        of_share // chunks,
        HAS_BIAS=bias is not None,
        CHUNKS=chunks,
        STAGES=way.count * way.chunks // chunks,
        EARLY=way.early * way.chunks // chunks,
        num_warps=way.warps,
        maxnreg=registers(way),
        **launch_options(x.device),
    )
    return out


def registers(way: Int4Row) -> int:
    """Registers per thread on average: the fewer, the more programs fit on a multiprocessor.

    Threads that multiply get the fewest with which ptxas keeps products in flight (by trial).
    """
    sums = way.rows * _PARTS.value * way.shares // (32 * way.warps)
    wanted = 40 + way.rows // (16 * way.warps) * 24 * min(2, way.chunks) + 4 * sums
    average: int = (min(240, wanted) * way.warps + 4 * _SPLITTER_REGISTERS.value) // (way.warps + 4)
    return -(-average // 8) * 8


def _boxes(tensor: Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """A TMA descriptor that loads boxes of this size."""
    return TensorDescriptor.from_tensor(tensor, list(box), layout_of(box, tensor.dtype))


@functools.cache
def layout_of(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """The layout in shared memory: words swizzled for the tensor cores, all else linear."""
    if dtype == torch.uint8:
        return gl.NVMMASharedLayout.get_default_for(list(box), gl.uint8)
    return gl.NVMMASharedLayout(0, dtype.itemsize * 8, rank=len(box))


@gluon.jit
def _load_weight(matrix, groups, tile, chunk, full, ws, gs, stage, CHUNKS: gl.constexpr):
    """Start loading a stage's part of the weight; `full` expects the vector's bytes too."""
    SHARES: gl.constexpr = matrix.block_shape[0]
    OUTPUTS: gl.constexpr = matrix.block_shape[3]
    ROWS: gl.constexpr = SHARES * matrix.block_shape[2] * OUTPUTS
    mbarrier.expect(full.index(stage), CHUNKS * (ROWS * (_BYTES + 4) + SHARES * _CHUNK * 2))
    for index in gl.static_range(CHUNKS):
        at = stage * CHUNKS + index
        output = tile * OUTPUTS
        _async_load(matrix, [0, chunk + index, 0, output, 0], full.index(stage), ws.index(at))
        _async_load(groups, [0, chunk + index, 0, output], full.index(stage), gs.index(at))


@gluon.jit
def _fill(
    vector,
    matrix,
    groups,
    xs,
    ws,
    gs,
    full,
    empty,
    first_tile,
    num_steps,
    of_tile,
    CHUNKS: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
):
    """The producer warp: load each stage once it is empty."""
    STAGES: gl.constexpr = xs.shape[0]
    for step in range(gl.minimum(EARLY, num_steps)):
        tile, chunk = first_tile + step // of_tile, step % of_tile * CHUNKS
        _load_weight(matrix, groups, tile, chunk, full, ws, gs, step, CHUNKS)
    wait_for_previous(PDL)
    let_next_in(PDL)
    for step in range(gl.minimum(EARLY, num_steps)):
        corner = [0, step % of_tile * CHUNKS, 0]
        _async_load(vector, corner, full.index(step), xs.index(step))
    for step in range(EARLY, num_steps):
        stage = step % STAGES
        tile, chunk = first_tile + step // of_tile, step % of_tile * CHUNKS
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        _load_weight(matrix, groups, tile, chunk, full, ws, gs, stage, CHUNKS)
        _async_load(vector, [0, chunk, 0], full.index(stage), xs.index(stage))


@gluon.jit
def _split(xs, parts, totals, full, is_split, num_steps):
    """Two warps: write the parts of each stage's vector, and its sums.

    The two bytes of a word hold inputs 64 apart (int4_weights.py), which are adjacent here.
    """
    STAGES: gl.constexpr = xs.shape[0]
    SHARES: gl.constexpr = xs.shape[1]
    CHUNKS: gl.constexpr = xs.shape[2]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8, 2], [1, 4, 8, 1], [_SPLITTING, 1, 1, 1], [3, 2, 1, 0]
    )
    for step in range(num_steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        x = xs.index(stage).reshape((SHARES, CHUNKS, 2, _HALF)).permute((0, 1, 3, 2))
        values = x.load(layout).to(gl.float32)
        total = gl.sum(gl.sum(values, 3), 2).permute((1, 0)) * _UNIT  # [chunks, shares]
        none = gl.zeros_like(total)
        by_part = gl.join(gl.join(total, none), gl.join(none, none))
        by_part = by_part.permute((0, 2, 3, 1)).reshape((CHUNKS * _PARTS * SHARES,))
        totals.index(stage).store(by_part)
        first, second, third, fourth = gl.inline_asm_elementwise(
            _SPLIT,
            "=&r,=&r,=&r,=&r,r,r",
            [values.to(gl.float16)],
            dtype=(gl.int8, gl.int8, gl.int8, gl.int8),
            is_pure=True,
            pack=4,
        )
        joined = gl.join(gl.join(first, third), gl.join(second, fourth))
        joined = joined.permute((1, 4, 5, 0, 2, 3))  # [chunks, 2, 2, shares, 64, 2]
        joined = joined.reshape((CHUNKS * _PARTS * SHARES, _CHUNK))
        parts.index(stage).store(joined.to(gl.float8e5, bitcast=True))
        fence_async_shared()  # the parts were not written by TMA
        mbarrier.arrive(is_split.index(stage), count=1)


@gluon.jit
def _multiply(
    parts,
    totals,
    ws,
    gs,
    full,
    is_split,
    empty,
    bias,
    out,
    first_tile,
    num_steps,
    of_tile,
    width,
    HAS_BIAS: gl.constexpr,
    CHUNKS: gl.constexpr,
):
    """The other warps: multiply each stage once it is split, add up, and store tiles.

    A stage is released once its products are done, since they wait for all loads from it: a load
    that nothing waits for may still be in flight when TMA overwrites the stage.
    """
    STAGES: gl.constexpr = ws.shape[0] // CHUNKS
    SHARES: gl.constexpr = ws.shape[1]
    HALVES: gl.constexpr = ws.shape[3]
    ROWS: gl.constexpr = SHARES * HALVES * ws.shape[4]
    COLUMNS: gl.constexpr = _PARTS * SHARES
    of_sums: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, COLUMNS, 32]
    )
    layout: gl.constexpr = gl.DotOperandLayout(0, of_sums, 4)
    of_rows: gl.constexpr = gl.SliceLayout(1, of_sums)
    of_columns: gl.constexpr = gl.SliceLayout(0, of_sums)
    column = gl.arange(0, COLUMNS, of_columns)
    part, share = column // SHARES, column % SHARES
    of_row = gl.arange(0, ROWS, of_rows) // (ROWS // SHARES)
    is_mine = of_row[:, None] == share[None, :]
    # Undoes the units: 2^-9 of the numbers, and eight times the previous part's for each part.
    factor = gl.where(part < 2, gl.where(part == 0, 512.0, 64.0), gl.where(part == 2, 8.0, 1.0))
    zeros = gl.zeros((ROWS, COLUMNS), gl.float32, of_sums)
    sums = zeros
    for step in range(num_steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        mbarrier.wait(is_split.index(stage), step // STAGES & 1)
        found, scale = zeros, zeros
        for index in gl.static_range(CHUNKS):
            at = stage * CHUNKS + index
            x = parts.index(stage).slice(index * COLUMNS, COLUMNS, 0)
            packed = ws.index(at).reshape((ROWS, _BYTES)).load(layout)
            both = gs.index(at).reshape((ROWS,)).load(of_rows)
            total = totals.index(stage).slice(index * COLUMNS, COLUMNS, 0).load(of_columns)
            lower, higher = _unpacked(packed)
            first, second = x.slice(0, _HALF, 1), x.slice(_HALF, _HALF, 1)
            before, scale_before = found, scale
            scale = (both & -256).to(gl.float32, bitcast=True)[:, None]
            found = -(both & 0xFF).to(gl.float32)[:, None] * total[None, :]
            found = warpgroup_mma(lower, first.permute((1, 0)), found, is_async=True)
            found = warpgroup_mma(higher, second.permute((1, 0)), found, is_async=True)
            if index > 0:  # the previous chunk is done
                before = warpgroup_mma_wait(2, deps=(before,))
                sums += before * scale_before
        found = warpgroup_mma_wait(0, deps=(found,))
        mbarrier.arrive(empty.index(stage), count=1)
        sums += found * scale
        if (step + 1) % of_tile == 0:
            products = gl.where(is_mine, sums * factor[None, :], 0.0)
            products = products.reshape((SHARES, ROWS // SHARES, COLUMNS))
            products = gl.sum(gl.sum(products, 2), 0)
            tile = first_tile + step // of_tile
            _store(products, bias, out, tile, width, HAS_BIAS, HALVES)
            sums = zeros


@gluon.jit
def _unpacked(packed):
    """(The lower numbers, the higher) of bytes as e4m3, in units of 2^-9."""
    lower, higher = gl.inline_asm_elementwise(
        _UNPACK, "=r,=r,r", [packed], dtype=(gl.uint8, gl.uint8), is_pure=True, pack=4
    )
    return lower.to(gl.float8e4nv, bitcast=True), higher.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _store(products, bias, out, tile, width, HAS_BIAS: gl.constexpr, HALVES: gl.constexpr):
    """Store products [halves x outputs]; if gated, all gates come before the up outputs."""
    type: gl.constexpr = out.dtype.element_ty
    layout: gl.constexpr = products.type.layout
    OUTPUTS: gl.constexpr = products.shape[0] // HALVES
    if HAS_BIAS:
        places = gl.arange(0, HALVES * OUTPUTS, layout)
        outputs = tile * OUTPUTS + places % OUTPUTS
        at = bias + places // OUTPUTS * width + outputs
        products += gl.load(at, mask=outputs < width, other=0.0).to(gl.float32)
    values = products.to(type)
    if HALVES == 2:  # round the products as if they had been stored
        pairs: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [gl.num_warps(), 1], [1, 0])
        both = values.reshape((2, OUTPUTS)).permute((1, 0))
        gate, up = gl.split(gl.convert_layout(both, pairs))
        gate = gate.to(gl.float32)
        gated = (gate / (1.0 + gl.exp(-gate))).to(type).to(gl.float32)
        values = (gated * up.to(gl.float32)).to(type)
    outputs = tile * OUTPUTS + gl.arange(0, OUTPUTS, values.type.layout)
    gl.store(out + outputs, values, mask=outputs < width)


@launched
@gluon.jit(do_not_specialize=["num_tiles"])
def _int4_row(
    vector,
    matrix,
    groups,
    bias,
    out,
    num_tiles,
    width,
    of_tile,
    HAS_BIAS: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
):
    chunks: gl.constexpr = STAGES * CHUNKS
    SHARES: gl.constexpr = matrix.block_shape[0]
    HALVES: gl.constexpr = matrix.block_shape[2]
    OUTPUTS: gl.constexpr = matrix.block_shape[3]
    COLUMNS: gl.constexpr = _PARTS * SHARES
    box_of_x: gl.constexpr = [STAGES, SHARES, CHUNKS, _CHUNK]
    xs = gl.allocate_shared_memory(vector.dtype, box_of_x, vector.layout)
    words: gl.constexpr = [chunks, SHARES, 1, HALVES, OUTPUTS, _BYTES]
    ws = gl.allocate_shared_memory(gl.uint8, words, matrix.layout)
    scales: gl.constexpr = [chunks, SHARES, 1, HALVES, OUTPUTS]
    gs = gl.allocate_shared_memory(gl.int32, scales, groups.layout)
    of_parts: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    parts = gl.allocate_shared_memory(gl.float8e5, [STAGES, CHUNKS * COLUMNS, _CHUNK], of_parts)
    in_order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    totals = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNKS * COLUMNS], in_order)
    # Not by `_stage_barriers`: memory of barriers that no warp waits for is reused.
    is_split = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(STAGES):
        mbarrier.init(is_split.index(index), count=1)
    full, empty = _stage_barriers(STAGES)
    program = gl.program_id(0)
    first_tile = program * num_tiles // gl.num_programs(0)
    num_steps = ((program + 1) * num_tiles // gl.num_programs(0) - first_tile) * of_tile
    # fmt: off
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    parts, totals, ws, gs, full, is_split, empty, bias, out, first_tile, num_steps,
                    of_tile, width, HAS_BIAS, CHUNKS,
                ),
            ),
            (_split, (xs, parts, totals, full, is_split, num_steps)),
            (
                _fill,
                (
                    vector, matrix, groups, xs, ws, gs, full, empty, first_tile, num_steps,
                    of_tile, CHUNKS, EARLY, PDL,
                ),
            ),
        ],
        [_SPLITTING, 1],
        [_SPLITTER_REGISTERS, _PRODUCER_REGISTERS],
    )
    # fmt: on
