"""Attention on a GPU: rotate and store, then the decodes by one part and the prefill by another.

    tokens of a step:  | decodes ....... | prefill chunks ........ |
                       DecodePart        PrefillPart

Either part may come from Triton or from FlashInfer: see `make_gpu_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .attention import AttentionMetadata, BlockTables
from .attention_triton import TritonDecode, TritonPrefill
from .rope_triton import rotate_and_store


class DecodePart(Protocol):
    """Attention of slices of one token."""

    def plan(self, seq_lens: Sequence[int], block_tables: BlockTables, *, is_graph: bool) -> None:
        """Prepare a step; `is_graph` as in AttentionMetadata."""
        ...

    def run(self, q: Tensor, layer_pool: Tensor, out: Tensor) -> None:
        """q, out [decodes, heads, dim]; layer_pool [blocks, 2, kv_heads, block_size, dim]."""
        ...


class PrefillPart(Protocol):
    """Causal attention of longer slices."""

    def plan(
        self, query_lens: Sequence[int], seq_lens: Sequence[int], block_tables: BlockTables
    ) -> None:
        """Prepare a step."""
        ...

    def run(self, q: Tensor, layer_pool: Tensor, out: Tensor) -> None:
        """q, out [tokens, heads, dim]; layer_pool [blocks, 2, kv_heads, block_size, dim]."""
        ...


class GpuAttention:
    """An AttentionBackend over `pool`."""

    def __init__(self, pool: Tensor, decode: DecodePart, prefill: PrefillPart) -> None:
        self._layers = pool.unbind(1)  # [num_blocks, 2, kv_heads, block_size, dim] each
        self._decode, self._prefill = decode, prefill
        self._num_decodes = self._num_slices = 0

    def plan(self, metadata: AttentionMetadata) -> None:
        n = self._num_decodes = metadata.num_decodes
        self._num_slices = len(metadata.query_lens)
        self._slot_mapping = metadata.slot_mapping
        seq_lens, tables = metadata.seq_lens, metadata.block_tables
        if n:
            self._decode.plan(seq_lens[:n], tables[:n], is_graph=metadata.is_graph)
        if n < self._num_slices:
            self._prefill.plan(metadata.query_lens[n:], seq_lens[n:], tables[n:])

    def run(self, layer: int, qkv: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        layer_pool = self._layers[layer]
        q = rotate_and_store(qkv, rope, layer_pool, self._slot_mapping)
        out = torch.empty_like(q)
        n = self._num_decodes
        if n:
            self._decode.run(q[:n], layer_pool, out[:n])
        if n < self._num_slices:
            self._prefill.run(q[n:], layer_pool, out[n:])
        return out


def make_gpu_attention(
    pool: Tensor,
    num_heads: int,
    max_num_seqs: int,
    max_model_len: int,
    *,
    decode: str,
    prefill: str,
) -> GpuAttention:
    """`decode` and `prefill` are "triton" or "flashinfer"."""
    decode_part: DecodePart
    prefill_part: PrefillPart
    if decode == "triton":
        decode_part = TritonDecode(pool, max_num_seqs, max_model_len)
    else:
        from .attention_flashinfer import FlashInferDecode

        decode_part = FlashInferDecode(pool, num_heads, max_num_seqs, max_model_len)
    if prefill == "triton":
        prefill_part = TritonPrefill(pool)
    else:
        from .attention_flashinfer import FlashInferPrefill

        prefill_part = FlashInferPrefill(pool, num_heads)
    return GpuAttention(pool, decode_part, prefill_part)
