"""Experts of many rows each, on Hopper: persistent programs, a tile's 128 rows by 256 outputs.

    producer     weights ─TMA─► a stage, once it is empty; down product: rows, too
    two warps    gated product: rows of the tile's pairs ─► the stage instead
    four warps   a stage is full ─► wgmma of the tile's rows 0 to 63 ─► it is empty
    four more    likewise its rows 64 to 127, if there are any

The two groups of four warps are not synchronised: while one scales and stores its sums, the other
uses the tensor cores. A stage is 128 bytes of the inputs. The 256 outputs are two halves: 128 of
the gate and the same 128 of up, or 256 consecutive ones. Sums are computed as in grouped_triton.py.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..launched import launched, num_multiprocessors
from ..products.weights import BLOCK, FP8_MAX, LEAST_MAXIMUM
from .experts import BY_BLOCK, BY_ROW, ExpertInputs, ExpertWeights, Fp8Groups
from .fp8_experts_gluon import ask, copy
from .routing_triton import Choice, Order
from .tiles import Persistent

_STEP_BYTES = 128  # of a row: the width of the swizzle in shared memory
_GROUP = gl.constexpr(BLOCK)
_BY_ROW, _BY_BLOCK = gl.constexpr(BY_ROW), gl.constexpr(BY_BLOCK)
_ROWS = gl.constexpr(64)  # of a tile, for each warp group
_LARGEST, _LEAST = gl.constexpr(FP8_MAX), gl.constexpr(LEAST_MAXIMUM)
_WARPS = 4
_REGISTERS = 168  # per thread at launch: 12 warps share the register file
_PRODUCER_REGISTERS = gl.constexpr(40)
_CONSUMER_REGISTERS = gl.constexpr(232)
_GATHERING = gl.constexpr(2)
_GATHERING_LANES = gl.constexpr(64)


def gated_products(
    x: ExpertInputs, weights: ExpertWeights, order: Order, num_chosen: int, plan: Persistent
) -> ExpertInputs:
    """silu(gate) * up of each pair: x [tokens, hidden] -> [pairs by expert, inner], like x.

    `order` has tiles of 128 rows.
    """
    inner, num_pairs = weights.num_outputs // 2, len(order.pairs)
    if isinstance(x, Fp8Groups):
        out = Fp8Groups.empty(num_pairs, inner, x.data.device)
        _launch(x.data, x.scale, weights, order, None, out.data, out.scale, num_chosen, plan)
        return out
    floats = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    _launch(x, x, weights, order, None, floats, floats, num_chosen, plan)
    return floats


def down_products(
    gated: ExpertInputs,
    weights: ExpertWeights,
    order: Order,
    choice: Choice,
    plan: Persistent,
    dtype: torch.dtype,
) -> Tensor:
    """Each pair's output times its weight: [pairs by expert, inner] -> [pairs, hidden], `dtype`."""
    data, scale = (
        (gated.data, gated.scale) if isinstance(gated, Fp8Groups) else (gated, order.tiles)
    )
    rows = _boxes(data, _ROWS.value)
    out = torch.empty((len(order.pairs), weights.num_outputs), dtype=dtype, device=data.device)
    _launch(rows, scale, weights, order, choice.weights, out, out, 1, plan)
    return out


def _launch(
    vectors: Tensor | TensorDescriptor,
    x_scale: Tensor,
    weights: ExpertWeights,
    order: Order,
    shares: Tensor | None,
    out: Tensor,
    out_scale: Tensor,
    num_chosen: int,
    plan: Persistent,
) -> None:
    """The gated product if `shares` is None, else the down product."""
    is_gated, num_inputs = shares is None, weights.num_inputs
    width = BLOCK if is_gated else 2 * BLOCK
    num_outputs = weights.num_outputs // (2 if is_gated else 1)
    assert num_outputs % width == 0, "a block is whole"
    assert num_inputs * weights.values.itemsize % _STEP_BYTES == 0, "a step is whole"
    _wide_tiles[(num_multiprocessors(out.device),)](
        vectors,
        _boxes(weights.values.view(-1, num_inputs), BLOCK),
        x_scale,
        out if weights.scale is None else weights.scale,
        order.pairs,
        order.tiles,
        order.pairs if shares is None else shares,
        out,
        out_scale,
        order.tiles.shape[1],
        weights.num_experts,
        num_chosen,
        num_outputs,
        num_inputs,
        plan.group,
        IS_GATED=is_gated,
        SCALING=weights.scaling,
        STAGES=plan.gated if is_gated else plan.down,
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
        **launch_options(out.device),
    )


