"""Attention on a GPU: rotate and store, then the decodes by one part and the prefill by another.

    tokens of a step:  | decodes ....... | prefill chunks ........ |
                       DecodePart        PrefillPart

Either part may come from Triton or from FlashInfer: see `make_gpu_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ..kv.kv_blocks_triton import rotate_and_store
from ..row_room import empty_rows
from .attention import AttentionMetadata, BlockTables
from .attention_triton import TritonGraphPrefill, TritonPrefill
from .decode_attention_triton import TritonDecode


class DecodePart(Protocol):
    """Attention of slices of one token."""

    def plan(self, seq_lens: Sequence[int], block_tables: BlockTables, *, is_graph: bool) -> None:
        """Prepare a step; `is_graph` as in AttentionMetadata."""
        ...

    def run(self, q: Tensor, layer_pool: Tensor, out: Tensor, window: int | None) -> None:
        """q [decodes, heads, dim], of which a token's heads lie together; out the same, contiguous.

        layer_pool [blocks, 2, kv_heads, block_size, dim].
        """
        ...


class PrefillPart(Protocol):
    """Causal attention of longer slices."""

    def plan(
        self, query_lens: Sequence[int], seq_lens: Sequence[int], block_tables: BlockTables
    ) -> None:
        """Prepare a step."""
        ...

    def run(self, qkv: Tensor, layer_pool: Tensor, out: Tensor, window: int | None) -> None:
        """qkv [tokens, heads + 2 kv_heads, dim], rotated; out [tokens, heads, dim].

        The pool holds all K and V, those of qkv too.
        """
        ...


class GpuAttention:
    """An AttentionBackend over `pool`. `windows`: see attention.TorchAttention."""

    def __init__(
        self,
        pool: Tensor,
        decode: DecodePart,
        prefill: PrefillPart,
        graph_prefill: TritonGraphPrefill,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        self._layers = pool.unbind(1)  # [num_blocks, 2, kv_heads, block_size, dim] each
        self._windows = windows or [None] * len(self._layers)
        self._decode, self._prefill = decode, prefill
        self._graph_prefill = graph_prefill
        self._active_prefill: PrefillPart = prefill
        self._num_decodes = self._num_slices = 0

    def plan(self, metadata: AttentionMetadata) -> None:
        n = self._num_decodes = metadata.num_decodes
        self._num_slices = len(metadata.query_lens)
        self._slot_mapping = metadata.slot_mapping
        seq_lens, tables = metadata.seq_lens, metadata.block_tables
        if n:
            is_graph = metadata.is_graph or metadata.is_prefill_graph
            self._decode.plan(seq_lens[:n], tables[:n], is_graph=is_graph)
        self._active_prefill = self._prefill
        if metadata.is_prefill_graph:
            self._active_prefill = self._graph_prefill
            self._graph_prefill.set_size(len(metadata.slot_mapping) - n)
        if n < self._num_slices:
            self._active_prefill.plan(metadata.query_lens[n:], seq_lens[n:], tables[n:])

    def run(self, layer: int, qkv: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        layer_pool, window = self._layers[layer], self._windows[layer]
        rotate_and_store(qkv, rope, layer_pool, self._slot_mapping)
        num_tokens, all_heads, dim = qkv.shape
        heads = all_heads - 2 * layer_pool.shape[2]
        shape = (num_tokens, heads, dim)
        out = empty_rows(shape, qkv)
        if self._active_prefill is self._graph_prefill:
            out.zero_()  # tokens that no slice has may not become NaN, which the pool would keep
        n = self._num_decodes
        if n:
            self._decode.run(qkv[:n, :heads], layer_pool, out[:n], window)
        if n < self._num_slices:
            self._active_prefill.run(qkv[n:], layer_pool, out[n:], window)
        return out


def make_gpu_attention(
    pool: Tensor,
    num_heads: int,
    max_num_seqs: int,
    max_model_len: int,
    *,
    decode: str,
    prefill: str,
    windows: Sequence[int | None] | None = None,
) -> GpuAttention:
    """`decode` and `prefill` are "triton" or, without a window in any layer, "flashinfer"."""
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
    graph_prefill = TritonGraphPrefill(pool, max_model_len)
    return GpuAttention(pool, decode_part, prefill_part, graph_prefill, windows)
