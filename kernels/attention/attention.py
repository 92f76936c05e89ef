"""What the model knows of attention: plan once per step, run once per layer.

    tokens of a step:  | slice 0 ........ | slice 1 | slice 2 ... |     flat, no padding
    slice i:           query_lens[i] new tokens, the last of seq_lens[i] positions in its sequence

A slice of one token is a decode, as is one with drafts behind it, which gives each of its rows what
a decode of its own would; a longer one is a prefill chunk. All see earlier context through
their block table. A backend rotates q and k, writes the new K and V to the pool and attends; no
slice's result depends on another slice. `TorchAttention` is the backend on CPUs, and the reference
for the others.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..kv.kv_8bit import dequantize, head_dim_of, is_8bit, store_kv_8bit
from ..kv.kv_blocks import apply_rope, block_rows, store_kv

MAX_GRAPH_TOKENS, MAX_GRAPH_SLICES = 1024, 16  # of prefill in a CUDA graph, with padding
_TILE_TOKENS = 128  # query rows at a time: skips most of the upper triangle

BlockTables = Sequence[Sequence[int]]
_INT32S = {array, memoryview}


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step. Host values, but `slot_mapping` [tokens] int64, which lies on the device.

    A block table may be longer than its sequence needs. `num_decodes`: so many slices at the
    beginning are decodes, of one token or several with drafts; what follows them is treated as
    prefill. `is_graph`: all slices are decodes, and the
    step is captured in, or replayed from, a CUDA graph of so many. `graph_decodes`: so is this one,
    a graph of as many tokens as the slices have, with room for so many tokens of decodes; the other
    slices are all treated as prefill: at most MAX_GRAPH_SLICES with at most MAX_GRAPH_TOKENS
    together.
    """

    query_lens: Sequence[int]
    seq_lens: Sequence[int]  # new tokens included
    block_tables: BlockTables
    slot_mapping: Tensor
    num_decodes: int
    is_graph: bool = False
    graph_decodes: int | None = None


class AttentionBackend(Protocol):
    """Causal attention of a flat batch over the paged pool that the backend was made with."""

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare a step: everything that is the same for all layers."""
        ...

    def run(self, layer: int, qkv: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate q and k, store k and v, then attend.

        qkv [tokens, heads + 2 kv_heads, dim] contiguous, which may be overwritten, `rope` as
        kv_blocks.rope_angles gives it -> [tokens, heads, dim].
        """
        ...


