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
    """One sequence's part of a step. `sample` is None for a chunk that is not the last.

    `follows`: the slice's one token is what that slice of the step launched before samples, which
    the host does not know yet; `token_ids` holds a stand-in for it.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: SampleSpec | None
    follows: int | None = None

    @property
    def num_scheduled_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token and its log-probability under the unfiltered distribution."""

    token_id: int
    logprob: float


class LaunchedStep(Protocol):
    """A step on the device."""

    def collect(self) -> list[SampledToken | None]:
        """Wait until it has completed; call once. Parallel to the batch, None: nothing sampled.

        Raises EngineFailed when the device is lost or out of memory: the engine must end.
        """
        ...


class Runner(Protocol):
    """Executes steps: owns model, KV tensors and sampler; knows no request."""

    @property
    def runs_ahead(self) -> bool:
        """Whether `launch` returns before the step has completed.

        One more step may then be launched before it is collected. Steps complete in order.
        """
        ...

    def launch(self, batch: Sequence[SequenceSlice]) -> LaunchedStep:
        """Begin one step; `batch` is not empty. Raises EngineFailed as `collect` does."""
        ...


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """What a runner that does not run ahead returns."""

    results: list[SampledToken | None]

    def collect(self) -> list[SampledToken | None]:
        return self.results