def _boxes(matrix: Tensor, rows: int) -> TensorDescriptor:
    """A TMA descriptor that loads a step's inputs of `rows` rows."""
    columns = _STEP_BYTES // matrix.itemsize
    return TensorDescriptor.from_tensor(matrix, [rows, columns], _layout(matrix.itemsize))


@functools.cache
def _layout(itemsize: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * itemsize, rank=2)


@gluon.jit
def _tile_of(tiles, block, num_tiles, num_experts, per_tile, group):
    """A block's index among its tile's blocks of outputs, and the tile's expert, first row and end
    of rows; an unused tile has no rows.

    Up to `group` consecutive blocks have the same outputs of different tiles; the next ones have
    the next outputs.
    """
    is_there = block < num_tiles * per_tile
    block = gl.where(is_there, block, 0)
    first_tile = block // (per_tile * group) * group
    size = gl.minimum(num_tiles - first_tile, group)
    place = block % (per_tile * group)
    tile = first_tile + place % size
    expert = gl.load(tiles + tile)
    row = gl.load(tiles + num_tiles + tile)
    is_there = is_there & (expert < num_experts)
    end = gl.load(tiles + 2 * num_tiles + tile)
    return place // size, expert, row, gl.where(is_there, end, row)


@gluon.jit
def _fill(
    vectors, matrix, tiles, xs, ws, full, empty, num_experts, num_tiles, num_outputs, num_inputs,
    group,
    IS_GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The producer warp: load each stage once it is empty."""
    STAGES: gl.constexpr = full.shape[0]
    COLS: gl.constexpr = ws.shape[2]
    WIDTH: gl.constexpr = _GROUP if IS_GATED else 2 * _GROUP
    NUM_BYTES: gl.constexpr = (2 * _GROUP + (0 if IS_GATED else 2 * _ROWS)) * 128
    per_tile = num_outputs // WIDTH
    of_expert = num_outputs * (2 if IS_GATED else 1)
    up_at = num_outputs if IS_GATED else _GROUP
    wait_for_previous(PDL)
    let_next_in(PDL)
    index = 0
    for block in range(gl.program_id(0), num_tiles * per_tile, gl.num_programs(0)):
        at, expert, row, end = _tile_of(tiles, block, num_tiles, num_experts, per_tile, group)
        output = expert * of_expert + at * WIDTH
        for column in range(0, gl.where(row < end, num_inputs, 0), COLS):
            stage = index % STAGES
            mbarrier.wait(empty.index(stage), (index // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), NUM_BYTES)
            ask(matrix, [output, column], full.index(stage), ws.index(stage * 2))
            ask(matrix, [output + up_at, column], full.index(stage), ws.index(stage * 2 + 1))
            if not IS_GATED:
                ask(vectors, [row, column], full.index(stage), xs.index(stage * 2))
                ask(vectors, [row + _ROWS, column], full.index(stage), xs.index(stage * 2 + 1))
            index += 1


@gluon.jit
def _gather(
    x, tiles, pairs, xs, full, empty, num_experts, num_tiles, num_chosen, num_outputs, num_inputs,
    group,
    IS_GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Two warps: copy the rows of a tile's pairs into each stage once it is empty.

    Does nothing for the down product, whose rows are loaded by TMA.
    """
    if IS_GATED:
        STAGES: gl.constexpr = full.shape[0]
        COLS: gl.constexpr = xs.shape[2]
        layout: gl.constexpr = gl.BlockedLayout([1, COLS // 8], [4, 8], [_GATHERING, 1], [1, 0])
        cols = gl.arange(0, COLS, gl.SliceLayout(0, layout))
        numbers = gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
        per_tile = num_outputs // _GROUP
        wait_for_previous(PDL)
        index = 0
        for block in range(gl.program_id(0), num_tiles * per_tile, gl.num_programs(0)):
            _at, _expert, row, end = _tile_of(tiles, block, num_tiles, num_experts, per_tile, group)
            # A padding row reads an existing row, and is not stored.
            rows = gl.minimum(row + numbers, end - 1)
            others = gl.minimum(row + _ROWS + numbers, end - 1)
            sources = gl.load(pairs + rows, mask=rows >= row, other=0) // num_chosen
            other_sources = gl.load(pairs + others, mask=others >= row, other=0) // num_chosen
            of_rows = sources[:, None] * num_inputs + cols[None, :]
            of_others = other_sources[:, None] * num_inputs + cols[None, :]
            has_others = row + _ROWS < end
            for column in range(0, gl.where(row < end, num_inputs, 0), COLS):
                stage = index % STAGES
                mbarrier.wait(empty.index(stage), (index // STAGES & 1) ^ 1)
                copy(xs.index(stage * 2), x + column + of_rows)
                if has_others:
                    copy(xs.index(stage * 2 + 1), x + column + of_others)
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                index += 1


@gluon.jit
def _multiply(
    tiles, pairs, shares, x_scale, scale, out, out_scale, xs, ws, full, empty, num_experts,
    num_tiles, num_chosen, num_outputs, num_inputs, group,
    PART: gl.constexpr, IS_GATED: gl.constexpr, SCALING: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Four warps: compute half of the rows of each block, taking each stage once it is full.

    `SCALING` is `ExpertWeights.scaling`; unless 0, activations are in FP8, too.
    """
    STAGES: gl.constexpr = full.shape[0]
    COLS: gl.constexpr = ws.shape[2]
    HALVES: gl.constexpr = 2 if IS_GATED else 1
    WIDTH: gl.constexpr = _GROUP if IS_GATED else 2 * _GROUP
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _GROUP, COLS // 4])
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    of_outputs: gl.constexpr = gl.SliceLayout(0, layout)
    stored: gl.constexpr = gl.BlockedLayout([8, 8], [2, 16], [4, 1], [1, 0])
    to_rows: gl.constexpr = gl.SliceLayout(1, stored)
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    zeros = gl.zeros((_ROWS, _GROUP), gl.float32, layout)
    per_tile = num_outputs // WIDTH
    up_at = num_outputs if IS_GATED else _GROUP
    num_steps = num_inputs // COLS
    num_groups = gl.cdiv(num_inputs, _GROUP)
    wait_for_previous(PDL)  # these warps, too, read other kernels' output
    index = 0
    program, programs = gl.program_id(0), gl.num_programs(0)
    at, expert, first_row, end = _tile_of(tiles, program, num_tiles, num_experts, per_tile, group)
    for block in range(program, num_tiles * per_tile, programs):
        # The next block's tile is loaded before this block ends.
        next_one = _tile_of(tiles, block + programs, num_tiles, num_experts, per_tile, group)
        row = first_row + PART * _ROWS
        if row < end:
            first_output = at * WIDTH
            rows = gl.minimum(row + gl.arange(0, _ROWS, of_rows), end - 1)
            of_sources = x_scale
            if SCALING > 0:
                sources = rows
                if IS_GATED:
                    sources = gl.load(pairs + rows) // num_chosen
                of_sources = x_scale + sources * num_groups
            of_block = scale
            if SCALING == _BY_BLOCK:
                of_block = (
                    scale + (expert * HALVES * num_outputs + first_output) // _GROUP * num_groups
                )
            # Scales of the sums, and where to store them, are read before the loop.
            by_output = gl.zeros((_GROUP,), gl.float32, flat)
            up_by_output = by_output
            if SCALING == _BY_ROW:
                outputs = expert * HALVES * num_outputs + first_output + gl.arange(0, _GROUP, flat)
                by_output = gl.load(scale + outputs)
                up_by_output = gl.load(scale + up_at + outputs)
            share = gl.zeros((_ROWS,), gl.float32, flat)
            pair = gl.zeros((_ROWS,), gl.int32, flat)
            if not IS_GATED:
                pair = gl.load(pairs + gl.minimum(row + gl.arange(0, _ROWS, flat), end - 1))
                share = gl.load(shares + pair)
            sums = zeros
            up_sums = zeros
            for step in range(num_steps):
                stage = index % STAGES
                if SCALING > 0:
                    by = gl.load(of_sources + step)
                    up_by = by
                if SCALING == _BY_BLOCK:
                    up_by = by * gl.load(of_block + up_at // _GROUP * num_groups + step)
                    by = by * gl.load(of_block + step)
                mbarrier.wait(full.index(stage), index // STAGES & 1)
                if IS_GATED:
                    fence_async_shared()  # the rows were not written by TMA
                x = xs.index(stage * 2 + PART)
                tile = ws.index(stage * 2).permute((1, 0))
                up_tile = ws.index(stage * 2 + 1).permute((1, 0))
                if SCALING > 0:
                    found = warpgroup_mma(x, tile, zeros, use_acc=False, is_async=True)
                    found = warpgroup_mma_wait(0, deps=(found,))
                    sums += found * by[:, None]
                    found = warpgroup_mma(x, up_tile, zeros, use_acc=False, is_async=True)
                    found = warpgroup_mma_wait(0, deps=(found,))
                    mbarrier.arrive(empty.index(stage), count=1)
                    up_sums += found * up_by[:, None]
                else:
                    sums = warpgroup_mma(x, tile, sums, is_async=True)
                    up_sums = warpgroup_mma(x, up_tile, up_sums, is_async=True)
                    sums, up_sums = warpgroup_mma_wait(2, deps=(sums, up_sums))
                    # The previous step's product is done, so its stage is empty.
                    before = (index + STAGES - 1) % STAGES
                    mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
                index += 1
            if SCALING == 0:
                sums, up_sums = warpgroup_mma_wait(0, deps=(sums, up_sums))
                mbarrier.arrive(empty.index((index + STAGES - 1) % STAGES), count=1)
            if SCALING == _BY_ROW:
                sums *= gl.convert_layout(by_output, of_outputs)[None, :]
                up_sums *= gl.convert_layout(up_by_output, of_outputs)[None, :]
            to = row + gl.arange(0, _ROWS, to_rows)
            is_stored = to < end
            columns = first_output + gl.arange(0, _GROUP, gl.SliceLayout(0, stored))
            if IS_GATED:
                sums = sums / (1.0 + gl.exp(-sums)) * up_sums
                if SCALING > 0:
                    largest = gl.maximum(gl.max(gl.abs(sums), axis=1), _LEAST)
                    # Padding rows write the last row's value again.
                    gl.store(
                        out_scale + rows * per_tile + first_output // _GROUP, largest / _LARGEST
                    )
                    sums *= (_LARGEST / largest)[:, None]
            else:
                of_pairs = gl.convert_layout(share, of_rows)[:, None]
                sums *= of_pairs
                up_sums *= of_pairs
                to = gl.convert_layout(pair, to_rows)
            at_output = out + to.to(gl.int64)[:, None] * num_outputs + columns[None, :]
            values = gl.convert_layout(sums.to(out.dtype.element_ty), stored)
            gl.store(at_output, values, mask=is_stored[:, None])
            if not IS_GATED:
                values = gl.convert_layout(up_sums.to(out.dtype.element_ty), stored)
                gl.store(at_output + _GROUP, values, mask=is_stored[:, None])
        else:
            for _step in range(gl.where(first_row < end, num_steps, 0)):
                mbarrier.wait(full.index(index % STAGES), index // STAGES & 1)
                mbarrier.arrive(empty.index(index % STAGES), count=1)
                index += 1
        at, expert, first_row, end = next_one


@launched
@gluon.jit(do_not_specialize=["num_tiles", "num_experts", "num_chosen", "group"])
def _wide_tiles(
    vectors, matrix, x_scale, scale, pairs, tiles, shares, out, out_scale, num_tiles, num_experts,
    num_chosen, num_outputs, num_inputs, group,
    IS_GATED: gl.constexpr, SCALING: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    type: gl.constexpr = matrix.dtype
    COLS: gl.constexpr = matrix.block_shape[1]
    xs = gl.allocate_shared_memory(type, [STAGES * 2, _ROWS, COLS], matrix.layout)
    ws = gl.allocate_shared_memory(type, [STAGES * 2, _GROUP, COLS], matrix.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Each lane of the gathering warps arrives as well.
        mbarrier.init(full.index(stage), count=1 + (_GATHERING_LANES if IS_GATED else 0))
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    tiles, pairs, shares, x_scale, scale, out, out_scale, xs, ws, full, empty,
                    num_experts, num_tiles, num_chosen, num_outputs, num_inputs, group, 0,
                    IS_GATED, SCALING, PDL,
                ),
            ),
            (
                _multiply,
                (
                    tiles, pairs, shares, x_scale, scale, out, out_scale, xs, ws, full, empty,
                    num_experts, num_tiles, num_chosen, num_outputs, num_inputs, group, 1,
                    IS_GATED, SCALING, PDL,
                ),
            ),
            (
                _fill,
                (
                    vectors, matrix, tiles, xs, ws, full, empty, num_experts, num_tiles,
                    num_outputs, num_inputs, group, IS_GATED, PDL,
                ),
            ),
            (
                _gather,
                (
                    vectors, tiles, pairs, xs, full, empty, num_experts, num_tiles, num_chosen,
                    num_outputs, num_inputs, group, IS_GATED, PDL,
                ),
            ),
        ],
        [4, 1, _GATHERING],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS, _PRODUCER_REGISTERS],
    )
    # fmt: on
