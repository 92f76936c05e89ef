"""Triton kernels of `lora.AddsAdapters`: shrink computes x A^T, split over parts of the inputs, and
expand multiplies the result by B^T and adds it to y.

    shrink   (block of rows, part of the inputs, projection)   ─► [parts, rows, projections, rank]
    expand   (block of rows, tile of outputs, projection)      sums the parts, adds to y in place;
             gate and up: both in one program, which then computes silu(gate) * up

The rows of a block have the same adapter or none, so its weights are read once for up to 16 rows.
Kernels read the rows of each block from a fixed address: a CUDA graph can be replayed with any
mixture of adapters. Sums are in float32 and in a fixed order.

Shrink is launched right after the product with the weights and runs concurrently with it
(dependent_launch.py); expand has loaded B into registers before both have ended.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..launched import cdiv, launched, next_power_of_2
from ..row_room import empty_rows
from ..upload import upload_into
from .lora import BLOCK_ROWS, AddsAdapters, Int32s, Place, RowGroups, num_blocks

_PART_INPUTS = 1024
_TILE_WEIGHTS = 4096  # per iteration of shrink: few enough to be resident beside a product
_TILE_OUTPUTS = 64
_SHRINK_WARPS, _EXPAND_WARPS = 2, 1


@launched
@triton.jit
def _shrink(
    x, bank, ranks, rows, blocks, shrunk,
    num_rows, num_blocks, num_inputs, part_inputs, inputs_at,
    slot_stride, row_stride, x_stride,
    BLOCK: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, PROJECTIONS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    block, part, projection = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    let_next_in(PDL)
    slot = tl.load(blocks + block)
    if slot < 0:
        wait_for_previous(PDL)
        return
    first, end = tl.load(blocks + num_blocks + block), tl.load(blocks + 2 * num_blocks + block)
    places = first + tl.arange(0, BLOCK)
    is_row = places < end
    row = tl.load(rows + places, mask=is_row, other=0).to(tl.int64)
    rank = tl.arange(0, RANK)
    is_rank = rank < tl.load(ranks + slot)
    weights = bank + slot.to(tl.int64) * slot_stride + inputs_at + projection * num_inputs
    weights += rank[None, :].to(tl.int64) * row_stride
    total = tl.zeros((BLOCK, RANK), tl.float32)
    end_input = tl.minimum(num_inputs, (part + 1) * part_inputs)
    for begin in range(part * part_inputs, end_input, TILE):
        column = begin + tl.arange(0, TILE)
        is_input = column < end_input
        taken = tl.load(
            x + row[:, None] * x_stride + column[None, :],
            mask=is_row[:, None] & is_input[None, :],
            other=0.0,
        )
        weight = tl.load(
            weights + column[:, None], mask=is_input[:, None] & is_rank[None, :], other=0.0
        )
        total = tl.dot(taken, weight, total, input_precision="ieee")
    out = shrunk + ((part * num_rows + row[:, None]) * PROJECTIONS + projection) * RANK
    # Wait for the product before writing: expand waits for this kernel alone and reads the product;
    # and `shrunk` may be in scratch memory of the product, which torch frees after its launch.
    wait_for_previous(PDL)
    tl.store(out + rank[None, :], total, mask=is_row[:, None])


@triton.jit
def _part_of_b(
    bank, slot, num_ranks, outputs_at, column, is_output, slot_stride, row_stride,
    RANK: tl.constexpr,
):  # fmt: skip
    """A tile of B [rank, columns]; zeros beyond the adapter's rank and the outputs."""
    rank = tl.arange(0, RANK)
    at = bank + slot.to(tl.int64) * slot_stride + outputs_at + column
    at = at[None, :] + rank[:, None].to(tl.int64) * row_stride
    return tl.load(at, mask=(rank < num_ranks)[:, None] & is_output[None, :], other=0.0)


