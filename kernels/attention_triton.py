"""Paged attention in Triton: any head size, any group, float32 too.

    decode    program (sequence, kv head, split): all query heads of a kv head against a share of
              its keys; a second kernel joins the shares (flash decoding, Dao et al. 2023)
    prefill   program (tile of queries of one sequence, head): flash attention 2 (Dao 2023)

The kernels read blocks through the flat block tables of `attention.flatten_tables`. How a decode is
split depends on the number of decodes alone, so a CUDA graph can replay it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import BlockTables, flatten_tables
from .dependent_launch import launch_options, let_next_in, wait_for_previous
from .upload import upload, upload_into

_LOG2_E = math.log2(math.e)
_TILE_KEYS = 64
_TILE_QUERIES = 64
# A decode's programs are small, so that many of them keep loads in flight on each multiprocessor.
_DECODE_TILE_KEYS = 64
_DECODE_WARPS = 2
_DECODE_STAGES = 3
_PROGRAMS_WANTED = 1024
_MAX_SPLITS = 32


class TritonDecode:
    """A DecodePart for at most `max_num_seqs` decodes."""

    def __init__(self, pool: Tensor, max_num_seqs: int, max_model_len: int) -> None:
        self._kv_heads, self._block_size, self._head_dim = pool.shape[3:]
        max_blocks = max_num_seqs * -(-max_model_len // self._block_size)
        # Fixed places: a CUDA graph reads them again at every replay.
        self._indptr = pool.new_zeros(max_num_seqs + 1, dtype=torch.int32)
        self._indices = pool.new_zeros(max_blocks, dtype=torch.int32)
        self._seq_lens = pool.new_zeros(max_num_seqs, dtype=torch.int32)

    def plan(self, seq_lens: Sequence[int], block_tables: BlockTables, *, is_graph: bool) -> None:
        indptr, indices = flatten_tables(seq_lens, block_tables, self._block_size)
        upload_into(self._indptr, indptr)
        upload_into(self._indices, indices)
        upload_into(self._seq_lens, np.array(seq_lens, np.int32))

    def run(self, q: Tensor, layer_pool: Tensor, out: Tensor) -> None:
        n, heads, dim = q.shape
        group = heads // self._kv_heads
        splits = num_splits(n * self._kv_heads)
        device = q.device
        partial = torch.empty((n, heads, splits, dim), dtype=torch.float32, device=device)
        log_sums = torch.empty((n, heads, splits), dtype=torch.float32, device=device)
        _decode[(n, self._kv_heads, splits)](
            q,
            layer_pool,
            self._indptr,
            self._indices,
            self._seq_lens,
            partial,
            log_sums,
            _LOG2_E / math.sqrt(dim),
            layer_pool.stride(0),
            KV_HEADS=self._kv_heads,
            GROUP=group,
            GROUP_PADDED=max(16, triton.next_power_of_2(group)),
            BLOCK_SIZE=self._block_size,
            DIM=dim,
            DIM_PADDED=triton.next_power_of_2(dim),
            TILE_KEYS=_DECODE_TILE_KEYS,
            SPLITS=splits,
            PRECISION=_dot_precision(q),
            num_warps=_DECODE_WARPS,
            num_stages=_DECODE_STAGES,
            **launch_options(device),
        )
        _join_splits[(n, heads)](
            partial,
            log_sums,
            out,
            HEADS=heads,
            DIM=dim,
            DIM_PADDED=triton.next_power_of_2(dim),
            SPLITS=splits,
            num_warps=1,
            **launch_options(device),
        )


class TritonPrefill:
    """A PrefillPart. int32 device arrays of a step, rows counted from its first prefill token:

    tiles   [tiles, 2]: slice, first query in it
    slices  [slices, 4]: first row, query_len, seq_len, first index of its block table
    """

    def __init__(self, pool: Tensor) -> None:
        self._kv_heads, self._block_size = pool.shape[3:5]
        self._tiles = self._slices = self._indices = pool.new_zeros(0, dtype=torch.int32)

    def plan(
        self, query_lens: Sequence[int], seq_lens: Sequence[int], block_tables: BlockTables
    ) -> None:
        device = self._tiles.device
        indptr, indices = flatten_tables(seq_lens, block_tables, self._block_size)
        starts = np.cumsum([0, *query_lens[:-1]])
        slices = np.stack([starts, query_lens, seq_lens, indptr[:-1]], axis=1)
        tiles = [
            (index, first)
            for index, length in enumerate(query_lens)
            # The last tiles see the most keys: they go first, or the others would wait for them.
            for first in reversed(range(0, length, _TILE_QUERIES))
        ]
        self._tiles = upload(np.array(tiles, np.int32), device)
        self._slices = upload(slices.astype(np.int32), device)
        self._indices = upload(indices, device)

    def run(self, q: Tensor, layer_pool: Tensor, out: Tensor) -> None:
        _, heads, dim = q.shape
        _prefill[(len(self._tiles), heads)](
            q,
            layer_pool,
            self._tiles,
            self._slices,
            self._indices,
            out,
            _LOG2_E / math.sqrt(dim),
            layer_pool.stride(0),
            HEADS=heads,
            KV_HEADS=self._kv_heads,
            BLOCK_SIZE=self._block_size,
            DIM=dim,
            DIM_PADDED=triton.next_power_of_2(dim),
            TILE_QUERIES=_TILE_QUERIES,
            TILE_KEYS=_TILE_KEYS if dim <= 128 and q.element_size() == 2 else 32,
            PRECISION=_dot_precision(q),
            num_warps=4,
            num_stages=2,
            **launch_options(q.device),
        )


def num_splits(num_pairs: int) -> int:
    """Shares of each sequence's keys for `num_pairs` (sequence, kv head) pairs: a power of two."""
    wanted = -(-_PROGRAMS_WANTED // num_pairs)
    return int(min(_MAX_SPLITS, triton.next_power_of_2(wanted)))


def _dot_precision(q: Tensor) -> str:
    """float32 products in full, not in the matrix units' 10 bits of mantissa."""
    return "ieee" if q.dtype == torch.float32 else "tf32"


@triton.jit
def _decode(
    q,
    layer_pool,
    indptr,
    indices,
    seq_lens,
    partial,
    log_sums,
    scale,
    block_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_in(PDL)
    wait_for_previous(PDL)
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, dims = tl.arange(0, GROUP_PADDED), tl.arange(0, DIM_PADDED)
    is_row, is_dim = rows < GROUP, dims < DIM
    head = (sequence.to(tl.int64) * KV_HEADS + kv_head) * GROUP + rows
    queries = tl.load(
        q + head[:, None] * DIM + dims[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0
    )
    seq_len = tl.load(seq_lens + sequence)
    table = indices + tl.load(indptr + sequence)
    share = tl.cdiv(tl.cdiv(seq_len, SPLITS), TILE_KEYS) * TILE_KEYS
    last = tl.minimum(seq_len, (split + 1) * share)
    best = tl.full((GROUP_PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PADDED,), tl.float32)
    acc = tl.zeros((GROUP_PADDED, DIM_PADDED), tl.float32)
    for first in range(split * share, last, TILE_KEYS):
        positions = first + tl.arange(0, TILE_KEYS)
        is_key = positions < last
        block = tl.load(table + positions // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        keys = layer_pool + block * block_stride + positions % BLOCK_SIZE * DIM
        keys += kv_head * BLOCK_SIZE * DIM
        at = keys[:, None] + dims[None, :]
        mask = is_key[:, None] & is_dim[None, :]
        k = tl.load(at, mask=mask, other=0.0)
        scores = tl.dot(queries, k.T, input_precision=PRECISION) * scale
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        larger = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - larger[:, None])
        fade = tl.exp2(best - larger)
        total = total * fade + tl.sum(weights, axis=1)
        v = tl.load(at + KV_HEADS * BLOCK_SIZE * DIM, mask=mask, other=0.0)
        acc = acc * fade[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        best = larger
    at = head * SPLITS + split
    share_sum = tl.where(total > 0, total, 1.0)
    tl.store(
        partial + at[:, None] * DIM + dims[None, :],
        acc / share_sum[:, None],
        mask=is_row[:, None] & is_dim[None, :],
    )
    log_sum = tl.where(total > 0, best + tl.log2(share_sum), float("-inf"))
    tl.store(log_sums + at, log_sum, mask=is_row)


@triton.jit
def _join_splits(
    partial,
    log_sums,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_in(PDL)
    wait_for_previous(PDL)
    at = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, DIM_PADDED)
    is_dim = dims < DIM
    log_sum = tl.load(log_sums + at * SPLITS + splits)
    weights = tl.exp2(log_sum - tl.max(log_sum, axis=0))
    values = tl.load(
        partial + (at * SPLITS + splits[:, None]) * DIM + dims[None, :],
        mask=is_dim[None, :],
        other=0.0,
    )
    joined = tl.sum(values * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(out + at * DIM + dims, joined.to(out.dtype.element_ty), mask=is_dim)


@triton.jit
def _prefill(
    q,
    layer_pool,
    tiles,
    slices,
    indices,
    out,
    scale,
    block_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
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
    at_q = ((row + queries).to(tl.int64) * HEADS + head)[:, None] * DIM + dims[None, :]
    query = tl.load(q + at_q, mask=mask_q, other=0.0)
    places = seq_len - query_len + queries  # positions in the sequence
    last = tl.minimum(seq_len, seq_len - query_len + first_query + TILE_QUERIES)
    best = tl.full((TILE_QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_QUERIES,), tl.float32)
    acc = tl.zeros((TILE_QUERIES, DIM_PADDED), tl.float32)
    for first in range(0, last, TILE_KEYS):
        positions = first + tl.arange(0, TILE_KEYS)
        is_key = positions < last
        block = tl.load(table + positions // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        keys = layer_pool + block * block_stride + positions % BLOCK_SIZE * DIM
        keys += kv_head * BLOCK_SIZE * DIM
        at = keys[:, None] + dims[None, :]
        mask = is_key[:, None] & (dims < DIM)[None, :]
        k = tl.load(at, mask=mask, other=0.0)
        scores = tl.dot(query, k.T, input_precision=PRECISION) * scale
        is_seen = is_key[None, :] & (positions[None, :] <= places[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        larger = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - larger[:, None])
        fade = tl.exp2(best - larger)
        total = total * fade + tl.sum(weights, axis=1)
        v = tl.load(at + KV_HEADS * BLOCK_SIZE * DIM, mask=mask, other=0.0)
        acc = acc * fade[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        best = larger
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + at_q, result, mask=mask_q)