def max_graph_blocks(max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """Of all prefill slices in a CUDA graph: prompts, and padding of up to all of its tokens."""
    num_of_prompt = -(-max_model_len // block_size)
    num_of_padding = -(-(max_num_seqs + MAX_GRAPH_TOKENS) // block_size)
    return (MAX_GRAPH_SLICES - 1) * num_of_prompt + num_of_padding


def flatten_tables(
    seq_lens: Sequence[int] | NDArray[Any], block_tables: BlockTables, block_size: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The needed part of all block tables behind each other, as `join_tables` has them."""
    counts = -(-np.asarray(seq_lens, np.int64) // block_size)
    pairs = zip(block_tables, counts.tolist(), strict=True)
    return join_tables([table[:count] for table, count in pairs])


def join_tables(block_tables: BlockTables) -> tuple[NDArray[Any], NDArray[Any]]:
    """All block tables behind each other: (indptr, indices), int32.

    Sequence i's blocks are indices[indptr[i] : indptr[i + 1]]. Tables that are arrays of int32, or
    views of such, are copied as they are: 2,000 blocks in a microsecond.
    """
    if not _INT32S.issuperset(map(type, block_tables)):
        block_tables = [t if type(t) in _INT32S else array("i", t) for t in block_tables]
    indptr = np.zeros(len(block_tables) + 1, np.int32)
    np.cumsum([*map(len, block_tables)], out=indptr[1:])
    joined: Any = bytearray().join(block_tables)  # type: ignore[arg-type]
    return indptr, np.frombuffer(joined, np.int32)


@dataclass(frozen=True, slots=True)
class _Slice:
    first: int  # tokens [first, last) of the step
    last: int
    seq_len: int
    is_decode: bool
    rows: tuple[Tensor, ...]  # for each layer [2 * kv_heads * blocks]


class TorchAttention:
    """An AttentionBackend over `pool`, one slice after the other.

    A slice's K and V are gathered to exactly its length, so no other sequence and no stale slot
    behind its end can reach the result, not even as NaN times zero; and gathered pieces stay in the
    cache, which a padded batch of all decodes would not. `windows`: how many positions each layer
    sees, the token's own included; None sees all. `dtype` is what is computed in, over a pool of 8
    bits; over any other the pool's own.
    """

    def __init__(
        self,
        pool: Tensor,
        windows: Sequence[int | None] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._pool = pool
        self._kv_heads, self._block_size = pool.shape[3:5]
        self._head_dim = head_dim_of(pool)
        self._is_8bit = is_8bit(pool)
        self._store_kv = store_kv_8bit if self._is_8bit else store_kv
        self._dtype = dtype if self._is_8bit else pool.dtype
        self._pieces = pool.view(-1, *pool.shape[4:])
        self._slices: list[_Slice] = []
        self._windows = windows or [None] * pool.shape[1]
        empty = pool.new_empty(_TILE_TOKENS, 0, dtype=self._dtype)
        self._masks = dict.fromkeys(self._windows, empty)

    def plan(self, metadata: AttentionMetadata) -> None:
        block_size = self._block_size
        self._blocks = metadata.slot_mapping // block_size
        self._offsets = metadata.slot_mapping % block_size
        self._slices = []
        first = 0
        num_decodes = metadata.num_decodes
        for index, (query_len, seq_len, block_table) in enumerate(
            zip(metadata.query_lens, metadata.seq_lens, metadata.block_tables, strict=True)
        ):
            num_blocks = math.ceil(seq_len / block_size)
            block_ids = torch.tensor(block_table[:num_blocks], device=self._pool.device)
            rows = block_rows(self._pool, block_ids).unbind(0)
            last = first + query_len
            is_decode = index < num_decodes or query_len == 1
            self._slices.append(_Slice(first, last, seq_len, is_decode, rows))
            first = last
            if not is_decode:
                self._grow_masks(seq_len)

    def run(self, layer: int, qkv: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        q_and_k, v = qkv.tensor_split([-self._kv_heads], dim=1)
        q, k = apply_rope(q_and_k, *rope).tensor_split([-self._kv_heads], dim=1)
        self._store_kv(self._pool, layer, k, v, self._blocks, self._offsets)
        return torch.cat([self._run_slice(layer, s, q[s.first : s.last]) for s in self._slices])

    def _run_slice(self, layer: int, s: _Slice, q: Tensor) -> Tensor:
        """q [query_len, heads, dim] of one slice -> the same shape."""
        gathered = self._pieces.index_select(0, s.rows[layer])
        if self._is_8bit:
            gathered = dequantize(gathered, self._dtype)
        kv = gathered.view(2, 1, self._kv_heads, -1, self._head_dim)
        k, v = kv.narrow(3, 0, s.seq_len).unbind(0)  # [1, kv_heads, seq_len, dim]
        window = self._windows[layer]
        if s.is_decode and len(q) == 1:
            return self._run_decode(q, k, v, s.seq_len, window)
        if s.is_decode:
            ends = range(s.seq_len - len(q) + 1, s.seq_len + 1)
            rows = zip(torch.split(q, 1), ends, strict=True)
            return torch.cat([self._run_decode(row, k, v, end, window) for row, end in rows])
        start = s.seq_len - len(q)
        return torch.cat(
            [
                self._run_tile(tile, k, v, start + first + len(tile), window)
                for first, tile in zip(
                    range(0, len(q), _TILE_TOKENS), torch.split(q, _TILE_TOKENS), strict=True
                )
            ]
        )

    def _run_decode(
        self, q: Tensor, k: Tensor, v: Tensor, last_key: int, window: int | None
    ) -> Tensor:
        """q [1, heads, dim]: the position before `last_key` -> the same shape."""
        first_key = 0 if window is None else max(0, last_key - window)
        # The heads of a group see the same keys: they pass as query rows of one head.
        grouped = q.view(1, self._kv_heads, -1, self._head_dim)
        k, v = k[:, :, first_key:last_key], v[:, :, first_key:last_key]
        return F.scaled_dot_product_attention(grouped, k, v).reshape(q.shape)

    def _run_tile(
        self, q: Tensor, k: Tensor, v: Tensor, last_key: int, window: int | None
    ) -> Tensor:
        """q [t, heads, dim]: the t positions before `last_key` -> the same shape."""
        kv_heads, t = self._kv_heads, len(q)
        first_key = 0 if window is None else max(0, last_key - t + 1 - window)
        num_keys = last_key - first_key
        shape = (kv_heads, q.shape[1] // kv_heads, num_keys, self._head_dim)
        mask = self._masks[window]
        out = F.scaled_dot_product_attention(
            q.view(t, kv_heads, -1, self._head_dim).permute(1, 2, 0, 3),
            k[0, :, None, first_key:last_key].expand(shape),
            v[0, :, None, first_key:last_key].expand(shape),
            attn_mask=mask[_TILE_TOKENS - t :, mask.shape[1] - num_keys :],
        )  # [kv_heads, group, t, dim]
        return out.permute(2, 0, 1, 3).reshape(q.shape)

    def _grow_masks(self, num_keys: int) -> None:
        """Keep one mask [tile, length >= num_keys] for each window, aligned to its lower right.

        Its own lower right corner of any size is the mask of a smaller tile over fewer keys.
        """
        for window, mask in self._masks.items():
            if num_keys > mask.shape[1]:
                length = 1 << max(num_keys - 1, _TILE_TOKENS).bit_length()
                hidden = mask.new_full((_TILE_TOKENS, length), -math.inf)
                own = length - _TILE_TOKENS  # the column of the first row's own key
                self._masks[window] = hidden.triu(own + 1)
                if window is not None:
                    self._masks[window] += hidden.tril(own - window)
