"""What an engine needs of whatever executes its steps: a device of this process, several ranks, a
pipeline, or a fake of the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ...core.request.request import TokenLogprobs
from .batch import SampledToken, SequenceSlice


class LaunchedStep(Protocol):
    """A step on the device."""

    @property
    def number(self) -> int:
        """The device's step count, as its readers see it, is at least this once the step's KV is
        written. 0: the step is not counted."""
        ...

    @property
    def device_s(self) -> float | None:
        """How long the step was on the device, from its first kernel on; None if that is not
        measured. Valid after `collect`."""
        ...

    def has_completed(self) -> bool:
        """Whether `collect` would return without waiting. Raises EngineFailed as it does."""
        ...

    def collect(self) -> list[SampledToken | None]:
        """Wait until the step has completed; call once. The result is parallel to the batch, with
        None where nothing was sampled.

        Raises EngineFailed when the device is lost or out of memory: the engine must end.
        """
        ...

    def prompt_logprobs(self) -> Mapping[int, tuple[TokenLogprobs, ...]]:
        """Scores of `prompt_targets`, by slice, where a slice has any. Valid after `collect`."""
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

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, target), after all launched steps; returns when that is done."""
        ...


class Drafter(Protocol):
    """The draft model or draft head of a runner."""

    def draft(self, batch: Sequence[SequenceSlice]) -> list[list[int]]:
        """Continue each slice's sequence by one token for each of its `draft_samples`, sampled by
        that; called between two steps. `token_ids` are those that the draft model has no KV of, up
        to the last known token; the block table has room for all. A head may have no draft for a
        slice. Raises EngineFailed."""
        ...
