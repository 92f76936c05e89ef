"""What the scheduler hands to the runner for one step, and what comes back. Plain values.

A step is a flat batch: the slices' tokens lie behind each other, no padding. Slice i computes
positions [start, start + len(token_ids)) of its sequence; their KV goes where the block table says,
and attention sees positions 0..start+len-1 through the same table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to sample the token behind a slice's last position."""

    params: SamplingParams
    key: int  # core.sampling.token_key of the position that is sampled


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's part of a step. `sample` is None for a chunk that is not the last."""

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: SampleSpec | None

    @property
    def num_scheduled_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token and its log-probability under the unfiltered distribution."""

    token_id: int
    logprob: float


class Runner(Protocol):
    """Executes steps: owns model, KV tensors and sampler; knows no request."""

    def execute(self, batch: Sequence[SequenceSlice]) -> list[SampledToken | None]:
        """Run one step. The result is parallel to `batch`; None where nothing was sampled.

        Raises EngineFailed when the device is lost or out of memory: the engine must end.
        """
        ...
