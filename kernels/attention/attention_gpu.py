"""Attention on a GPU: normalise, rotate and store, then separate kernels for decodes and prefill.

    tokens of a step:  | decodes ....... | prefill chunks ........ |
                       TritonDecode      PrefillPart: Triton's or FlashInfer's

In a step with both they run concurrently: decodes are bound by memory, prefill by arithmetic.
Prefill is launched first, and decodes use the resources that it leaves free on the
multiprocessors: in a CUDA graph by dependent launch, once all programs of the prefill have begun,
otherwise prefill runs on a second stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from ..kv.kv_blocks import HeadNorms
from ..kv.kv_blocks_triton import rotate_and_store
from ..products.weights import Activations, Fp8Rows, Fp8Weight
from ..row_room import empty_rows
from .attention import AttentionMetadata, BlockTables
from .attention_triton import TritonGraphPrefill, TritonPrefill
from .decode_attention_triton import TritonDecode, can_quantise

_HIGH_PRIORITY = -5  # the highest; torch's own streams have 0


class PrefillPart(Protocol):
    """Causal attention of prefill slices."""

    def plan(
        self, query_lens: Sequence[int], seq_lens: Sequence[int], block_tables: BlockTables
    ) -> None:
        """Prepare a step."""
        ...

    def run(self, qkv: Tensor, layer_pool: Tensor, out: Tensor, window: int | None) -> None:
        """qkv [tokens, heads + 2 kv_heads, dim], rotated; out [tokens, heads, dim]; layer_pool
        [blocks, 2, kv_heads, block_size, dim], or of 8 bits: see kv_8bit.py.

        The pool holds all K and V, including those of qkv.
        """
        ...


class GpuAttention:
    """An AttentionBackend over `pool`. `windows`: see TorchAttention.

    In CUDA graphs `graph_prefill` replaces `prefill`.
    """

    def __init__(
        self,
        pool: Tensor,
        decode: TritonDecode,
        prefill: PrefillPart,
        graph_prefill: TritonGraphPrefill,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        self._layers = pool.unbind(1)  # [num_blocks, 2, kv_heads, block_size, dim] each
        self._windows = windows or [None] * len(self._layers)
        self._decode, self._prefill = decode, prefill
        self._graph_prefill = graph_prefill
        self._num_slices = self._num_decodes = self._num_rows = 0
        self._graph_decodes: int | None = None
        self._side: torch.cuda.Stream | None = None
        if pool.is_cuda:
            self._side = torch.cuda.Stream(pool.device, priority=_HIGH_PRIORITY)  # type: ignore[no-untyped-call]

    def plan(self, metadata: AttentionMetadata) -> None:
        n = self._num_decodes = metadata.num_decodes
        num_rows = self._num_rows = sum(metadata.query_lens[:n])
        self._num_slices = len(metadata.query_lens)
        self._slot_mapping = metadata.slot_mapping
        graph_decodes = self._graph_decodes = metadata.graph_decodes
        seq_lens, tables = metadata.seq_lens, metadata.block_tables
        if n or graph_decodes:
            places = num_rows if metadata.is_graph else graph_decodes
            query_lens = metadata.query_lens[:n] if num_rows > n else ()
            self._decode.plan(seq_lens[:n], tables[:n], places, query_lens)
        chunks = (metadata.query_lens[n:], seq_lens[n:], tables[n:])
        if graph_decodes is not None:
            self._graph_prefill.plan(*chunks, first_row=num_rows)
        elif n < self._num_slices:
            self._prefill.plan(*chunks)

    def run(
        self,
        layer: int,
        qkv: Tensor,
        rope: tuple[Tensor, Tensor],
        norms: HeadNorms | None = None,
        reader: Fp8Weight | None = None,
    ) -> Activations:
        layer_pool, window = self._layers[layer], self._windows[layer]
        rotate_and_store(qkv, rope, norms, layer_pool, self._slot_mapping)
        num_tokens, all_heads, dim = qkv.shape
        heads = all_heads - 2 * layer_pool.shape[2]
        n = self._num_rows if self._graph_decodes is None else self._graph_decodes
        has_prefill = self._num_decodes < self._num_slices
        if reader is not None and not has_prefill and can_quantise(qkv, reader):
            quantised = Fp8Rows.empty(num_tokens, reader, qkv, in_groups=True)
            self._decode.run(qkv[:, :heads], layer_pool, quantised, window)
            return quantised
        out = empty_rows((num_tokens, heads, dim), qkv)
        decodes = (qkv[:n, :heads], layer_pool, out[:n], window)
        if has_prefill and self._graph_decodes is not None:
            shares = self._graph_prefill.attend(qkv, layer_pool, out, window)
            if n:
                self._decode.run(*decodes, is_behind_prefill=True)
            self._graph_prefill.join(shares, out)
            return out.flatten(1)
        if has_prefill:
            with self._beside(is_alone=n == 0):
                self._prefill.run(qkv[n:], layer_pool, out[n:], window)
        if n:
            self._decode.run(*decodes)
            if has_prefill and self._side is not None:
                torch.cuda.current_stream().wait_stream(self._side)
        return out.flatten(1)

    @contextmanager
    def _beside(self, *, is_alone: bool) -> Iterator[None]:
        """Launch the body's kernels on a second stream (unless `is_alone`), concurrent with later
        launches until the current stream waits for it."""
        if is_alone or self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield


def make_gpu_attention(
    pool: Tensor,
    num_heads: int,
    max_num_seqs: int,
    max_model_len: int,
    dtype: torch.dtype,
    *,
    prefill: str,
    windows: Sequence[int | None] | None = None,
    rows_each: int = 1,
) -> GpuAttention:
    """Attention for q, k and v of `dtype`, over a pool of the same type or of 8 bits. `prefill` is
    "triton" or, if no layer has a window, "flashinfer". Decodes have up to `rows_each` tokens."""
    prefill_part: PrefillPart
    has_windows = any(window is not None for window in windows or ())
    if prefill == "triton":
        prefill_part = TritonPrefill(pool, num_heads, dtype, has_windows=has_windows)
    else:
        from .attention_flashinfer import FlashInferPrefill

        prefill_part = FlashInferPrefill(pool, num_heads, dtype)
    max_rows = max_num_seqs * rows_each
    graph_prefill = TritonGraphPrefill(
        pool, num_heads, dtype, max_rows, max_model_len, has_windows=has_windows
    )
    decode_part = TritonDecode(pool, max_num_seqs, max_model_len, rows_each)
    return GpuAttention(pool, decode_part, prefill_part, graph_prefill, windows)
