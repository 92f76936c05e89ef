"""A weight in FP8 times up to 256 vectors in FP8 on Hopper, pipelined as streamed_product_gluon.py.

    producer   weight ─TMA─► early stages │ preceding kernel has ended │ vectors ─TMA─► same stages
               weight, vectors ─TMA─► each further stage, once it is empty
    others     a stage is full ─► wgmma ─► it is empty; its product, scaled, is added in float32

wgmma takes 64 rows. These are vectors, of which only those with memory (16, 32 or 64) are loaded;
or, transposed (`is_turned`), outputs, with tiles of up to 128 vectors. Results of rows that are not
loaded are not used. A stage has some chunks of 128 inputs, each summed separately: the tensor cores
add FP8 products with fewer bits than float32 has, and each chunk has its own block scale.

Few outputs of many inputs would keep few multiprocessors busy: then programs have shares of the
inputs (split-K), and write a summand each.
"""

from __future__ import annotations

import functools
from dataclasses import replace

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
from ..launched import cdiv, launched, next_power_of_2
from .fp8_triton import Fp8Stages
from .streamed_product_gluon import _async_load, _stage_barriers
from .weights import BLOCK, BlockScaled, Fp8Rows, Fp8Weight

_TILE_ROWS = gl.constexpr(64)  # of a warp group
_GROUP = gl.constexpr(BLOCK)
_MOST_ROWS = 128  # of a tile
_SHARED_BYTES = 226 << 10  # per program, less what Triton itself needs
_PRODUCER_REGISTERS = gl.constexpr(24)
_SCALES_AT_ONCE = gl.constexpr(32)
_descriptor = gl.shared_memory_descriptor
_view = getattr(_descriptor, "reinterpret", None) or _descriptor._reinterpret


def fp8_streamed_product(
    x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, stages: Fp8Stages
) -> Tensor:
    """x [rows, inputs] @ weight [outputs, inputs]^T + bias -> [rows, outputs] in bfloat16.

    At most 64 rows, or 256 if transposed and scaled by groups, with room for a power of 2; inputs a
    multiple of 128. A row's sums do not depend on other rows.
    """
    return fp8_streamed_summands(x, weight, bias, replace(stages, shares=1))[:, 0]


def fp8_streamed_summands(
    x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, stages: Fp8Stages
) -> Tensor:
    """The partial product of each split-K share: [rows, shares, outputs]."""
    num_outputs, num_inputs = weight.shape
    data, _ = x.with_room
    is_grouped = isinstance(weight, BlockScaled) or x.scale.shape[1] > 1
    num_steps = cdiv(num_inputs, BLOCK * stages.chunks)
    shares = min(stages.shares, num_steps)
    groups = next_power_of_2(cdiv(num_steps, shares) * stages.chunks) if is_grouped else 0
    rows = min(x.room, _MOST_ROWS)
    stages = fitting(stages, rows, groups)
    out = torch.empty((len(x), shares, num_outputs), dtype=x.dtype, device=data.device)
    _fp8_streamed[(cdiv(num_outputs, stages.outputs), cdiv(len(x), rows), shares)](
        _boxes(data, rows),
        _boxes(weight.data, stages.outputs),
        x.scale,
        weight.scale,
        weight.scale if bias is None else bias,
        out,
        len(x),
        x.room,
        num_outputs,
        num_inputs,
        HAS_BIAS=bias is not None,
        IS_BLOCKED=isinstance(weight, BlockScaled),
        GROUPS=groups,
        ROWS=rows,
        OUTPUTS=stages.outputs,
        CHUNKS=stages.chunks,
        STAGES=stages.count,
        EARLY=stages.early,
        SHARES=shares,
        IS_TURNED=stages.is_turned,
        WARPS=stages.warps,
        num_warps=stages.warps,
        maxnreg=registers(stages, rows),
        **launch_options(data.device),
    )
    return out


