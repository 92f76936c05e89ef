"""Paged prefill attention on Hopper, concurrent with decodes: 2-byte floats, no windows.

    a warp       keys ─TMA─► a slot of the ring, values ─TMA─► the next one, as slots become empty
    four warps   rows 0 to 63 of a tile: queries x keys ─► weights x values, by wgmma
    four more    rows 64 to 127 likewise

The two warp groups are not synchronised: while one computes softmax, the other uses the tensor
cores. One persistent program per multiprocessor loops over the tiles and leaves room for programs
of decode attention, which use the memory bandwidth. Tiles and their shares of keys are those of
prefill_tiles.py.
"""

from __future__ import annotations

import functools

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
from ..launched import launched, num_multiprocessors
from ..products.fp8_streamed_gluon import _view
from ..products.streamed_product_gluon import _async_load

_ROWS, _KEYS = gl.constexpr(64), gl.constexpr(64)  # per warp group, per slot
_COLUMNS = gl.constexpr(64)  # head dimensions in a row of the swizzled shared memory layout
_SLOTS = 4
_WARPS = 4
# Per thread at launch, of 12 warps: two decode programs fit beside them. With 128 registers one
# fits, and 64 decodes beside 256 prefill tokens after a context of 8192 take 214 us instead of 198.
_REGISTERS = 104
_PRODUCER_REGISTERS = gl.constexpr(24)
_CONSUMER_REGISTERS = gl.constexpr(144)
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its older name


def attend(
    q: Tensor,
    layer_pool: Tensor,
    tiles: Tensor,
    slices: Tensor,
    indices: Tensor,
    out: Tensor,
    partial: Tensor,
    log_sums: Tensor,
    scale: float,
) -> None:
    """`attention_triton._prefill` with tiles of 128 rows: q [tokens, all heads, dim], out
    [tokens, heads, dim], layer_pool [blocks, 2, kv_heads, block_size, dim], dim 64 or 128."""
    _, _, kv_heads, block_size, dim = layer_pool.shape
    _attend_tiles[(num_multiprocessors(q.device),)](
        q,
        _pages(layer_pool),
        tiles,
        slices,
        indices,
        out,
        partial,
        log_sums,
        len(tiles),
        scale,
        q.stride(0),
        layer_pool.stride(0) // dim,
        KV_HEADS=kv_heads,
        GROUP=out.shape[1] // kv_heads,
        BLOCK_SIZE=block_size,
        PARTS=dim // _COLUMNS.value,
        SLOTS=_SLOTS,
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
        **launch_options(q.device),
    )


def _pages(layer_pool: Tensor) -> TensorDescriptor:
    """TMA descriptor of the layer's keys and values as rows [rows, dim], from the layer's first row
    on; a copy reads _COLUMNS columns of one head of a block."""
    num_blocks, _, kv_heads, block_size, dim = layer_pool.shape
    num_rows = (num_blocks - 1) * layer_pool.stride(0) // dim + 2 * kv_heads * block_size
    rows = torch.as_strided(layer_pool, (num_rows, dim), (dim, 1))
    return TensorDescriptor.from_tensor(rows, [block_size, _COLUMNS.value], _layout())


