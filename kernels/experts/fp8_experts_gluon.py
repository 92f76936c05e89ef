"""Experts in FP8 for few rows each, on Hopper: persistent programs that keep weights in flight.

    producer   weights ─TMA─► early stages │ preceding kernel has ended │ rows ─TMA─► same stages
               weights, rows ─TMA─► each further stage, once it is empty
    a warp     gated product: rows of the tile's pairs ─► the stages instead
    four more  a stage is full ─► wgmma ─► it is empty; its product, scaled, is added in float32

A block is 128 outputs (of a gated product, of both halves) of a tile of rows. A program has
consecutive blocks of one expert or two; while one block ends, the next one's weights are loaded.
The first expert does not depend on the routing, so its weights are loaded before the routing is
known. Outputs are the rows of wgmma, a tile's rows its columns: 16 or 32 cost no more than one.
Sums are computed as in grouped_triton.py.
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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..launched import launched, next_power_of_2, num_multiprocessors
from ..products.weights import BLOCK, FP8_MAX, LEAST_MAXIMUM
from .experts import BY_BLOCK, ExpertWeights, Fp8Groups
from .routing_triton import Choice, Order
from .tiles import Persistent

_GROUP = gl.constexpr(BLOCK)
_LARGEST, _LEAST = gl.constexpr(FP8_MAX), gl.constexpr(LEAST_MAXIMUM)
_WARPS = 4
_REGISTERS = 128  # per thread at launch; the single warps give most of theirs to the others
_PRODUCER_REGISTERS = gl.constexpr(40)
_LANES = gl.constexpr(32)
_descriptor = gl.shared_memory_descriptor
_view = getattr(_descriptor, "reinterpret", None) or _descriptor._reinterpret
ask = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # older Triton's name
copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


def gated_products(
    x: Fp8Groups, weights: ExpertWeights, order: Order, num_chosen: int, plan: Persistent
) -> Fp8Groups:
    """silu(gate) * up of each pair: x [tokens, hidden] -> [pairs by expert, inner].

    `order` has tiles of `plan.rows`, the experts' own first.
    """
    out = Fp8Groups.empty(len(order.pairs), weights.num_outputs // 2, x.data.device)
    _launch(x.data, x, weights, order, None, out.data, out.scale, num_chosen, plan)
    return out


def down_products(
    gated: Fp8Groups,
    weights: ExpertWeights,
    order: Order,
    choice: Choice,
    plan: Persistent,
    dtype: torch.dtype,
) -> Tensor:
    """Each pair's output times its weight: [pairs by expert, inner] -> [pairs, hidden], `dtype`."""
    rows = TensorDescriptor.from_tensor(gated.data, [plan.rows, BLOCK], _layout())
    size = (len(order.pairs), weights.num_outputs)
    out = torch.empty(size, dtype=dtype, device=order.pairs.device)
    _launch(rows, gated, weights, order, choice.weights, out, out, 1, plan)
    return out


