"""What the model knows of attention: plan once per step, run once per layer.

    tokens of a step:  | slice 0 ........ | slice 1 | slice 2 ... |     flat, no padding
    slice i:           query_lens[i] new tokens, the last of seq_lens[i] positions in its sequence

A slice of one token is a decode, a longer one a prefill chunk; both see earlier context through
their block table. A backend rotates q and k, writes the new K and V to the pool and attends; no
slice's result depends on another slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

BlockTables = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step. Host values, but `slot_mapping` [tokens] int64, which lies on the device.

    A block table may be longer than its sequence needs. `is_graph`: all slices are decodes, and the
    step is captured in, or replayed from, a CUDA graph of so many. `is_prefill_graph`: so is this
    one, for as many tokens as `slot_mapping` has; its slices are all treated as prefill and may
    leave tokens over.
    """

    query_lens: Sequence[int]
    seq_lens: Sequence[int]  # new tokens included
    block_tables: BlockTables
    slot_mapping: Tensor
    is_graph: bool = False
    is_prefill_graph: bool = False

    @property
    def num_decodes(self) -> int:
        """Slices of one token at the beginning; what follows them is treated as prefill."""
        if self.is_prefill_graph:
            return 0
        lens = self.query_lens
        return next((i for i, length in enumerate(lens) if length > 1), len(lens))


class AttentionBackend(Protocol):
    """Causal attention of a flat batch over the paged pool that the backend was made with."""

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare a step: everything that is the same for all layers."""
        ...

    def run(self, layer: int, qkv: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate q and k, store k and v, then attend.

        qkv [tokens, heads + 2 kv_heads, dim] contiguous, which may be overwritten, `rope` as
        rope.rope_angles gives it -> [tokens, heads, dim].
        """
        ...


def flatten_tables(
    seq_lens: Sequence[int], block_tables: BlockTables, block_size: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The needed part of all block tables behind each other: (indptr, indices), int32.

    Sequence i's blocks are indices[indptr[i] : indptr[i + 1]].
    """
    counts = [-(-length // block_size) for length in seq_lens]
    indptr = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    needed = (table[:count] for table, count in zip(block_tables, counts, strict=True))
    indices = np.fromiter(chain.from_iterable(needed), np.int32, int(indptr[-1]))
    return indptr, indices
