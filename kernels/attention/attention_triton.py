"""Paged prefill attention in Triton: any head size, any group, float32 too.

A program computes a tile: queries of one sequence, with all query heads of one KV head (flash
attention 2, Dao 2023). It reads blocks through the flat block tables of `attention.flatten_tables`.
If a step has few tiles, they are divided into shares of their keys, and a second kernel joins the
shares (prefill_tiles.py). With a sliding window a position attends to the last `window` positions
only, its own included; other keys are not read. On Hopper prefill_gluon.py replaces `_prefill`
where it supports type, shapes and block size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..gluon_kernels import gluon_kernels
from ..kv.kv_8bit import head_dim_of, is_8bit
from ..launched import launched, next_power_of_2
from ..upload import upload, upload_into
from .attention import (
    MAX_GRAPH_SLICES,
    MAX_GRAPH_TOKENS,
    BlockTables,
    flatten_tables,
    max_graph_blocks,
)
from .attention_8bit_triton import HALF_ROOM, as_type, fit_half, load_scales, log2_and_inverse
from .prefill_tiles import TILE_KEYS, divide, max_joined, max_tiles

Int32s = NDArray[np.int32]

LOG2_E = math.log2(math.e)
_LOWEST = tl.constexpr(-1e30)  # below the score of any key; unlike -inf, -inf minus it is no NaN
_ROWS, _WIDE_ROWS = 64, 128  # rows of a tile: queries times the heads of a group
_PROGRAMS, _WIDE_PROGRAMS = 2 * 132, 132  # resident at once on an H200
_WIDE_DIMS, _WIDE_BLOCKS = (64, 128), (16, 32, 64)
_JOINED_ROWS, _JOINED_AT_ONCE = 16, 4


class TritonPrefill:
    """A PrefillPart with `num_heads` heads, for q of `dtype`. Layers may have a window only if
    `has_windows`. int32 device arrays of a step, rows counted in the tensors of `run`:

    tiles   [tiles, 6] and joined [tiles, 4]: prefill_tiles.divide
    slices  [slices, 4]: first row, query_len, seq_len, first index of its block table
    """

    def __init__(
        self, pool: Tensor, num_heads: int, dtype: torch.dtype, *, has_windows: bool = False
    ) -> None:
        self._kv_heads, self._block_size = pool.shape[3:5]
        self._group = num_heads // self._kv_heads
        self._wide = None if has_windows else _wide_kernel(pool, dtype, self._group)
        self._rows = max(_ROWS, next_power_of_2(self._group))
        self._max_shares = _PROGRAMS // self._kv_heads
        if self._wide is not None:
            self._rows, self._max_shares = _WIDE_ROWS, _WIDE_PROGRAMS // self._kv_heads
        is_wide = head_dim_of(pool) > 128 or dtype == torch.float32
        self._tile_keys = TILE_KEYS // 2 if is_wide else TILE_KEYS
        self._tiles = self._joined = self._slices = pool.new_zeros(0, dtype=torch.int32)
        self._indices = self._slices
        self._num_places = 0

    @property
    def _tile_queries(self) -> int:
        return self._rows // self._group

    def plan(
        self,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: BlockTables,
        first_row: int = 0,
    ) -> None:
        indptr, indices = flatten_tables(seq_lens, block_tables, self._block_size)
        starts = np.cumsum([first_row, *query_lens[:-1]])
        slices = np.stack([starts, query_lens, seq_lens, indptr[:-1]], axis=1)
        tiles, joined = divide(query_lens, seq_lens, self._tile_queries, self._max_shares)
        self._put(tiles, joined, slices.astype(np.int32), indices)

    def _put(self, tiles: Int32s, joined: Int32s, slices: Int32s, indices: Int32s) -> None:
        device = self._tiles.device
        self._tiles = upload(tiles, device)
        self._joined = upload(joined, device)
        self._slices = upload(slices, device)
        self._indices = upload(indices, device)
        self._num_places = int(joined[:, 3].sum())

    def run(self, qkv: Tensor, layer_pool: Tensor, out: Tensor, window: int | None) -> None:
        self.join(self.attend(qkv, layer_pool, out, window), out)

    def attend(
        self, qkv: Tensor, layer_pool: Tensor, out: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """`run` without its second kernel; returns the shares for `join`. The next kernel may start
        once all kernels before this one have completed: it may read what this one reads without
        waiting."""
        dim, device = out.shape[-1], out.device
        places = (self._num_places, self._kv_heads, self._rows)
        partial = torch.empty((*places, dim), dtype=torch.float32, device=device)
        log_sums = torch.empty(places, dtype=torch.float32, device=device)
        scale = LOG2_E / math.sqrt(dim)
        arrays = (self._tiles, self._slices, self._indices)
        if self._wide is not None:
            self._wide.attend(qkv, layer_pool, *arrays, out, partial, log_sums, scale)
            return partial, log_sums
        _prefill[(len(self._tiles), self._kv_heads)](
            qkv,
            layer_pool,
            *arrays,
            out,
            partial,
            log_sums,
            scale,
            qkv.stride(0),
            layer_pool.stride(0),
            window or 0,
            HAS_WINDOW=window is not None,
            KV_HEADS=self._kv_heads,
            GROUP=self._group,
            BLOCK_SIZE=self._block_size,
            PIECE=piece_elements(layer_pool),
            DIM=dim,
            DIM_PADDED=next_power_of_2(dim),
            ROWS=self._rows,
            TILE_KEYS=self._tile_keys,
            PRECISION=dot_precision(out),
            IS_8BIT=is_8bit(layer_pool),
            HAS_PTX=out.is_cuda,
            num_warps=4,
            num_stages=2,
            **launch_options(device),
        )
        return partial, log_sums

    def join(self, shares: tuple[Tensor, Tensor], out: Tensor) -> None:
        """Join the shares of tiles that were divided."""
        (partial, log_sums), dim, device = shares, out.shape[-1], out.device
        if not len(self._joined):
            return
        _join_tiles[(len(self._joined), self._kv_heads, self._rows // _JOINED_ROWS)](
            partial,
            log_sums,
            self._joined,
            self._slices,
            out,
            KV_HEADS=self._kv_heads,
            GROUP=self._group,
            TILE_ROWS=self._rows,
            ROWS=_JOINED_ROWS,
            AT_ONCE=_JOINED_AT_ONCE,
            DIM=dim,
            DIM_PADDED=next_power_of_2(dim),
            num_warps=4,
            **launch_options(device),
        )


class TritonGraphPrefill(TritonPrefill):
    """The PrefillPart of CUDA graphs: its arrays have fixed addresses, and the number of tiles
    depends on the graph's number of tokens alone. Tiles that a step does not need have no keys.
    """

    def __init__(
        self,
        pool: Tensor,
        num_heads: int,
        dtype: torch.dtype,
        max_num_seqs: int,
        max_model_len: int,
        *,
        has_windows: bool = False,
    ) -> None:
        super().__init__(pool, num_heads, dtype, has_windows=has_windows)
        max_blocks = max_graph_blocks(max_num_seqs, max_model_len, self._block_size)
        most = self._max_tiles(max_num_seqs + MAX_GRAPH_TOKENS)
        self._all_tiles = pool.new_zeros((most, 6), dtype=torch.int32)
        self._joined = pool.new_zeros((max_joined(self._max_shares), 4), dtype=torch.int32)
        self._slices = pool.new_zeros((MAX_GRAPH_SLICES, 4), dtype=torch.int32)
        self._indices = pool.new_zeros(max_blocks, dtype=torch.int32)

    def _max_tiles(self, num_tokens: int) -> int:
        """The number of tiles for up to MAX_GRAPH_SLICES slices of `num_tokens` tokens in total."""
        return max_tiles(num_tokens, MAX_GRAPH_SLICES, self._tile_queries, self._max_shares)

    def _put(self, tiles: Int32s, joined: Int32s, slices: Int32s, indices: Int32s) -> None:
        num_tiles = self._max_tiles(int(slices[-1, 0] + slices[-1, 1]))
        self._tiles = self._all_tiles[:num_tiles]
        self._num_places = self._max_shares
        all_tiles = np.zeros((num_tiles, 6), np.int32)
        all_tiles[: len(tiles)] = tiles
        all_joined = np.zeros((len(self._joined), 4), np.int32)
        all_joined[: len(joined)] = joined
        upload_into(self._tiles, all_tiles)
        upload_into(self._joined, all_joined)
        upload_into(self._slices, slices)
        upload_into(self._indices, indices)


def _wide_kernel(pool: Tensor, dtype: torch.dtype, group: int) -> ModuleType | None:
    """prefill_gluon.py if it supports this pool, type, group size and device, else None."""
    block_size, dim = pool.shape[4:]
    if dtype != pool.dtype or dtype.itemsize != 2 or group > _WIDE_ROWS:
        return None
    if dim not in _WIDE_DIMS or block_size not in _WIDE_BLOCKS:
        return None
    return gluon_kernels("attention.prefill_gluon", pool.device)


def dot_precision(q: Tensor) -> str:
    """Input precision of `tl.dot`: full float32, not the 10 mantissa bits of TF32."""
    return "ieee" if q.dtype == torch.float32 else "tf32"


def piece_elements(layer_pool: Tensor) -> int:
    """Elements from one head of a block to the next, [.., block_size, dim]."""
    return layer_pool.shape[-2] * layer_pool.shape[-1]


@launched
@triton.jit
def _prefill(
    q,
    layer_pool,
    tiles,
    slices,
    indices,
    out,
    partial,
    log_sums,
    scale,
    q_stride,
    block_stride,
    window,
    HAS_WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_8BIT: tl.constexpr,
    HAS_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    # The plan is on the device before a step's first kernel begins. The first program waits for the
    # previous kernel even if its tile is empty, so that this kernel ends after that one.
    entry, kv_head = tiles + tl.program_id(0) * 6, tl.program_id(1)
    begin, end = tl.load(entry + 2), tl.load(entry + 3)
    is_empty = begin >= end
    if is_empty & (tl.program_id(0) > 0):
        return
    wait_for_previous(PDL)
    let_next_in(PDL)
    if is_empty:
        return
    piece, first_query = slices + tl.load(entry) * 4, tl.load(entry + 1)
    row, query_len, seq_len = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    table = indices + tl.load(piece + 3)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM_PADDED)
    queries, heads = first_query + rows // GROUP, kv_head * GROUP + rows % GROUP
    is_row = (rows < ROWS // GROUP * GROUP) & (queries < query_len)
    mask_q = is_row[:, None] & (dims < DIM)[None, :]
    token = (row + queries).to(tl.int64)
    query = tl.load(
        q + (token * q_stride + heads * DIM)[:, None] + dims[None, :], mask=mask_q, other=0.0
    )
    if IS_8BIT:
        query, unit = fit_half(query)
        scale *= unit
    positions_q = seq_len - query_len + queries  # in the sequence
    if HAS_WINDOW:
        begin = tl.maximum(begin, seq_len - query_len + first_query + 1 - window)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM_PADDED), tl.float32)
    for first in range(begin, end, TILE_KEYS):
        positions = first + tl.arange(0, TILE_KEYS)
        is_key = positions < end
        block = tl.load(table + positions // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        keys = layer_pool + block * block_stride + kv_head * PIECE
        at = (keys + positions % BLOCK_SIZE * DIM)[:, None] + dims[None, :]
        mask = is_key[:, None] & (dims < DIM)[None, :]
        k = tl.load(at, mask=mask, other=0.0)
        if IS_8BIT:
            k = as_type(k, query.dtype, HAS_PTX)
        scores = tl.dot(query, k.T, input_precision=PRECISION)
        if IS_8BIT:
            k_scale, v_scale = load_scales(
                keys, positions, is_key, KV_HEADS, BLOCK_SIZE, PIECE, DIM
            )
            log_scale, inverse = log2_and_inverse(v_scale, HAS_PTX)
            scores = scores * (scale * k_scale)[None, :] + log_scale[None, :]
        else:
            scores *= scale
        is_seen = is_key[None, :] & (positions[None, :] <= positions_q[:, None])
        if HAS_WINDOW:
            is_seen &= positions[None, :] > positions_q[:, None] - window
        scores = tl.where(is_seen, scores, float("-inf"))
        larger = tl.maximum(best, tl.max(scores, axis=1) - (HALF_ROOM if IS_8BIT else 0))
        larger = tl.maximum(larger, _LOWEST)  # a row may see none of these keys
        weights = tl.exp2(scores - larger[:, None])
        fade = tl.exp2(best - larger)
        if IS_8BIT:
            total = total * fade + tl.sum(weights * inverse[None, :], axis=1)
        else:
            total = total * fade + tl.sum(weights, axis=1)
        v = tl.load(at + KV_HEADS * PIECE, mask=mask, other=0.0)
        if IS_8BIT:
            v = as_type(v, query.dtype, HAS_PTX)
        acc = acc * fade[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        best = larger
    is_any = total > 0  # false for padding rows and rows that see no key of this share
    sums = tl.where(is_any, total, 1.0)
    result = acc / sums[:, None]
    if tl.load(entry + 5) == 1:
        at_out = out + ((token * KV_HEADS * GROUP + heads) * DIM)[:, None] + dims[None, :]
        tl.store(at_out, result.to(out.dtype.element_ty), mask=mask_q)
    else:
        place = (tl.load(entry + 4).to(tl.int64) * KV_HEADS + kv_head) * ROWS + rows
        tl.store(partial + place[:, None] * DIM + dims[None, :], result, mask=mask_q)
        log_sum = tl.where(is_any, best + tl.log2(sums), float("-inf"))
        tl.store(log_sums + place, log_sum, mask=is_row)


@triton.jit
def join_shares(
    partial,
    log_sums,
    rows,
    is_row,
    dims,
    begin,
    end,
    stride,
    AT_ONCE: tl.constexpr,
    DIM: tl.constexpr,
):
    """Join the shares `begin` to `end` of each of `rows`, [rows, dims] float32. The result of share
    i (in `partial`) and its log2 of the sum of weights (in `log_sums`) are at row + i * stride."""
    best = tl.full((rows.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((rows.shape[0],), tl.float32)
    joined = tl.zeros((rows.shape[0], dims.shape[0]), tl.float32)
    for first in range(begin, end, AT_ONCE):
        shares = first + tl.arange(0, AT_ONCE)
        is_there = is_row[:, None] & (shares < end)[None, :]
        at = rows[:, None] + shares.to(tl.int64)[None, :] * stride
        log_sum = tl.load(log_sums + at, mask=is_there, other=float("-inf"))
        values = tl.load(
            partial + at[:, :, None] * DIM + dims[None, None, :],
            mask=is_there[:, :, None] & (dims < DIM)[None, None, :],
            other=0.0,
        )
        larger = tl.maximum(best, tl.max(log_sum, axis=1))
        # While all shares so far are outside the window, the maximum is -inf: subtract 0 instead.
        finite = tl.where(larger > float("-inf"), larger, 0.0)
        weights = tl.exp2(log_sum - finite[:, None])
        fade = tl.exp2(best - finite)
        joined = joined * fade[:, None] + tl.sum(values * weights[:, :, None], axis=1)
        total = total * fade + tl.sum(weights, axis=1)
        best = larger
    return joined / tl.where(total > 0, total, 1.0)[:, None]


@launched
@triton.jit
def _join_tiles(
    partial,
    log_sums,
    joined,
    slices,
    out,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_in(PDL)
    entry, kv_head = joined + tl.program_id(0) * 4, tl.program_id(1)
    num_shares = tl.load(entry + 3)
    is_empty = num_shares == 0
    if is_empty & (tl.program_id(0) > 0):
        return
    wait_for_previous(PDL)
    if is_empty:
        return
    piece, first_query = slices + tl.load(entry) * 4, tl.load(entry + 1)
    rows, dims = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM_PADDED)
    queries, heads = first_query + rows // GROUP, kv_head * GROUP + rows % GROUP
    is_row = (rows < TILE_ROWS // GROUP * GROUP) & (queries < tl.load(piece + 1))
    place, stride = tl.load(entry + 2).to(tl.int64), KV_HEADS * TILE_ROWS
    at = (place * KV_HEADS + kv_head) * TILE_ROWS + rows
    values = join_shares(partial, log_sums, at, is_row, dims, 0, num_shares, stride, AT_ONCE, DIM)
    token = (tl.load(piece) + queries).to(tl.int64)
    at_out = out + ((token * KV_HEADS * GROUP + heads) * DIM)[:, None] + dims[None, :]
    mask = is_row[:, None] & (dims < DIM)[None, :]
    tl.store(at_out, values.to(out.dtype.element_ty), mask=mask)