@triton.jit
def _whole(
    shrunk, row, is_row, projection, num_rows,
    RANK: tl.constexpr, PROJECTIONS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """x A^T of the rows of a block [rows, rank]: the sum over the parts of shrink."""
    at = shrunk + (row[:, None] * PROJECTIONS + projection) * RANK + tl.arange(0, RANK)[None, :]
    total = tl.zeros(at.shape, tl.float32)
    for _ in tl.static_range(PARTS):
        total += tl.load(at, mask=is_row[:, None], other=0.0)
        at += num_rows * PROJECTIONS * RANK
    return total


@launched
@triton.jit
def _expand(
    y, bank, ranks, rows, blocks, shrunk,
    num_rows, num_blocks, outputs_at, outputs0, outputs1, outputs2,
    slot_stride, row_stride, y_stride,
    BLOCK: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr,
    PROJECTIONS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block, tile, projection = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    let_next_in(PDL)
    slot = tl.load(blocks + block)
    before = tl.where(projection == 0, 0, tl.where(projection == 1, outputs0, outputs0 + outputs1))
    count = tl.where(projection == 0, outputs0, tl.where(projection == 1, outputs1, outputs2))
    if (slot < 0) | (tile * TILE >= count):
        wait_for_previous(PDL)
        return
    first, end = tl.load(blocks + num_blocks + block), tl.load(blocks + 2 * num_blocks + block)
    places = first + tl.arange(0, BLOCK)
    is_row = places < end
    row = tl.load(rows + places, mask=is_row, other=0).to(tl.int64)
    column = tile * TILE + tl.arange(0, TILE)
    is_output = column < count
    weight = _part_of_b(
        bank, slot, tl.load(ranks + slot), outputs_at + before, column, is_output,
        slot_stride, row_stride, RANK,
    )  # fmt: skip
    out = y + row[:, None] * y_stride + before + column[None, :]
    mask = is_row[:, None] & is_output[None, :]
    wait_for_previous(PDL)
    value = tl.load(out, mask=mask, other=0.0)
    taken = _whole(shrunk, row, is_row, projection, num_rows, RANK, PROJECTIONS, PARTS)
    added = tl.dot(taken.to(weight.dtype), weight, input_precision="ieee")
    tl.store(out, (value + added).to(y.dtype.element_ty), mask=mask)


@launched
@triton.jit
def _expand_gated(
    y, out, bank, ranks, rows, blocks, shrunk,
    num_rows, num_blocks, outputs_at, width,
    slot_stride, row_stride, y_stride,
    BLOCK: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    block, tile = tl.program_id(0), tl.program_id(1)
    let_next_in(PDL)
    first, end = tl.load(blocks + num_blocks + block), tl.load(blocks + 2 * num_blocks + block)
    if first == end:
        wait_for_previous(PDL)
        return
    slot = tl.load(blocks + block)
    has_adapter = slot >= 0
    places = first + tl.arange(0, BLOCK)
    is_row = places < end
    row = tl.load(rows + places, mask=is_row, other=0).to(tl.int64)
    column = tile * TILE + tl.arange(0, TILE)
    is_output = column < width
    num_ranks = tl.where(has_adapter, tl.load(ranks + tl.maximum(slot, 0)), 0)
    of_gate = _part_of_b(
        bank, slot, num_ranks, outputs_at, column, is_output, slot_stride, row_stride, RANK
    )
    of_up = _part_of_b(
        bank, slot, num_ranks, outputs_at + width, column, is_output, slot_stride, row_stride, RANK
    )
    at = y + row[:, None] * y_stride + column[None, :]
    mask = is_row[:, None] & is_output[None, :]
    wait_for_previous(PDL)
    gate = tl.load(at, mask=mask, other=0.0)
    up = tl.load(at + width, mask=mask, other=0.0)
    has_row = places < tl.where(has_adapter, end, first)
    taken = _whole(shrunk, row, has_row, 0, num_rows, RANK, 2, PARTS).to(of_gate.dtype)
    gate = (gate + tl.dot(taken, of_gate, input_precision="ieee")).to(up.dtype).to(tl.float32)
    taken = _whole(shrunk, row, has_row, 1, num_rows, RANK, 2, PARTS).to(of_up.dtype)
    up = (up + tl.dot(taken, of_up, input_precision="ieee")).to(up.dtype)
    gated = (gate / (1.0 + tl.exp(-gate))).to(up.dtype).to(tl.float32)  # as in ops_triton.py
    value = (gated * up.to(tl.float32)).to(up.dtype)
    tl.store(out + row[:, None] * width + column[None, :], value, mask=mask)


class TritonAdapters(AddsAdapters):
    """`AddsAdapters` on a GPU, over `bank` [slots, max rank, row size], for at most `max_rows`.

    `plan` does not wait for the device, and writes to fixed addresses that CUDA graphs read.
    """

    def __init__(self, bank: Tensor, max_rows: int) -> None:
        self._bank = bank
        self._ranks = torch.zeros(len(bank), dtype=torch.int32, device=bank.device)
        most = max_rows + 3 * num_blocks(max_rows, len(bank))
        self._groups = torch.zeros(most, dtype=torch.int32, device=bank.device)
        self._rank = max(16, next_power_of_2(bank.shape[1]))

    def set_rank(self, slot: int, rank: int) -> None:
        """See `AddsAdapters`."""
        self._ranks[slot : slot + 1].fill_(rank)

    def plan(self, slots: Int32s) -> None:
        """See `AddsAdapters`."""
        groups = RowGroups.of(slots, len(self._bank))
        found = np.concatenate([groups.rows, groups.blocks.ravel()])
        upload_into(self._groups[: len(found)], found)

    def shrink(self, x: Tensor, place: Place) -> Tensor:
        """Returns [parts of the inputs, rows, projections, rank] float32."""
        num_rows, projections = len(x), len(place.parts)
        rows, blocks, count = self._blocks(num_rows)
        parts = cdiv(place.num_inputs, _PART_INPUTS)
        tile = max(16, _TILE_WEIGHTS // self._rank)
        shape = (parts, num_rows, projections, self._rank)
        shrunk = torch.empty(shape, dtype=torch.float32, device=x.device)
        slot_stride, row_stride, _ = self._bank.stride()
        _shrink[(count, parts, projections)](
            x, self._bank, self._ranks, rows, blocks, shrunk,
            num_rows, count, place.num_inputs, _PART_INPUTS, place.inputs_at,
            slot_stride, row_stride, x.stride(0),
            BLOCK=BLOCK_ROWS, RANK=self._rank, TILE=tile, PROJECTIONS=projections,
            num_warps=_SHRINK_WARPS, **launch_options(x.device),
        )  # fmt: skip
        return shrunk

    def expand(self, y: Tensor, shrunk: Tensor, place: Place) -> None:
        """See `AddsAdapters`."""
        parts, num_rows, projections, _ = shrunk.shape
        rows, blocks, count = self._blocks(num_rows)
        outputs0, outputs1, outputs2 = (*place.parts, 0, 0)[:3]
        slot_stride, row_stride, _ = self._bank.stride()
        _expand[(count, cdiv(max(place.parts), _TILE_OUTPUTS), projections)](
            y, self._bank, self._ranks, rows, blocks, shrunk,
            num_rows, count, place.outputs_at, outputs0, outputs1, outputs2,
            slot_stride, row_stride, y.stride(0),
            BLOCK=BLOCK_ROWS, RANK=self._rank, TILE=_TILE_OUTPUTS, PROJECTIONS=projections,
            PARTS=parts, num_warps=_EXPAND_WARPS, **launch_options(y.device),
        )  # fmt: skip

    def expand_gated(self, y: Tensor, shrunk: Tensor, place: Place) -> Tensor:
        """See `AddsAdapters`."""
        parts, num_rows, _, _ = shrunk.shape
        rows, blocks, count = self._blocks(num_rows)
        width = place.parts[0]
        out = empty_rows((num_rows, width), y)
        slot_stride, row_stride, _ = self._bank.stride()
        _expand_gated[(count, cdiv(width, _TILE_OUTPUTS))](
            y, out, self._bank, self._ranks, rows, blocks, shrunk,
            num_rows, count, place.outputs_at, width, slot_stride, row_stride, y.stride(0),
            BLOCK=BLOCK_ROWS, RANK=self._rank, TILE=_TILE_OUTPUTS, PARTS=parts,
            num_warps=_EXPAND_WARPS, **launch_options(y.device),
        )  # fmt: skip
        return out

    def _blocks(self, num_rows: int) -> tuple[Tensor, Tensor, int]:
        """The rows and blocks that `plan` wrote for `num_rows` rows, and the number of blocks."""
        count = num_blocks(num_rows, len(self._bank))
        return self._groups[:num_rows], self._groups[num_rows : num_rows + 3 * count], count
