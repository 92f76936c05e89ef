"""What the model knows of attention: plan once per step, run once per layer.

    tokens of a step:  | slice 0 ........ | slice 1 | slice 2 ... |     flat, no padding
    slice i:           query_lens[i] new tokens, the last of seq_lens[i] positions in its sequence

A slice of one token is a decode, a longer one a prefill chunk; both see earlier context through
their block table. A backend writes the new K and V to the pool, and no slice's result depends on
another slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step. Host values, but `slot_mapping` [tokens] int64, which lies on the device.

    A block table may be longer than its sequence needs.
    """

    query_lens: Sequence[int]
    seq_lens: Sequence[int]  # new tokens included
    block_tables: Sequence[Sequence[int]]
    slot_mapping: Tensor


class AttentionBackend(Protocol):
    """Causal attention of a flat batch over the paged pool that the backend was made with."""

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare a step: everything that is the same for all layers."""
        ...

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the step's k, v [tokens, kv_heads, dim], then attend.

        q [tokens, heads, dim] -> [tokens, heads, dim]; rotated already.
        """
        ...
