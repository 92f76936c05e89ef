"""The interface of attention backends: plan once per step, run once per layer.

    tokens of a step:  | slice 0 ........ | slice 1 | slice 2 ... |     flat, no padding
    slice i:           query_lens[i] new tokens, the last of seq_lens[i] positions in its sequence

A slice of one token is a decode. So is one token followed by drafts: the result of each row equals
that of a separate decode. Any other slice is a prefill chunk. Slices read earlier context through
their block tables. A backend normalises and rotates q and k, writes the new K and V to the pool and
attends; a slice's result does not depend on other slices. attention_torch.py is the backend for
CPUs, and the reference for the others.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..kv.kv_blocks import HeadNorms
from ..products.weights import Activations, Fp8Weight

MAX_GRAPH_TOKENS, MAX_GRAPH_SLICES = 1024, 16  # prefill part of a CUDA graph, with padding

BlockTables = Sequence[Sequence[int]]
_INT32S = {array, memoryview}


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The batch of one step. `slot_mapping` [tokens] int64 is on the device, all else on the host.

    A block table may be longer than its sequence needs. `num_decodes`: the number of decodes, which
    come first, each of one token or several with drafts; the slices after them are treated as
    prefill. `is_graph`: all slices are decodes, and the step is captured in, or replayed from, a
    CUDA graph of exactly this size. `graph_decodes`: the step is captured in, or replayed from, a
    CUDA graph with room for this many decode tokens; all other slices are treated as prefill, at
    most MAX_GRAPH_SLICES slices with at most MAX_GRAPH_TOKENS tokens in total.
    """

    query_lens: Sequence[int]
    seq_lens: Sequence[int]  # new tokens included
    block_tables: BlockTables
    slot_mapping: Tensor
    num_decodes: int
    is_graph: bool = False
    graph_decodes: int | None = None


class AttentionBackend(Protocol):
    """Causal attention of a flat batch over the backend's paged KV pool."""

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare a step: compute what is the same for all layers."""
        ...

    def run(
        self,
        layer: int,
        qkv: Tensor,
        rope: tuple[Tensor, Tensor],
        norms: HeadNorms | None = None,
        reader: Fp8Weight | None = None,
    ) -> Activations:
        """Normalise and rotate q and k, store k and v, then attend.

        qkv [tokens, heads + 2 kv_heads, dim] contiguous, may be overwritten; `rope` from
        kv_blocks.rope_angles -> [tokens, heads * dim], quantised for `reader` or not.
        """
        ...


def max_graph_blocks(max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """The maximum number of blocks of all prefill slices in a CUDA graph: those of the prompts, and
    those of a padding slice, which may have up to all tokens of the graph."""
    num_of_prompt = -(-max_model_len // block_size)
    num_of_padding = -(-(max_num_seqs + MAX_GRAPH_TOKENS) // block_size)
    return (MAX_GRAPH_SLICES - 1) * num_of_prompt + num_of_padding


def flatten_tables(
    seq_lens: Sequence[int] | NDArray[Any], block_tables: BlockTables, block_size: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """`join_tables` of block tables cut to the blocks that their sequences need."""
    counts = -(-np.asarray(seq_lens, np.int64) // block_size)
    pairs = zip(block_tables, counts.tolist(), strict=True)
    return join_tables([table[:count] for table, count in pairs])


def join_tables(block_tables: BlockTables) -> tuple[NDArray[Any], NDArray[Any]]:
    """Concatenate block tables: (indptr, indices), int32.

    Sequence i's blocks are indices[indptr[i] : indptr[i + 1]]. Tables that are arrays of int32, or
    views of int32 arrays, are copied without conversion: 2,000 blocks in a microsecond.
    """
    if not _INT32S.issuperset(map(type, block_tables)):
        block_tables = [t if type(t) in _INT32S else array("i", t) for t in block_tables]
    indptr = np.zeros(len(block_tables) + 1, np.int32)
    np.cumsum([*map(len, block_tables)], out=indptr[1:])
    joined: Any = bytearray().join(block_tables)  # type: ignore[arg-type]
    return indptr, np.frombuffer(joined, np.int32)
