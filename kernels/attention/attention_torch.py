"""Attention in plain torch, slice by slice: the CPU backend, and the reference for GPU backends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kv.kv_8bit import dequantize, head_dim_of, is_8bit, store_kv_8bit
from ..kv.kv_blocks import HeadNorms, apply_rope, block_rows, norm_heads, store_kv
from ..products.weights import Fp8Weight
from .attention import AttentionMetadata

_TILE_TOKENS = 128  # query rows at a time: skips most masked keys of long prompts


@dataclass(frozen=True, slots=True)
class _Slice:
    first: int  # tokens [first, last) of the step
    last: int
    seq_len: int
    is_decode: bool
    rows: tuple[Tensor, ...]  # for each layer [2 * kv_heads * blocks]: see block_rows


class TorchAttention:
    """An AttentionBackend over `pool`.

    A slice's K and V are gathered to exactly its length, so no other sequence and no stale slot
    past its end can affect the result, not even as NaN times zero. Gathered slices also fit the CPU
    cache, which a padded batch of all decodes does not. `windows`: the sliding window of each layer
    in positions, including the token's own; None: no window. `dtype`: the type of the computation
    over an 8-bit pool; over any other pool it is the pool's type.
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
        self._windows = windows or [None] * pool.shape[1]
        empty = pool.new_empty(_TILE_TOKENS, 0, dtype=self._dtype)
        self._masks = dict.fromkeys(self._windows, empty)

    def plan(self, metadata: AttentionMetadata) -> None:
        block_size = self._block_size
        self._blocks = metadata.slot_mapping // block_size
        self._offsets = metadata.slot_mapping % block_size
        self._slices = list[_Slice]()
        first = 0
        for index, (query_len, seq_len, block_table) in enumerate(
            zip(metadata.query_lens, metadata.seq_lens, metadata.block_tables, strict=True)
        ):
            num_blocks = math.ceil(seq_len / block_size)
            block_ids = torch.tensor(block_table[:num_blocks], device=self._pool.device)
            rows = block_rows(self._pool, block_ids).unbind(0)
            last = first + query_len
            is_decode = index < metadata.num_decodes or query_len == 1
            self._slices.append(_Slice(first, last, seq_len, is_decode, rows))
            first = last
            if not is_decode:
                self._grow_masks(seq_len)

    def run(
        self,
        layer: int,
        qkv: Tensor,
        rope: tuple[Tensor, Tensor],
        norms: HeadNorms | None = None,
        reader: Fp8Weight | None = None,
    ) -> Tensor:
        q_and_k, v = qkv.tensor_split([-self._kv_heads], dim=1)
        if norms is not None:
            q_and_k = norm_heads(q_and_k, self._kv_heads, norms)
        q, k = apply_rope(q_and_k, *rope).tensor_split([-self._kv_heads], dim=1)
        self._store_kv(self._pool, layer, k, v, self._blocks, self._offsets)
        tiles = [tile for s in self._slices for tile in self._run_slice(layer, s, q)]
        return torch.cat(tiles).flatten(1)

    def _run_slice(self, layer: int, s: _Slice, q: Tensor) -> Iterator[Tensor]:
        """q [tokens, heads, dim] of the step -> the slice's outputs in tiles. The rows of a decode,
        including drafts, are computed one by one."""
        gathered = self._pieces.index_select(0, s.rows[layer])
        if self._is_8bit:
            gathered = dequantize(gathered, self._dtype)
        kv = gathered.view(2, 1, self._kv_heads, -1, self._head_dim)
        window, size = self._windows[layer], 1 if s.is_decode else _TILE_TOKENS
        for first in range(s.first, s.last, size):
            last = min(first + size, s.last)
            end = s.seq_len - s.last + last
            start = 0 if window is None else max(0, end - (last - first) + 1 - window)
            k, v = kv.narrow(3, start, end - start).unbind(0)  # [1, kv_heads, keys, dim]
            if s.is_decode:
                yield self._run_decode(q[first:last], k, v)
            else:
                yield self._run_tile(q[first:last], k, v, self._masks[window])

    def _run_decode(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, heads, dim] of the last key's position -> the same shape."""
        # The heads of a group attend to the same keys: they are computed as rows of one head.
        grouped = q.view(1, self._kv_heads, -1, self._head_dim)
        return F.scaled_dot_product_attention(grouped, k, v).reshape(q.shape)

    def _run_tile(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """q [t, heads, dim] of the last t keys' positions -> the same shape."""
        kv_heads, t, num_keys = self._kv_heads, len(q), k.shape[2]
        shape = (kv_heads, q.shape[1] // kv_heads, num_keys, self._head_dim)
        out = F.scaled_dot_product_attention(
            q.view(t, kv_heads, -1, self._head_dim).permute(1, 2, 0, 3),
            k[0, :, None].expand(shape),
            v[0, :, None].expand(shape),
            attn_mask=mask[_TILE_TOKENS - t :, mask.shape[1] - num_keys :],
        )  # [kv_heads, group, t, dim]
        return out.permute(2, 0, 1, 3).reshape(q.shape)

    def _grow_masks(self, num_keys: int) -> None:
        """Keep one mask [tile, length >= num_keys] for each window.

        Its lower right corner of any size is the mask of a smaller tile over fewer keys.
        """
        for window, mask in self._masks.items():
            if num_keys > mask.shape[1]:
                length = 1 << max(num_keys - 1, _TILE_TOKENS).bit_length()
                hidden = mask.new_full((_TILE_TOKENS, length), -math.inf)
                own = length - _TILE_TOKENS  # the column of the first row's own key
                self._masks[window] = hidden.triu(own + 1)
                if window is not None:
                    self._masks[window] += hidden.tril(own - window)