def _launch(
    vectors: Tensor | TensorDescriptor,
    x: Fp8Groups,
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
    num_outputs = weights.num_outputs // (2 if is_gated else 1)
    assert num_inputs % BLOCK == 0 and num_outputs % BLOCK == 0, "a step and a block are whole"
    rows_of_all = weights.values.view(-1, num_inputs)
    _experts[(num_multiprocessors(out.device),)](
        vectors,
        TensorDescriptor.from_tensor(rows_of_all, [BLOCK, BLOCK], _layout()),
        x.scale,
        weights.scale,
        order.pairs,
        order.tiles,
        order.pairs if is_gated else shares,
        out,
        out_scale,
        order.tiles.shape[1],
        weights.num_experts,
        num_chosen,
        num_outputs,
        num_inputs,
        IS_GATED=is_gated,
        IS_BLOCKED=weights.scaling == BY_BLOCK,
        GROUPS=next_power_of_2(num_inputs // BLOCK),
        ROWS=plan.rows,
        STAGES=plan.gated if is_gated else plan.down,
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
        **launch_options(out.device),
    )


@functools.cache
def _layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


@gluon.jit
def _share(num_experts, num_tiles, per_tile):
    """This program's blocks: the first one in the experts' own tiles, the number of consecutive
    ones there, and the total with further tiles' blocks, which programs take round-robin."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    own = num_experts * per_tile
    first = program * own // programs
    count = (program + 1) * own // programs - first
    further = (num_tiles - num_experts) * per_tile
    return first, count, count + (further + programs - 1 - program) // programs


@gluon.jit
def _run(done, first, count, tiles, num_experts, num_tiles, per_tile):
    """The program's next blocks in one tile, after `done` blocks: the first one's index in the
    tile; the tile's expert, first row and end of rows; number of blocks, and of needed ones."""
    is_own = done < count
    further = num_experts * per_tile + gl.program_id(0) + (done - count) * gl.num_programs(0)
    block = gl.where(is_own, first + done, further)
    tile, at = block // per_tile, block % per_tile
    row = gl.load(tiles + num_tiles + tile)
    end = gl.load(tiles + 2 * num_tiles + tile)
    length = gl.where(is_own, gl.minimum(count - done, per_tile - at), 1)
    # The weights of the first own block are loaded before it is known whether it has rows.
    needed = gl.where(row < end, length, gl.where(is_own & (done == 0), 1, 0))
    return at, gl.load(tiles + tile), row, end, length, needed


@gluon.jit
def _load_weight(matrix, row, column, num_outputs, full, ws, stage, HALVES: gl.constexpr, pred):
    """Start loading a stage's part of the weight."""
    for half in gl.static_range(HALVES):
        to = ws.index(stage * HALVES + half)
        ask(matrix, [row + half * num_outputs, column], full.index(stage), to, pred=pred)


@gluon.jit
def _fill(
    vectors, matrix, tiles, xs, ws, full, empty, num_experts, num_tiles, num_outputs, num_steps,
    HALVES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The producer warp: load each stage once it is empty."""
    STAGES: gl.constexpr = xs.shape[0]
    ROWS: gl.constexpr = xs.shape[1] if HALVES == 1 else 0
    num_bytes: gl.constexpr = (ROWS + HALVES * _GROUP) * _GROUP
    per_tile = num_outputs // _GROUP
    first, count, all = _share(num_experts, num_tiles, per_tile)
    early = gl.minimum(gl.where(count > 0, num_steps, 0), STAGES)
    row_of_first = (first // per_tile * HALVES * per_tile + first % per_tile) * _GROUP
    for step in range(early):
        mbarrier.expect(full.index(step), num_bytes)
        _load_weight(matrix, row_of_first, step * _GROUP, num_outputs, full, ws, step, HALVES, True)
    wait_for_previous(PDL)
    let_next_in(PDL)
    done = 0
    index = 0
    while done < all:
        at, expert, row, _end, length, needed = _run(
            done, first, count, tiles, num_experts, num_tiles, per_tile
        )
        first_output = (expert * HALVES * per_tile + at) * _GROUP
        for step in range(needed * num_steps):
            stage = index % STAGES
            # Early stages are loaded, and may be emptied before this warp gets here: no wait.
            is_left = index >= early
            mbarrier.wait(empty.index(stage), (index // STAGES & 1) ^ 1, pred=is_left)
            column = step % num_steps * _GROUP
            mbarrier.expect(full.index(stage), num_bytes, pred=is_left)
            output = first_output + step // num_steps * _GROUP
            _load_weight(matrix, output, column, num_outputs, full, ws, stage, HALVES, is_left)
            if HALVES == 1:
                ask(vectors, [row, column], full.index(stage), xs.index(stage))
            index += 1
        done += length


@gluon.jit
def _gather(
    x, tiles, pairs, xs, full, empty, num_experts, num_tiles, num_chosen, num_outputs, num_steps,
    IS_GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One warp: copy the rows of a tile's pairs into each stage once it is empty.

    Does nothing for the down product, whose rows are loaded by TMA.
    """
    if IS_GATED:
        STAGES: gl.constexpr = xs.shape[0]
        ROWS: gl.constexpr = xs.shape[1]
        layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [1, 1], [1, 0])
        cols = gl.arange(0, _GROUP, gl.SliceLayout(0, layout))
        per_tile = num_outputs // _GROUP
        first, count, all = _share(num_experts, num_tiles, per_tile)
        wait_for_previous(PDL)
        done = 0
        index = 0
        while done < all:
            _at, _expert, row, end, length, needed = _run(
                done, first, count, tiles, num_experts, num_tiles, per_tile
            )
            rows = gl.minimum(row + gl.arange(0, ROWS, gl.SliceLayout(1, layout)), end - 1)
            sources = gl.load(pairs + rows, mask=rows >= row, other=0) // num_chosen
            vectors = x + sources[:, None] * (num_steps * _GROUP) + cols[None, :]
            for step in range(needed * num_steps):
                stage = index % STAGES
                mbarrier.wait(empty.index(stage), (index // STAGES & 1) ^ 1)
                copy(xs.index(stage), vectors + step % num_steps * _GROUP)
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                index += 1
            done += length


@gluon.jit
def _multiply(
    tiles, pairs, shares, x_scale, scale, out, out_scale, xs, ws, full, empty, scales,
    num_experts, num_tiles, num_chosen, num_outputs, num_steps,
    HALVES: gl.constexpr, IS_BLOCKED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Four warps: compute block after block, taking each stage once it is full."""
    STAGES: gl.constexpr = xs.shape[0]
    ROWS: gl.constexpr = xs.shape[1]
    GROUPS: gl.constexpr = scales.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    of_rows: gl.constexpr = gl.SliceLayout(0, layout)
    of_outputs: gl.constexpr = gl.SliceLayout(1, layout)
    by_group: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, 4], [0, 1])
    table = _view(scales, gl.float32, [GROUPS, ROWS], flat)
    groups = gl.arange(0, GROUPS, gl.SliceLayout(1, by_group))
    zeros = gl.zeros((_GROUP, ROWS), gl.float32, layout)
    per_tile = num_outputs // _GROUP
    first, count, all = _share(num_experts, num_tiles, per_tile)
    wait_for_previous(PDL)  # these warps, too, read other kernels' output
    done = 0
    index = 0
    while done < all:
        at, expert, row, end, length, needed = _run(
            done, first, count, tiles, num_experts, num_tiles, per_tile
        )
        # A padding row reads an existing row, and is not stored.
        sources = gl.minimum(row + gl.arange(0, ROWS, gl.SliceLayout(0, by_group)), end - 1)
        is_row = sources >= row
        if HALVES == 2:
            sources = gl.load(pairs + sources, mask=is_row, other=0) // num_chosen
        of_sources = x_scale + sources[None, :] * num_steps + groups[:, None]
        is_there = (groups < num_steps)[:, None] & is_row[None, :]
        table.store(gl.load(of_sources, mask=is_there, other=0.0))
        rows = row + gl.arange(0, ROWS, of_rows)
        share = gl.full((ROWS,), 1.0, gl.float32, of_rows)
        to = row + gl.arange(0, ROWS, gl.SliceLayout(0, stored))
        is_stored = to < end
        if HALVES == 1:
            pair = gl.load(pairs + rows, mask=rows < end, other=0)
            share = gl.load(shares + pair, mask=rows < end, other=0.0)
            to = gl.load(pairs + to, mask=is_stored, other=0)
        for block in range(at, at + needed):
            outputs = block * _GROUP + gl.arange(0, _GROUP, of_outputs)
            of_block = scale + (expert * HALVES * per_tile + block) * num_steps
            by_output = outputs.to(gl.float32)
            up_by_output = by_output
            if not IS_BLOCKED:
                by_output = gl.load(scale + expert * HALVES * num_outputs + outputs)
                if HALVES == 2:
                    up_by_output = gl.load(scale + (expert * 2 + 1) * num_outputs + outputs)
            sums = zeros
            up_sums = zeros
            for step in range(num_steps):
                of_step = 1.0
                up_of_step = 1.0
                if IS_BLOCKED:
                    of_step = gl.load(of_block + step)
                    if HALVES == 2:
                        up_of_step = gl.load(of_block + per_tile * num_steps + step)
                stage = index % STAGES
                mbarrier.wait(full.index(stage), index // STAGES & 1)
                if HALVES == 2:
                    fence_async_shared()  # the rows were not written by TMA
                x = xs.index(stage).permute((1, 0))
                tile = ws.index(stage * HALVES)
                found = warpgroup_mma(tile, x, zeros, use_acc=False, is_async=True)
                up = found
                if HALVES == 2:
                    tile = ws.index(stage * HALVES + 1)
                    up = warpgroup_mma(tile, x, zeros, use_acc=False, is_async=True)
                    found, up = warpgroup_mma_wait(0, deps=(found, up))
                else:
                    found = warpgroup_mma_wait(0, deps=(found,))
                mbarrier.arrive(empty.index(stage), count=1)
                by = scales.index(step).load(of_rows)
                sums += found * (by * of_step)[None, :]
                if HALVES == 2:
                    up_sums += up * (by * up_of_step)[None, :]
                index += 1
            if not IS_BLOCKED:
                sums *= by_output[:, None]
            if HALVES == 2:
                if not IS_BLOCKED:
                    up_sums *= up_by_output[:, None]
                sums = sums / (1.0 + gl.exp(-sums)) * up_sums
                largest = gl.maximum(gl.max(gl.abs(sums), axis=0), _LEAST)
                gl.store(out_scale + rows * per_tile + block, largest / _LARGEST, mask=rows < end)
                sums *= (_LARGEST / largest)[None, :]
            else:
                sums *= share[None, :]
            values = gl.convert_layout(sums.to(out.dtype.element_ty), stored)
            columns = block * _GROUP + gl.arange(0, _GROUP, gl.SliceLayout(1, stored))
            at_output = out + to[None, :] * num_outputs + columns[:, None]
            gl.store(at_output, values, mask=is_stored[None, :])
        done += length


@launched
@gluon.jit(do_not_specialize=["num_tiles", "num_experts", "num_chosen"])
def _experts(
    vectors, matrix, x_scale, scale, pairs, tiles, shares, out, out_scale, num_tiles, num_experts,
    num_chosen, num_outputs, num_inputs,
    IS_GATED: gl.constexpr, IS_BLOCKED: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = 2 if IS_GATED else 1
    type: gl.constexpr = matrix.dtype
    xs = gl.allocate_shared_memory(type, [STAGES, ROWS, _GROUP], matrix.layout)
    ws = gl.allocate_shared_memory(type, [STAGES * HALVES, _GROUP, _GROUP], matrix.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    scales = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS], flat)
    for stage in gl.static_range(STAGES):
        # Each lane of the gathering warp arrives as well.
        mbarrier.init(full.index(stage), count=1 + (_LANES if IS_GATED else 0))
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    num_steps = num_inputs // _GROUP
    # fmt: off
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    tiles, pairs, shares, x_scale, scale, out, out_scale, xs, ws, full, empty,
                    scales, num_experts, num_tiles, num_chosen, num_outputs, num_steps, HALVES,
                    IS_BLOCKED, PDL,
                ),
            ),
            (
                _fill,
                (
                    vectors, matrix, tiles, xs, ws, full, empty, num_experts, num_tiles,
                    num_outputs, num_steps, HALVES, PDL,
                ),
            ),
            (
                _gather,
                (
                    vectors, tiles, pairs, xs, full, empty, num_experts, num_tiles, num_chosen,
                    num_outputs, num_steps, IS_GATED, PDL,
                ),
            ),
        ],
        [1, 1],
        [_PRODUCER_REGISTERS, _PRODUCER_REGISTERS],
    )
    # fmt: on
