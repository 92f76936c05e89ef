"""Paged decode attention in Triton: any head size, any group, float32 too.

    keys of a step:   | seq 0 .......................... | seq 1 .... | seq 2 ........... |
    shares:           |  share 0  |  share 1  |  share 2 |  share 3   | share 4 | share 5 |

A program computes all query heads of one KV head over one share of a sequence's keys; a second
kernel joins the shares of sequences that have several (flash decoding, Dao et al. 2023). Shares are
about equal over the whole step (decode_shares.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..kv.kv_8bit import is_8bit
from ..launched import cdiv, launched, next_power_of_2
from ..products.fp8_product import takes_groups
from ..products.fp8_triton import quantised_groups
from ..products.weights import BLOCK, Fp8Rows, Fp8Weight
from ..upload import upload_into
from .attention import BlockTables, join_tables
from .attention_8bit_triton import (
    HALF_ROOM,
    as_type,
    fit_half,
    load_pairs,
    load_scales,
    log2_and_inverse,
)
from .attention_triton import LOG2_E, dot_precision, join_shares, piece_elements
from .decode_shares import TILE_KEYS, divide, max_shares

# Programs are small, so that many of them keep loads in flight on each multiprocessor.
_WARPS = 2
_STAGES = 3
_REGISTERS_8BIT = 128  # per thread: decode_shares.py assumes 8 programs per multiprocessor
_MANY_HEADS = 2048  # query heads of all sequences
_FEW_HEADS = 32  # KV heads of all sequences: all programs begin while the previous kernel runs
_ALIGNED = 32  # int32s: arrays start at multiples; kernels are compiled for 16-byte alignment
# int32s of a share: the four of `divide`, the first index of its block table, and the number of
# shares of its sequence.
_SHARE_SIZE = 8
_OF_SHARE = tl.constexpr(_SHARE_SIZE)


def can_quantise(qkv: Tensor, reader: Fp8Weight) -> bool:
    """Whether `TritonDecode.run` may quantise for `reader`: each head must be a group of inputs."""
    is_group = qkv.shape[-1] == BLOCK and qkv.dtype == torch.bfloat16
    return is_group and takes_groups(qkv, reader)


class TritonDecode:
    """Attention of at most `max_num_seqs` slices of one to `rows_each` tokens. The tokens of a
    slice are the last positions of its sequence; the keys are read once for all of them."""

    def __init__(
        self, pool: Tensor, max_num_seqs: int, max_model_len: int, rows_each: int = 1
    ) -> None:
        self._rows_each, self._places = rows_each, 0
        self._kv_heads, self._block_size = pool.shape[3:5]
        self._is_8bit = is_8bit(pool)
        max_blocks = max_num_seqs * -(-max_model_len // self._block_size)  # no table has more
        # In a graph each padding row is a sequence of its own.
        max_num_seqs *= rows_each
        max_blocks += max_num_seqs
        most = max_shares(max_num_seqs, self._kv_heads, is_8bit=self._is_8bit)
        # Fixed addresses, since CUDA graphs read these arrays at every replay. They are contiguous,
        # the longest last, so that a step's plan is one copy.
        seqs = max_num_seqs + 1
        self._ends = np.cumsum(
            [-(-size // _ALIGNED) * _ALIGNED for size in (seqs,) * 3 + (_SHARE_SIZE * most,)]
        )
        self._plan = pool.new_zeros(int(self._ends[-1]) + max_blocks, dtype=torch.int32)
        parts = self._plan.tensor_split([*map(int, self._ends)])
        self._starts, self._seq_lens, self._indptr, self._shares, self._indices = parts

    def plan(
        self,
        seq_lens: Sequence[int],
        block_tables: BlockTables,
        num_graph_decodes: int | None,
        query_lens: Sequence[int] = (),
    ) -> None:
        """Prepare a step. `num_graph_decodes`: the decode tokens that the step's CUDA graph has
        room for; None: no graph. Slices have one token each unless `query_lens` is given."""
        n, lens = len(seq_lens), np.array(seq_lens, np.int32)
        self._places = n if num_graph_decodes is None else num_graph_decodes
        tables, indices = join_tables(block_tables)
        found, found_indptr = divide(lens, self._kv_heads, is_8bit=self._is_8bit)
        plan = np.zeros(self._ends[-1] + len(indices), np.int32)
        parts = np.split(plan, self._ends)
        starts = np.cumsum([0, *query_lens]) if query_lens else np.arange(n + 1)
        parts[0][: n + 1] = starts  # later entries are unused
        parts[1][:n] = lens
        parts[2][: n + 1] = found_indptr
        parts[2][n + 1 :] = len(found)  # the other sequences have no shares
        shares = parts[3][: _SHARE_SIZE * len(found)].reshape(-1, _SHARE_SIZE)
        shares[:, :4] = found  # the other shares have no keys and are skipped
        shares[:, 4] = tables[found[:, 1]]
        shares[:, 5] = np.diff(found_indptr)[found[:, 1]]
        parts[4][:] = indices
        upload_into(self._plan, plan)

    def run(
        self,
        q: Tensor,
        layer_pool: Tensor,
        out: Tensor | Fp8Rows,
        window: int | None,
        *,
        is_behind_prefill: bool = False,
    ) -> None:
        """q [rows, heads, dim], the heads of a token contiguous; out of the same shape, contiguous,
        or if `can_quantise` [rows, heads * dim] with a scale for each head. In a graph q and out
        have as many rows as it has room for; rows of no decode are not written.
        `is_behind_prefill`: launched right after `TritonPrefill.attend`, to run concurrently.

        layer_pool [blocks, 2, kv_heads, block_size, dim], or of 8 bits: see kv_8bit.py.
        """
        _, heads, dim = q.shape
        places, device = self._places, q.device
        shares = max_shares(places, self._kv_heads, is_8bit=self._is_8bit)
        rows_each = self._rows_each
        each = (shares, rows_each * heads)
        partial = torch.empty((*each, dim), dtype=torch.float32, device=device)
        log_sums = torch.empty(each, dtype=torch.float32, device=device)
        dim_padded = next_power_of_2(dim)
        group = heads // self._kv_heads
        is_quantised = isinstance(out, Fp8Rows)
        data, scales, room = (
            (out.data, out.scale, out.room) if isinstance(out, Fp8Rows) else (out, out, 0)
        )
        # KV heads are the inner grid dimension: programs of one share run at the same time and read
        # the same blocks, and each block of a layer is in a memory page of its own (heads as the
        # outer dimension cost 20 % at 64 x 4k).
        _attend_share[(self._kv_heads, shares)](
            q,
            layer_pool,
            self._indices,
            self._seq_lens,
            self._shares,
            self._starts,
            data,
            scales,
            room,
            partial,
            log_sums,
            LOG2_E / math.sqrt(dim),
            q.stride(0),
            layer_pool.stride(0),
            window or 0,
            HAS_WINDOW=window is not None,
            KV_HEADS=self._kv_heads,
            GROUP=group,
            ROWS_EACH=rows_each,
            GROUP_PADDED=max(8, next_power_of_2(rows_each * group)),
            BLOCK_SIZE=self._block_size,
            PIECE=piece_elements(layer_pool),
            DIM=dim,
            DIM_PADDED=dim_padded,
            TILE_KEYS=TILE_KEYS,
            PRECISION=dot_precision(q),
            IS_8BIT=self._is_8bit,
            IS_QUANTISED=is_quantised,
            IS_AHEAD=places * self._kv_heads <= _FEW_HEADS and q.is_cuda,
            IS_BEHIND_PREFILL=is_behind_prefill,
            HAS_PTX=q.is_cuda,
            num_warps=_WARPS,
            num_stages=_STAGES,
            **({"maxnreg": _REGISTERS_8BIT} if self._is_8bit else {}),
            **launch_options(device),
        )
        # With many sequences, those that have several shares have few.
        has_few = places * heads >= _MANY_HEADS
        heads_each, at_once = (8, 4) if has_few else (1, 32)
        _join_shares[(places, cdiv(heads, heads_each))](
            partial,
            log_sums,
            self._indptr,
            self._starts,
            data,
            scales,
            room,
            IS_QUANTISED=is_quantised,
            ROWS_EACH=rows_each,
            HEADS=heads,
            HEADS_EACH=heads_each,
            AT_ONCE=at_once,
            DIM=dim,
            DIM_PADDED=dim_padded,
            num_warps=4 if has_few else 1,
            **launch_options(device),
        )


@launched
@triton.jit(do_not_specialize=["room"])
def _attend_share(
    q,
    layer_pool,
    indices,
    seq_lens,
    shares,
    starts,
    out,
    out_scale,
    room,
    partial,
    log_sums,
    scale,
    q_stride,
    block_stride,
    window,
    HAS_WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS_EACH: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_8BIT: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
    IS_AHEAD: tl.constexpr,
    IS_BEHIND_PREFILL: tl.constexpr,
    HAS_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_in(PDL)
    # The plan is on the device before a step's first kernel begins: programs without a share end
    # while the previous kernel runs. The first program always waits for the previous kernel: so
    # this kernel ends after that one, and the next kernel may read the output of both.
    kv_head, entry = tl.program_id(0), shares + tl.program_id(1) * _OF_SHARE
    share, sequence = tl.load(entry), tl.load(entry + 1)
    begin, end = tl.load(entry + 2), tl.load(entry + 3)
    table, num_shares = indices + tl.load(entry + 4), tl.load(entry + 5)
    is_empty = begin >= end
    is_first = tl.program_id(1) == 0
    if is_empty & (not is_first):
        return
    if PDL and IS_AHEAD and not is_empty:  # all keys but the last were written by earlier steps
        positions = tl.minimum(begin + tl.arange(0, TILE_KEYS), end - 1)
        block = tl.load(table + positions // BLOCK_SIZE).to(tl.int64)
        keys = layer_pool + block * block_stride + kv_head * PIECE + positions % BLOCK_SIZE * DIM
        _prefetch(keys, DIM)
        _prefetch(keys + KV_HEADS * PIECE, DIM)
    if not IS_BEHIND_PREFILL:  # the prefill starts this kernel once all of its inputs are written
        wait_for_previous(PDL)
    if is_empty:
        if IS_BEHIND_PREFILL:
            wait_for_previous(PDL)
        return
    rows, dims = tl.arange(0, GROUP_PADDED), tl.arange(0, DIM_PADDED)
    is_dim = dims < DIM
    if ROWS_EACH == 1:
        is_row = rows < GROUP
        head = kv_head * GROUP + rows
        row = sequence.to(tl.int64) + tl.zeros_like(rows)
        place = head  # index in the results of a share
        if HAS_WINDOW:
            begin = tl.maximum(begin, tl.load(seq_lens + sequence) - window)
    else:
        first_row = tl.load(starts + sequence)
        num_rows = tl.load(starts + sequence + 1) - first_row
        is_row = rows < num_rows * GROUP
        head = kv_head * GROUP + rows % GROUP
        row = (first_row + rows // GROUP).to(tl.int64)
        place = rows // GROUP * KV_HEADS * GROUP + head
        # A row sees no keys after its own position: those belong to later rows (causal mask).
        row_end = tl.load(seq_lens + sequence) - num_rows + 1 + rows // GROUP
        if HAS_WINDOW:
            begin = tl.maximum(begin, tl.min(row_end, axis=0) - window)
    # Keys, then dimensions, are the rows (M) of the two GEMMs: queries would fill half of an MMA
    # tile.
    queries = tl.load(
        q + row[None, :] * q_stride + head[None, :] * DIM + dims[:, None],
        mask=is_row[None, :] & is_dim[:, None],
        other=0.0,
    )
    if IS_8BIT:
        queries, unit = fit_half(queries)
        scale *= unit
    best = tl.full((GROUP_PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PADDED,), tl.float32)
    acc = tl.zeros((DIM_PADDED // 2 if IS_8BIT else DIM_PADDED, GROUP_PADDED), tl.float32)
    acc_odd = acc
    for first in range(begin, end, TILE_KEYS):
        positions = first + tl.arange(0, TILE_KEYS)
        is_key = positions < end
        block = tl.load(table + positions // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        keys = layer_pool + block * block_stride + kv_head * PIECE
        at = (keys + positions % BLOCK_SIZE * DIM)[:, None] + dims[None, :]
        mask = is_key[:, None] & is_dim[None, :]
        k = tl.load(at, mask=mask, other=0.0)
        if IS_8BIT:
            k = as_type(k, queries.dtype, HAS_PTX)
        scores = tl.dot(k, queries, input_precision=PRECISION)
        if IS_8BIT:
            k_scale, v_scale = load_scales(
                keys, positions, is_key, KV_HEADS, BLOCK_SIZE, PIECE, DIM
            )
            log_scale, inverse = log2_and_inverse(v_scale, HAS_PTX)
            scores = scores * (scale * k_scale)[:, None] + log_scale[:, None]
        else:
            scores *= scale
        if ROWS_EACH == 1:
            scores = tl.where(is_key[:, None], scores, float("-inf"))
        else:
            is_seen = is_key[:, None] & (positions[:, None] < row_end[None, :])
            if HAS_WINDOW:
                is_seen &= positions[:, None] >= row_end[None, :] - window
            scores = tl.where(is_seen, scores, float("-inf"))
        larger = tl.maximum(best, tl.max(scores, axis=0) - (HALF_ROOM if IS_8BIT else 0))
        if ROWS_EACH > 1:  # a row may have seen no key yet
            larger = tl.where(larger > float("-inf"), larger, -1e30)
        weights = tl.exp2(scores - larger[None, :])
        fade = tl.exp2(best - larger)
        acc = acc * fade[None, :]
        if IS_8BIT:
            total = total * fade + tl.sum(weights * inverse[:, None], axis=0)
            values = keys + KV_HEADS * PIECE + positions % BLOCK_SIZE * DIM
            even, odd = load_pairs(values, is_key, DIM, DIM_PADDED, queries.dtype, HAS_PTX)
            acc = tl.dot(even, weights.to(even.dtype), acc, input_precision=PRECISION)
            acc_odd = acc_odd * fade[None, :]
            acc_odd = tl.dot(odd, weights.to(odd.dtype), acc_odd, input_precision=PRECISION)
        else:
            total = total * fade + tl.sum(weights, axis=0)
            values = keys + KV_HEADS * PIECE + positions % BLOCK_SIZE * DIM
            mask = is_dim[:, None] & is_key[None, :]
            v = tl.load(values[None, :] + dims[:, None], mask=mask, other=0.0)
            acc = tl.dot(v, weights.to(v.dtype), acc, input_precision=PRECISION)
        best = larger
    acc = acc.T
    if IS_8BIT:
        acc = tl.interleave(acc, acc_odd.T)
    share_sum = tl.where(total > 0, total, 1.0)  # 0: all keys are outside the window
    result = acc / share_sum[:, None]
    mask = is_row[:, None] & is_dim[None, :]
    if num_shares == 1:  # nothing to join
        HEADS: tl.constexpr = KV_HEADS * GROUP
        _store(result, out, out_scale, room, row, head, is_row, dims, HEADS, DIM, IS_QUANTISED)
    else:
        at = share.to(tl.int64) * ROWS_EACH * KV_HEADS * GROUP + place
        tl.store(partial + at[:, None] * DIM + dims[None, :], result, mask)
        log_sum = tl.where(total > 0, best + tl.log2(share_sum), float("-inf"))
        tl.store(log_sums + at, log_sum, mask=is_row)
    if IS_BEHIND_PREFILL:
        _end_after_previous(is_first, PDL)


@triton.jit
def _end_after_previous(is_first, PDL: tl.constexpr):
    """Make this kernel end after the previous one: the next kernel waits for this one alone."""
    if is_first:
        wait_for_previous(PDL)


@triton.jit
def _prefetch(rows, SIZE: tl.constexpr):
    """Prefetch the first SIZE elements of each of `rows` into L2, already written or not."""
    line: tl.constexpr = 128 * 8 // rows.dtype.element_ty.primitive_bitwidth
    for first in tl.static_range(0, SIZE, line):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [rows + first],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _store(
    values,
    out,
    out_scale,
    room,
    row,
    head,
    is_head,
    dims,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
):
    """Store values [heads, dims] float32 to heads `head` [heads] of rows `row` [heads]."""
    if IS_QUANTISED:  # rounded first, as if stored and quantised by a later kernel
        values, one = quantised_groups(values.to(tl.bfloat16).to(tl.float32))
        tl.store(out_scale + head * room + row, one, mask=is_head)
    at = out + (row * HEADS + head)[:, None] * DIM + dims[None, :]
    mask = is_head[:, None] & (dims < DIM)[None, :]
    tl.store(at, values.to(out.dtype.element_ty), mask=mask)


@launched
@triton.jit(do_not_specialize=["room"])
def _join_shares(
    partial,
    log_sums,
    indptr,
    starts,
    out,
    out_scale,
    room,
    IS_QUANTISED: tl.constexpr,
    ROWS_EACH: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_EACH: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_in(PDL)
    sequence = tl.program_id(0)
    begin, end = tl.load(indptr + sequence), tl.load(indptr + sequence + 1)
    wait_for_previous(PDL)
    if end - begin <= 1:
        return
    heads, dims = tl.program_id(1) * HEADS_EACH + tl.arange(0, HEADS_EACH), tl.arange(0, DIM_PADDED)
    is_head = heads < HEADS
    first_row, num_rows = sequence, 1
    if ROWS_EACH > 1:
        first_row = tl.load(starts + sequence)
        num_rows = tl.load(starts + sequence + 1) - first_row
    for row in range(num_rows):
        at = row * HEADS + heads
        joined = join_shares(
            partial, log_sums, at, is_head, dims, begin, end, ROWS_EACH * HEADS, AT_ONCE, DIM
        )
        of_heads = (first_row + row).to(tl.int64) + tl.zeros_like(heads)
        _store(
            joined,
            out,
            out_scale,
            room,
            of_heads,
            heads,
            is_head,
            dims,
            HEADS,
            DIM,
            IS_QUANTISED,
        )