@functools.cache
def _layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def _fill(
    pages, tiles, slices, indices, ring, full, empty, num_tiles, block_rows,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, PARTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The producer warp: fill the ring's slots as they become empty."""
    SLOTS: gl.constexpr = full.shape[0]
    BLOCKS: gl.constexpr = _KEYS // BLOCK_SIZE
    boxes = _view(ring, pages.dtype, [SLOTS * PARTS * BLOCKS, BLOCK_SIZE, _COLUMNS], pages.layout)
    wait_for_previous(PDL)
    let_next_in(PDL)  # decode attention, launched next, need not wait: see attention_gpu.py
    index = 0
    for item in range(gl.program_id(0), num_tiles * KV_HEADS, gl.num_programs(0)):
        entry = tiles + item // KV_HEADS * 6
        of_head = item % KV_HEADS * BLOCK_SIZE
        begin = gl.load(entry + 2)
        end = gl.load(entry + 3)
        table = indices + gl.load(slices + gl.load(entry) * 4 + 3)
        last = (end - 1) // BLOCK_SIZE
        for first in range(begin, end, _KEYS):
            for is_value in gl.static_range(2):
                slot = index % SLOTS
                mbarrier.wait(empty.index(slot), (index // SLOTS & 1) ^ 1)
                mbarrier.expect(full.index(slot), _KEYS * PARTS * _COLUMNS * 2)
                for number in gl.static_range(BLOCKS):
                    block = gl.load(table + gl.minimum(first // BLOCK_SIZE + number, last))
                    row = block * block_rows + is_value * KV_HEADS * BLOCK_SIZE + of_head
                    for part in gl.static_range(PARTS):
                        box = boxes.index((slot * PARTS + part) * BLOCKS + number)
                        _async_load(pages, [row, part * _COLUMNS], full.index(slot), box)
                index += 1


@gluon.jit
def _clear(values, num_keys):
    """Zero the rows from `num_keys` on: their weights are 0, but 0 times NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    is_key = gl.arange(0, _KEYS, gl.SliceLayout(1, layout)) < num_keys
    found = values.load(layout)
    values.store(gl.where(is_key[:, None], found, 0.0).to(found.dtype))


@gluon.jit
def _attend(
    q, tiles, slices, out, partial, log_sums, query, ring, full, empty, num_tiles, scale, q_stride,
    GROUP_OF_WARPS: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    PARTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A consumer warp group: compute one half of the rows of each tile."""
    SLOTS: gl.constexpr = full.shape[0]
    TILE_ROWS: gl.constexpr = 2 * _ROWS
    DIM: gl.constexpr = PARTS * _COLUMNS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _KEYS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    loaded: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    type: gl.constexpr = q.dtype.element_ty
    zeros = gl.zeros((_ROWS, _KEYS), gl.float32, layout)
    columns = gl.arange(0, _KEYS, gl.SliceLayout(0, layout))
    rows = GROUP_OF_WARPS * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
    q_rows = GROUP_OF_WARPS * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, loaded))
    q_columns = gl.arange(0, _COLUMNS, gl.SliceLayout(0, loaded))
    wait_for_previous(PDL)  # these warps also read the output of earlier kernels
    index = 0
    for item in range(gl.program_id(0), num_tiles * KV_HEADS, gl.num_programs(0)):
        entry = tiles + item // KV_HEADS * 6
        kv_head = item % KV_HEADS
        begin = gl.load(entry + 2)
        end = gl.load(entry + 3)
        if begin < end:
            piece = slices + gl.load(entry) * 4
            first_query = gl.load(entry + 1)
            first_token = gl.load(piece)
            query_len = gl.load(piece + 1)
            first_position = gl.load(piece + 2) - query_len
            queries = first_query + q_rows // GROUP
            is_query = (q_rows < TILE_ROWS // GROUP * GROUP) & (queries < query_len)
            of_head = (kv_head * GROUP + q_rows % GROUP) * DIM
            at = (first_token + queries).to(gl.int64) * q_stride + of_head
            for part in gl.static_range(PARTS):
                at_part = q + at[:, None] + (part * _COLUMNS + q_columns)[None, :]
                of_part = gl.load(at_part, mask=is_query[:, None], other=0.0)
                query.index(GROUP_OF_WARPS * PARTS + part).store(of_part)
            fence_async_shared()
            _barrier()
            queries = first_query + rows // GROUP
            positions = first_position + queries
            all_see = gl.minimum(first_position + first_query + 1, end)  # keys that all rows see
            best = gl.full((_ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, layout))
            total = gl.zeros((_ROWS,), gl.float32, gl.SliceLayout(1, layout))
            sums = zeros
            other_sums = zeros  # of the second 64 dimensions if dim is 128
            for first in range(begin, end, _KEYS):
                slot = index % SLOTS
                mbarrier.wait(full.index(slot), index // SLOTS & 1)
                keys = ring.index(slot * PARTS).permute((1, 0))
                of_warps = query.index(GROUP_OF_WARPS * PARTS)
                scores = warpgroup_mma(of_warps, keys, zeros, use_acc=False, is_async=True)
                if PARTS == 2:
                    keys = ring.index(slot * PARTS + 1).permute((1, 0))
                    of_warps = query.index(GROUP_OF_WARPS * PARTS + 1)
                    scores = warpgroup_mma(of_warps, keys, scores, is_async=True)
                scores = warpgroup_mma_wait(0, deps=(scores,))
                mbarrier.arrive(empty.index(slot), count=1)
                if first + _KEYS > all_see:
                    places = first + columns
                    is_seen = (places < end)[None, :] & (places[None, :] <= positions[:, None])
                    scores = gl.where(is_seen, scores, float("-inf"))
                larger = gl.maximum(best, gl.max(scores, axis=1) * scale)
                larger = gl.maximum(larger, -1e30)  # a row may see none of these keys
                powers = gl.exp2(scores * scale - larger[:, None])
                fade = gl.exp2(best - larger)
                total = total * fade + gl.sum(powers, axis=1)
                best = larger
                weights = gl.convert_layout(powers.to(type), operand)
                sums = sums * fade[:, None]
                if PARTS == 2:
                    other_sums = other_sums * fade[:, None]
                slot = (index + 1) % SLOTS
                mbarrier.wait(full.index(slot), (index + 1) // SLOTS & 1)
                if first + _KEYS > end:
                    for part in gl.static_range(PARTS):
                        _clear(ring.index(slot * PARTS + part), end - first)
                    fence_async_shared()
                    _barrier()
                sums = warpgroup_mma(weights, ring.index(slot * PARTS), sums, is_async=True)
                if PARTS == 2:
                    values = ring.index(slot * PARTS + 1)
                    other_sums = warpgroup_mma(weights, values, other_sums, is_async=True)
                    sums, other_sums = warpgroup_mma_wait(0, deps=(sums, other_sums))
                else:
                    sums = warpgroup_mma_wait(0, deps=(sums,))
                mbarrier.arrive(empty.index(slot), count=1)
                index += 2
            is_any = total > 0  # false for padding rows and rows that see no key of this share
            divisor = gl.where(is_any, total, 1.0)
            sums = sums / divisor[:, None]
            other_sums = other_sums / divisor[:, None]
            is_row = (rows < TILE_ROWS // GROUP * GROUP) & (queries < query_len)
            if gl.load(entry + 5) == 1:
                heads = kv_head * GROUP + rows % GROUP
                head = (first_token + queries).to(gl.int64) * (KV_HEADS * GROUP) + heads
                at_out = out + (head * DIM)[:, None] + columns[None, :]
                gl.store(at_out, sums.to(type), mask=is_row[:, None])
                if PARTS == 2:
                    gl.store(at_out + _COLUMNS, other_sums.to(type), mask=is_row[:, None])
            else:
                place = (gl.load(entry + 4).to(gl.int64) * KV_HEADS + kv_head) * TILE_ROWS + rows
                at_partial = partial + (place * DIM)[:, None] + columns[None, :]
                gl.store(at_partial, sums, mask=is_row[:, None])
                if PARTS == 2:
                    gl.store(at_partial + _COLUMNS, other_sums, mask=is_row[:, None])
                log_sum = gl.where(is_any, best + gl.log2(divisor), float("-inf"))
                gl.store(log_sums + place, log_sum, mask=is_row)


@launched
@gluon.jit(do_not_specialize=["num_tiles"])
def _attend_tiles(
    q, pages, tiles, slices, indices, out, partial, log_sums, num_tiles, scale, q_stride,
    block_rows,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, PARTS: gl.constexpr,
    SLOTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    ring = gl.allocate_shared_memory(pages.dtype, [SLOTS * PARTS, _KEYS, _COLUMNS], pages.layout)
    query = gl.allocate_shared_memory(pages.dtype, [2 * PARTS, _ROWS, _COLUMNS], pages.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    q, tiles, slices, out, partial, log_sums, query, ring, full, empty, num_tiles,
                    scale, q_stride, 0, KV_HEADS, GROUP, PARTS, PDL,
                ),
            ),
            (
                _attend,
                (
                    q, tiles, slices, out, partial, log_sums, query, ring, full, empty, num_tiles,
                    scale, q_stride, 1, KV_HEADS, GROUP, PARTS, PDL,
                ),
            ),
            (
                _fill,
                (
                    pages, tiles, slices, indices, ring, full, empty, num_tiles, block_rows,
                    KV_HEADS, BLOCK_SIZE, PARTS, PDL,
                ),
            ),
        ],
        [4, 1],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )
    # fmt: on
