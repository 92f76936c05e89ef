"""Paged attention by FlashInfer: FA3 for prefill, its tensor-core path for decode.

    decodes of a graph    one wrapper for each number of decodes: its buffers stay where they are
    other decodes         one wrapper
    prefill chunks        one wrapper

All work is on one stream, so the wrappers share their workspaces. Only what the host writes may
not change before it is copied: an event guards FlashInfer's pinned buffer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from .attention import AttentionMetadata, flatten_tables
from .rope_triton import rotate_and_store
from .upload import pin, upload

_LAYOUT = "HND"  # [blocks, 2, kv_heads, block_size, dim]
_MIN_WORKSPACE_BYTES = 128 << 20
_INT_WORKSPACE_BYTES = 8 << 20
_QUERY_TILE = 16  # rows of a tile of decodes, to which a group of heads is padded


class FlashInferAttention:
    """An AttentionBackend over `pool` for at most `max_num_seqs` slices; float16 or bfloat16."""

    def __init__(self, pool: Tensor, num_heads: int, max_num_seqs: int, max_model_len: int) -> None:
        kv_heads, block_size, dim = pool.shape[3:]
        self._num_heads, self._block_size = num_heads, block_size
        self._shape = (num_heads, kv_heads, dim, block_size)
        self._dtype, self._device = pool.dtype, pool.device
        self._layers = pool.unbind(1)
        # Split decodes leave their partial results here, in float32.
        partial_bytes = max_num_seqs * num_heads * _QUERY_TILE * (dim + 1) * 4
        self._workspace = torch.zeros(
            max(_MIN_WORKSPACE_BYTES, 2 * partial_bytes), dtype=torch.uint8, device=self._device
        )
        self._int_workspace = torch.empty(
            _INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device
        )
        max_blocks = max_num_seqs * -(-max_model_len // block_size)
        self._graph_indices = pool.new_zeros(max_blocks, dtype=torch.int32)
        self._graph_wrappers: dict[int, Any] = {}
        self._decode = self._share_plan(
            BatchDecodeWithPagedKVCacheWrapper(self._workspace, _LAYOUT, use_tensor_cores=True)
        )
        has_fa3 = torch.cuda.get_device_capability(self._device)[0] == 9
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, _LAYOUT, backend="fa3" if has_fa3 else "fa2"
        )
        self._active_decode: Any = self._decode
        self._num_decodes = self._num_slices = 0
        self._planned = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def plan(self, metadata: AttentionMetadata) -> None:
        n = self._num_decodes = metadata.num_decodes
        self._num_slices = len(metadata.query_lens)
        self._slot_mapping = metadata.slot_mapping
        self._planned.synchronize()
        if n:
            self._plan_decodes(metadata, n)
        if n < self._num_slices:
            self._plan_prefill(metadata, n)
        self._planned.record()

    def _plan_decodes(self, metadata: AttentionMetadata, n: int) -> None:
        self._active_decode = self._graph_wrapper(n) if metadata.is_graph else self._decode
        indptr, indices, last_lens = self._tables(metadata.seq_lens[:n], metadata.block_tables[:n])
        self._active_decode.plan(indptr, indices, last_lens, *self._shape, q_data_type=self._dtype)

    def _plan_prefill(self, metadata: AttentionMetadata, n: int) -> None:
        indptr, indices, last_lens = self._tables(metadata.seq_lens[n:], metadata.block_tables[n:])
        starts = np.cumsum([0, *metadata.query_lens[n:]], dtype=np.int32)
        self._prefill.plan(
            pin(starts, self._device),
            indptr,
            indices,
            last_lens,
            *self._shape,
            causal=True,
            q_data_type=self._dtype,
        )

    def _tables(self, seq_lens: Any, block_tables: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Where each block table begins, the tables, tokens in each last block.

        The first and last are in host memory, where FlashInfer plans; the tables it only copies.
        """
        indptr, indices = flatten_tables(seq_lens, block_tables, self._block_size)
        last_lens = (np.array(seq_lens, np.int32) - 1) % self._block_size + 1
        device = self._device
        return pin(indptr, device), upload(indices, device), pin(last_lens, device)

    def _graph_wrapper(self, num_decodes: int) -> Any:
        if num_decodes not in self._graph_wrappers:
            zeros = self._graph_indices.new_zeros
            self._graph_wrappers[num_decodes] = self._share_plan(
                BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace,
                    _LAYOUT,
                    use_cuda_graph=True,
                    use_tensor_cores=True,
                    paged_kv_indptr_buffer=zeros(num_decodes + 1),
                    paged_kv_indices_buffer=self._graph_indices,
                    paged_kv_last_page_len_buffer=zeros(num_decodes),
                )
            )
        return self._graph_wrappers[num_decodes]

    def _share_plan(self, wrapper: Any) -> Any:
        """Let all decode wrappers plan into one buffer: a step has one of them."""
        wrapper.reset_workspace_buffer(self._workspace, self._int_workspace)
        return wrapper

    def run(self, layer: int, qkv: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        layer_pool = self._layers[layer]
        q = rotate_and_store(qkv, rope, layer_pool, self._slot_mapping)
        out = torch.empty_like(q)
        n = self._num_decodes
        if n:
            self._active_decode.run(q[:n], layer_pool, out=out[:n])
        if n < self._num_slices:
            self._prefill.run(q[n:], layer_pool, out=out[n:])
        return out