def fitting(stages: Fp8Stages, room: int, groups: int) -> Fp8Stages:
    """`stages` limited to what fits into shared memory beside the table of scales."""
    x_rows = room if stages.is_turned else _TILE_ROWS.value
    w_rows = max(_TILE_ROWS.value, stages.outputs) if stages.is_turned else stages.outputs
    each = (x_rows + w_rows) * BLOCK * stages.chunks + 16
    count = min(stages.count, (_SHARED_BYTES - 4 * groups * x_rows) // each)
    return replace(stages, count=count, early=min(stages.early, count))


def registers(stages: Fp8Stages, room: int) -> int:
    """Registers per thread that multiplies: few, so that the next kernel's programs start early.
    With more than four warps, the average with the producer, which Triton rounds up to four."""
    if not stages.is_turned:
        return 64 + stages.outputs // 2 * (1 + stages.chunks)
    sums = max(64, stages.outputs) * room // (32 * stages.warps)
    wanted = 48 + sums * (1 + stages.chunks)
    if stages.warps == 4:
        return wanted
    others: int = 4 * _PRODUCER_REGISTERS.value
    return cdiv(cdiv(min(240, wanted) * stages.warps + others, stages.warps + 4), 8) * 8


def _boxes(matrix: Tensor, num_rows: int) -> TensorDescriptor:
    """A TMA descriptor that loads boxes of this size."""
    return TensorDescriptor.from_tensor(matrix, [num_rows, BLOCK], _layout(num_rows))


@functools.cache
def _layout(num_rows: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([num_rows, BLOCK], gl.float8e4nv)


@gluon.jit
def _load_weight(matrix, step, full, ws, stage, ROWS: gl.constexpr, CHUNKS: gl.constexpr):
    """Start loading a stage's part of the weight; `full` expects the vectors' bytes too."""
    OUTPUTS: gl.constexpr = matrix.block_shape[0]
    num_bytes: gl.constexpr = (ROWS + OUTPUTS) * _GROUP * CHUNKS
    mbarrier.expect(full.index(stage), num_bytes)
    for chunk in gl.static_range(CHUNKS):
        corner = [gl.program_id(0) * OUTPUTS, (step * CHUNKS + chunk) * _GROUP]
        at = ws.index(stage * CHUNKS + chunk)
        if ws.shape[1] > OUTPUTS:
            at = at.slice(0, OUTPUTS, 0)
        _async_load(matrix, corner, full.index(stage), at)


@gluon.jit
def _load_vectors(vectors, step, full, xs, stage, ROWS: gl.constexpr, CHUNKS: gl.constexpr):
    first = gl.program_id(1) * ROWS
    for chunk in gl.static_range(CHUNKS):
        at = xs.index(stage * CHUNKS + chunk)
        if xs.shape[1] > ROWS:
            at = at.slice(0, ROWS, 0)
        _async_load(vectors, [first, (step * CHUNKS + chunk) * _GROUP], full.index(stage), at)


@gluon.jit
def _fill(
    vectors,
    matrix,
    xs,
    ws,
    full,
    empty,
    begin,
    num_steps,
    ROWS: gl.constexpr,
    CHUNKS: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
):
    """The producer warp: load each stage once it is empty."""
    STAGES: gl.constexpr = xs.shape[0] // CHUNKS
    for step in range(gl.minimum(EARLY, num_steps)):
        _load_weight(matrix, begin + step, full, ws, step, ROWS, CHUNKS)
    wait_for_previous(PDL)
    let_next_in(PDL)
    for step in range(gl.minimum(EARLY, num_steps)):
        _load_vectors(vectors, begin + step, full, xs, step, ROWS, CHUNKS)
    for step in range(EARLY, num_steps):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        _load_weight(matrix, begin + step, full, ws, stage, ROWS, CHUNKS)
        _load_vectors(vectors, begin + step, full, xs, stage, ROWS, CHUNKS)


@gluon.jit
def _bring_scales(
    x_scale,
    of_blocks,
    scales,
    begin,
    num_groups,
    room,
    IS_BLOCKED: gl.constexpr,
    ROWS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Write the factor of each chunk's and row's product into `scales` [chunks, rows]: a load in
    the loop over the stages would stall every stage."""
    GROUPS: gl.constexpr = scales.shape[0]
    X_ROWS: gl.constexpr = scales.shape[1]
    PART: gl.constexpr = _SCALES_AT_ONCE if GROUPS > _SCALES_AT_ONCE else GROUPS
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 4], [128 // ROWS, ROWS // 4], [gl.num_warps(), 1], [1, 0]
    )
    order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    table = _view(scales, gl.float32, [GROUPS, X_ROWS], order)
    if X_ROWS > ROWS:
        table = table.slice(0, ROWS, 1)
    rows = gl.program_id(1) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    parts = gl.arange(0, PART, gl.SliceLayout(1, layout))
    wait_for_previous(PDL)  # these warps, too, read other kernels' output
    for first in gl.static_range(0, GROUPS, PART):
        groups = begin + first + parts
        is_there = groups < num_groups
        at = x_scale + groups[:, None] * room + rows[None, :]
        of_rows = gl.load(at, mask=is_there[:, None] & (rows < room)[None, :], other=0.0)
        if IS_BLOCKED:
            of_rows *= gl.load(of_blocks + groups, mask=is_there, other=0.0)[:, None]
        table.slice(first, PART, 0).store(of_rows)


@gluon.jit
def _multiply(
    xs,
    ws,
    full,
    empty,
    scales,
    x_scale,
    scale,
    room,
    num_outputs,
    num_groups,
    begin,
    num_steps,
    sums,
    OUTPUTS: gl.constexpr,
    IS_BLOCKED: gl.constexpr,
    IS_GROUPED: gl.constexpr,
    ROWS: gl.constexpr,
    CHUNKS: gl.constexpr,
    IS_TURNED: gl.constexpr,
    PDL: gl.constexpr,
):
    """All warps but the producer: multiply each stage once it is full, and add up."""
    STAGES: gl.constexpr = xs.shape[0] // CHUNKS
    layout: gl.constexpr = sums.type.layout
    ROW_AXIS: gl.constexpr = 0 if IS_TURNED else 1  # of outputs: values per vector lack it
    of_rows: gl.constexpr = gl.SliceLayout(ROW_AXIS, layout)
    rows = gl.program_id(1) * ROWS + gl.arange(0, xs.shape[1], of_rows)
    zeros = gl.zeros((sums.shape[0], sums.shape[1]), gl.float32, layout)
    first_output = gl.program_id(0) * OUTPUTS
    places = gl.arange(0, ws.shape[1], gl.SliceLayout(1 - ROW_AXIS, layout))
    outputs = first_output + places
    is_output = (places < OUTPUTS) & (outputs < num_outputs)
    of_outputs = gl.full([ws.shape[1]], 1.0, gl.float32, gl.SliceLayout(1 - ROW_AXIS, layout))
    of_blocks = scale
    if IS_BLOCKED:  # all outputs of a program are in one row of blocks
        of_blocks += first_output // _GROUP * num_groups
    else:
        of_outputs = gl.load(scale + outputs, mask=is_output, other=0.0)
    if IS_GROUPED:
        first_group = begin * CHUNKS
        # fmt: off
        _bring_scales(
            x_scale, of_blocks, scales, first_group, num_groups, room, IS_BLOCKED, ROWS, PDL
        )
        # fmt: on
    for step in range(num_steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        first = _begin(xs.index(stage * CHUNKS), ws.index(stage * CHUNKS), zeros, IS_TURNED)
        if CHUNKS == 2:
            second = _begin(xs.index(stage * 2 + 1), ws.index(stage * 2 + 1), zeros, IS_TURNED)
            first, second = warpgroup_mma_wait(0, deps=(first, second))
            mbarrier.arrive(empty.index(stage), count=1)
            if IS_GROUPED:
                second *= gl.expand_dims(scales.index(step * 2 + 1).load(of_rows), ROW_AXIS)
        else:
            first = warpgroup_mma_wait(0, deps=(first,))
            mbarrier.arrive(empty.index(stage), count=1)
        if IS_GROUPED:
            first *= gl.expand_dims(scales.index(step * CHUNKS).load(of_rows), ROW_AXIS)
        sums += first
        if CHUNKS == 2:
            sums += second
    return sums, rows, outputs, is_output, of_outputs


@gluon.jit
def _begin(x, tile, zeros, IS_TURNED: gl.constexpr):
    """Start a chunk's product of all vectors and outputs, transposed if IS_TURNED."""
    if IS_TURNED:
        found = warpgroup_mma(tile, x.permute((1, 0)), zeros, use_acc=False, is_async=True)
    else:
        found = warpgroup_mma(x, tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return found


@launched
@gluon.jit(do_not_specialize=["num_rows", "room"])
def _fp8_streamed(
    vectors,
    matrix,
    x_scale,
    scale,
    bias,
    out,
    num_rows,
    room,
    num_outputs,
    num_inputs,
    HAS_BIAS: gl.constexpr,
    IS_BLOCKED: gl.constexpr,  # the weight has block scales
    GROUPS: gl.constexpr,  # scales of a vector, padded to a power of 2; 0 if it has one
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
    SHARES: gl.constexpr,
    IS_TURNED: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    type: gl.constexpr = vectors.dtype
    chunks: gl.constexpr = STAGES * CHUNKS
    # wgmma has at least 64 rows, and as many columns as needed.
    X_ROWS: gl.constexpr = ROWS if IS_TURNED else _TILE_ROWS
    W_ROWS: gl.constexpr = _TILE_ROWS if IS_TURNED and OUTPUTS < 64 else OUTPUTS
    COLUMNS: gl.constexpr = X_ROWS if IS_TURNED else W_ROWS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 32])
    xs = gl.allocate_shared_memory(type, [chunks, X_ROWS, _GROUP], vectors.layout)
    ws = gl.allocate_shared_memory(type, [chunks, W_ROWS, _GROUP], matrix.layout)
    full, empty = _stage_barriers(STAGES)
    IS_GROUPED: gl.constexpr = GROUPS > 0
    scales = gl.allocate_shared_memory(
        gl.float32,
        [GROUPS if IS_GROUPED else 1, X_ROWS],
        gl.SwizzledSharedLayout(1, 1, 1, order=[0]),
    )
    num_groups = gl.cdiv(num_inputs, _GROUP)
    num_steps, share = gl.cdiv(num_groups, CHUNKS), gl.program_id(2)
    begin = num_steps * share // SHARES
    num_steps = num_steps * (share + 1) // SHARES - begin
    if IS_TURNED:
        sums = gl.zeros((W_ROWS, X_ROWS), gl.float32, layout)
    else:
        sums = gl.zeros((X_ROWS, W_ROWS), gl.float32, layout)
    sums, rows, outputs, is_output, of_outputs = gl.warp_specialize(
        [
            (
                _multiply,
                (
                    xs,
                    ws,
                    full,
                    empty,
                    scales,
                    x_scale,
                    scale,
                    room,
                    num_outputs,
                    num_groups,
                    begin,
                    num_steps,
                    sums,
                    OUTPUTS,
                    IS_BLOCKED,
                    IS_GROUPED,
                    ROWS,
                    CHUNKS,
                    IS_TURNED,
                    PDL,
                ),
            ),
            (
                _fill,
                (vectors, matrix, xs, ws, full, empty, begin, num_steps, ROWS, CHUNKS, EARLY, PDL),
            ),
        ],
        [1],
        [_PRODUCER_REGISTERS],
    )
    ROW_AXIS: gl.constexpr = 0 if IS_TURNED else 1
    is_row = rows < num_rows
    if not IS_BLOCKED:
        by = gl.expand_dims(of_outputs, 1 - ROW_AXIS)
        if not IS_GROUPED:
            wait_for_previous(PDL)  # these warps, too, read other kernels' output
            of_rows = gl.load(x_scale + rows, mask=is_row, other=0.0)
            by = gl.expand_dims(of_rows, ROW_AXIS) * by
        sums *= by
    if HAS_BIAS:
        is_added = is_output & (share == 0)
        added = gl.load(bias + outputs, mask=is_added, other=0.0).to(gl.float32)
        sums += gl.expand_dims(added, 1 - ROW_AXIS)
    values = sums.to(gl.bfloat16)
    if IS_TURNED:  # store a vector's outputs contiguously
        stored: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
        values = gl.convert_layout(values, stored)
        places = gl.arange(0, W_ROWS, gl.SliceLayout(1, stored))
        outputs = gl.program_id(0) * OUTPUTS + places
        rows = gl.program_id(1) * ROWS + gl.arange(0, X_ROWS, gl.SliceLayout(0, stored))
        is_row, is_output = rows < num_rows, (places < OUTPUTS) & (outputs < num_outputs)
    rows, outputs = gl.expand_dims(rows, ROW_AXIS), gl.expand_dims(outputs, 1 - ROW_AXIS)
    is_stored = gl.expand_dims(is_row, ROW_AXIS) & gl.expand_dims(is_output, 1 - ROW_AXIS)
    gl.store(out + (rows * SHARES + share) * num_outputs + outputs, values, mask=is_stored)
