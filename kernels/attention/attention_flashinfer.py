"""Prefill attention by FlashInfer: FlashAttention 3. No sliding windows.

FlashInfer plans a step on the host, in pinned memory, and copies the plan to the device in stream
order. The host must not overwrite a plan before it has been copied: `plan` waits for an event.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from flashinfer import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)
from torch import Tensor

from ..kv.kv_8bit import head_dim_of, is_8bit
from ..upload import pin, upload
from .attention import BlockTables, flatten_tables
from .attention_triton import TritonPrefill

_LAYOUT = "HND"  # [blocks, 2, kv_heads, block_size, dim]
_WORKSPACE_BYTES = 128 << 20
_KEY_TILE = 128  # keys per load of the kernel for contiguous (ragged) K and V


class FlashInferPrefill:
    """A PrefillPart: FlashAttention 3 on Hopper, 2 elsewhere.

    Contiguous keys are loaded tile by tile, paged keys row by row: for 8192 tokens of 32 heads 0.83
    instead of 0.99 ms on an H200. So a step without earlier context reads its own K and V, any
    other step the pool. FA3 does not support an 8-bit pool with a scale per token: steps that read
    one use our own Triton kernel.
    """

    def __init__(self, pool: Tensor, num_heads: int, dtype: torch.dtype) -> None:
        kv_heads, block_size = pool.shape[3:5]
        self._block_size, self._dtype = block_size, dtype
        self._shape = (num_heads, kv_heads, head_dim_of(pool))
        self._of_pool = TritonPrefill(pool, num_heads, dtype) if is_8bit(pool) else None
        self._workspace = pool.new_zeros(_WORKSPACE_BYTES, dtype=torch.uint8)
        backend = _backend(pool)
        self._paged = BatchPrefillWithPagedKVCacheWrapper(self._workspace, _LAYOUT, backend=backend)
        self._ragged = BatchPrefillWithRaggedKVCacheWrapper(self._workspace, "NHD", backend=backend)
        self._is_ragged = False
        self._is_planned = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def plan(
        self, query_lens: Sequence[int], seq_lens: Sequence[int], block_tables: BlockTables
    ) -> None:
        device = self._workspace.device
        starts = pin(np.cumsum([0, *query_lens], dtype=np.int32), device)
        self._is_ragged = has_own_keys(query_lens, seq_lens)
        options = {"causal": True, "q_data_type": self._dtype}
        if self._is_ragged:
            self._is_planned.synchronize()
            self._ragged.plan(starts, starts, *self._shape, **options)
        elif self._of_pool is not None:
            self._of_pool.plan(query_lens, seq_lens, block_tables)
        else:
            tables = _tables(seq_lens, block_tables, self._block_size, device)
            self._is_planned.synchronize()
            self._paged.plan(starts, *tables, *self._shape, self._block_size, **options)
        self._is_planned.record()

    def run(self, qkv: Tensor, layer_pool: Tensor, out: Tensor, window: int | None) -> None:
        assert window is None
        heads, kv_heads, _ = self._shape
        q, k, v = qkv.tensor_split((heads, heads + kv_heads), dim=1)
        if self._is_ragged:
            self._ragged.run(q, k, v, out=out)
        elif self._of_pool is not None:
            self._of_pool.run(qkv, layer_pool, out, window)
        else:
            self._paged.run(q, layer_pool, out=out)


def _backend(pool: Tensor) -> str:
    return "fa3" if torch.cuda.get_device_capability(pool.device)[0] == 9 else "fa2"


def has_own_keys(query_lens: Sequence[int], seq_lens: Sequence[int]) -> bool:
    """Whether no slice has earlier context or shares its last tile of keys with the next slice.

    Keys of the next slice in that tile have a weight of 0, but 0 times a NaN of theirs is NaN.
    """
    is_fresh = list(query_lens) == list(seq_lens)
    return is_fresh and not any(length % _KEY_TILE for length in query_lens[:-1])


def _tables(
    seq_lens: Sequence[int], block_tables: BlockTables, block_size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The start of each block table, the joined tables, and the tokens in each last block; int32.

    The first and last are in host memory, where FlashInfer plans; the tables are on the device.
    """
    indptr, indices = flatten_tables(seq_lens, block_tables, block_size)
    last_lens = (np.array(seq_lens, np.int32) - 1) % block_size + 1
    return pin(indptr, device), upload(indices, device), pin(last_lens, device)
