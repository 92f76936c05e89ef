"""A launched step: its sequences, its shape, and when it was launched."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.step_shape import StepShape
from .execution.runner_protocols import LaunchedStep
from .scheduling.block_tables import StepFence
from .scheduling.schedule import ScheduledSequence
from .scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A launched step; its results are parallel to `clear` followed by `others`."""

    clear: list[Sequence]
    others: list[ScheduledSequence]
    fence: StepFence
    launched: LaunchedStep
    shape: StepShape
    launched_s: float
    launching_s: float  # how long it took to plan and launch it
    promise_s: float | None
    has_drafts: bool
    num_in_flight: int  # in a pipeline, this step included
    previous_ended: bool  # during the launch of this step
