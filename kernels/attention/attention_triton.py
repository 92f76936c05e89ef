"""Paged prefill attention in Triton: any head size, any group, float32 too.

A program takes a tile of queries of one sequence and one head (flash attention 2, Dao 2023), and
reads blocks through the flat block tables of `attention.flatten_tables`. With a sliding window a
position sees the last `window` ones only, itself included, and the rest is not read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..kv.kv_8bit import is_8bit
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

Int32s = NDArray[np.int32]

LOG2_E = math.log2(math.e)
_LOWEST = tl.constexpr(-1e30)  # a score that no key has; unlike -inf it can be subtracted from -inf
_TILE_KEYS = 64
_TILE_QUERIES = 64


class TritonPrefill:
    """A PrefillPart. int32 device arrays of a step, rows as `run` is given them:

    tiles   [tiles, 2]: slice, first query in it
    slices  [slices, 4]: first row, query_len, seq_len, first index of its block table
    """

    def __init__(self, pool: Tensor) -> None:
        self._kv_heads, self._block_size = pool.shape[3:5]
        self._tiles = self._slices = self._indices = pool.new_zeros(0, dtype=torch.int32)

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
        tiles = [
            (index, first)
            for index, length in enumerate(query_lens)
            # The last tiles see the most keys: they go first, or the others would wait for them.
            for first in reversed(range(0, length, _TILE_QUERIES))
        ]
        self._put(np.array(tiles, np.int32), slices.astype(np.int32), indices)

    def _put(self, tiles: Int32s, slices: Int32s, indices: Int32s) -> None:
        device = self._tiles.device
        self._tiles = upload(tiles, device)
        self._slices = upload(slices, device)
        self._indices = upload(indices, device)

    def run(self, qkv: Tensor, layer_pool: Tensor, out: Tensor, window: int | None) -> None:
        _, heads, dim = out.shape
        _prefill[(len(self._tiles), heads)](
            qkv,
            layer_pool,
            self._tiles,
            self._slices,
            self._indices,
            out,
            LOG2_E / math.sqrt(dim),
            qkv.stride(0),
            layer_pool.stride(0),
            window or 0,
            HAS_WINDOW=window is not None,
            HEADS=heads,
            KV_HEADS=self._kv_heads,
            BLOCK_SIZE=self._block_size,
            PIECE=piece_elements(layer_pool),
            DIM=dim,
            DIM_PADDED=next_power_of_2(dim),
            TILE_QUERIES=_TILE_QUERIES,
            TILE_KEYS=_TILE_KEYS if dim <= 128 and out.element_size() == 2 else 32,
            PRECISION=dot_precision(out),
            IS_8BIT=is_8bit(layer_pool),
            HAS_PTX=out.is_cuda,
            num_warps=4,
            num_stages=2,
            **launch_options(out.device),
        )


class TritonGraphPrefill(TritonPrefill):
    """A GraphPrefillPart: its arrays lie in fixed places, and how many tiles there are depends on
    the graph's number of tokens alone. A tile that a step does not need has an empty slice.
    """

    def __init__(self, pool: Tensor, max_num_seqs: int, max_model_len: int) -> None:
        super().__init__(pool)
        max_blocks = max_graph_blocks(max_num_seqs, max_model_len, self._block_size)
        most = _max_tiles(max_num_seqs + MAX_GRAPH_TOKENS)
        self._all_tiles = pool.new_zeros((most, 2), dtype=torch.int32)
        self._slices = pool.new_zeros((MAX_GRAPH_SLICES + 1, 4), dtype=torch.int32)
        self._indices = pool.new_zeros(max_blocks, dtype=torch.int32)

    def _put(self, tiles: Int32s, slices: Int32s, indices: Int32s) -> None:
        num_tiles = _max_tiles(int(slices[-1, 0] + slices[-1, 1]))
        self._tiles = self._all_tiles[:num_tiles]
        all_tiles = np.full((num_tiles, 2), (MAX_GRAPH_SLICES, 0), np.int32)
        all_tiles[: len(tiles)] = tiles
        upload_into(self._tiles, all_tiles)
        upload_into(self._slices, slices)
        upload_into(self._indices, indices)


def _max_tiles(num_tokens: int) -> int:
    """Of up to MAX_GRAPH_SLICES slices of so many tokens together."""
    return num_tokens // _TILE_QUERIES + MAX_GRAPH_SLICES


def dot_precision(q: Tensor) -> str:
    """float32 products in full, not in the matrix units' 10 bits of mantissa."""
    return "ieee" if q.dtype == torch.float32 else "tf32"


def piece_elements(layer_pool: Tensor) -> int:
    """From one head of a block to the next, [.., block_size, dim]."""
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
    scale,
    q_stride,
    block_stride,
    window,
    HAS_WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_8BIT: tl.constexpr,
    HAS_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_in(PDL)
    wait_for_previous(PDL)
    tile, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    piece = slices + tl.load(tiles + tile * 2) * 4
    first_query = tl.load(tiles + tile * 2 + 1)
    row, query_len, seq_len = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    table = indices + tl.load(piece + 3)
    queries = first_query + tl.arange(0, TILE_QUERIES)
    dims = tl.arange(0, DIM_PADDED)
    mask_q = (queries < query_len)[:, None] & (dims < DIM)[None, :]
    rows = (row + queries).to(tl.int64)[:, None]
    query = tl.load(q + rows * q_stride + head * DIM + dims[None, :], mask=mask_q, other=0.0)
    if IS_8BIT:
        query, unit = fit_half(query)
        scale *= unit
    places = seq_len - query_len + queries  # positions in the sequence
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(0, seq_len - query_len + first_query + 1 - window)
    last = tl.minimum(seq_len, seq_len - query_len + first_query + TILE_QUERIES)
    best = tl.full((TILE_QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_QUERIES,), tl.float32)
    acc = tl.zeros((TILE_QUERIES, DIM_PADDED), tl.float32)
    for first in range(begin, last, TILE_KEYS):
        positions = first + tl.arange(0, TILE_KEYS)
        is_key = positions < last
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
        is_seen = is_key[None, :] & (positions[None, :] <= places[:, None])
        if HAS_WINDOW:
            is_seen &= positions[None, :] > places[:, None] - window
        scores = tl.where(is_seen, scores, float("-inf"))
        larger = tl.maximum(best, tl.max(scores, axis=1) - (HALF_ROOM if IS_8BIT else 0))
        if HAS_WINDOW:  # a row may see none of the tile's first keys
            larger = tl.maximum(larger, _LOWEST)
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
    total = tl.where(total > 0, total, 1.0)  # a row of padding may have seen no key
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (rows * HEADS + head) * DIM + dims[None, :], result, mask=mask_q)
