"""The steps of a pipeline that are in flight: one for each stage, of prompts alone one more.

    step()  =  launch while there is room and something to compute -> wait for the oldest -> collect

Each has a part of the sequences that decode, or the next chunks of prompts: while one step is on a
stage the others are on the other stages. Knows no scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..core.step_cost import StepShape
from .execution.batch import LaunchedStep
from .scheduling.block_tables import StepFence
from .scheduling.schedule import ScheduledSequence
from .scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A launched step: its results are parallel to those that are `clear`, and behind them to the
    `others`."""

    clear: list[Sequence]
    others: list[ScheduledSequence]
    fence: StepFence
    launched: LaunchedStep
    shape: StepShape
    launched_s: float
    launching_s: float  # how long it took to plan and to launch it
    promise_s: float | None
    has_drafts: bool
    num_in_flight: int  # in a pipeline, with this one
    hid_end: bool  # of the step before, which ended while this one was launched


class StepsInFlight:
    """At most as many steps as `most` says at the time, which complete in their order."""

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._steps: deque[StepInFlight] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def advance(
        self,
        launch: Callable[[], StepInFlight | None],
        collect: Callable[[StepInFlight], None],
        meanwhile: Callable[[], bool] | None,
    ) -> bool:
        """Launch what can be, and collect the oldest step; False if there is none.

        `launch` returns None where there is nothing to do. `meanwhile` is called again and again
        while the oldest is in flight, and returns whether there may be something to launch.
        """
        self._fill(launch)
        if not self._steps:
            return False
        oldest = self._steps[0]
        while meanwhile is not None and not oldest.launched.has_completed():
            if meanwhile():
                self._fill(launch)
        collect(self._steps.popleft())
        return True

    def _fill(self, launch: Callable[[], StepInFlight | None]) -> None:
        """A step that has completed is collected first: its sequences can go on in the next."""
        while len(self._steps) < self._most():
            if self._steps and self._steps[0].launched.has_completed():
                return
            step = launch()
            if step is None:
                return
            self._steps.append(step)
