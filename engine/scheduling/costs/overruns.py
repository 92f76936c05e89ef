"""How much longer than estimated steps of decodes and prompts take, for a promise to decodes.

The estimate compared with is the last fit of the cost, not the one that the steps were planned by:
what was learned since is no error any more.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from ....core.step_cost import StepCost
from ....core.step_shape import StepShape

MIN_ERRORS = 10
_NUM_STEPS, _MIN_OF_ROWS = 256, 8  # in all, and of one size
_KEPT_SHARE, _MOST = 0.98, 1.5
_PAUSE, _MOST_PAUSES = 1.3, 0.05  # over the median; their share
_LEAST_S = 1e-9


class Overruns:
    """The overruns of one engine's last steps with both."""

    def __init__(self) -> None:
        self._steps: deque[tuple[StepShape, float]] = deque(maxlen=_NUM_STEPS)
        self._factor = 1.0
        self._by_rows: dict[int, float] = {}

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Record how long a step with decodes and prompts took."""
        self._steps.append((shape, seconds))

    def factor(self, num_rows: int | None = None) -> float:
        """The factor by which steps exceed their estimate, at the percentile that a promise to
        decodes is kept at. For steps of `num_rows`, if enough were measured: it may be below 1,
        and steps in a graph have few sizes. Else for all steps: at least 1."""
        if num_rows is None:
            return self._factor
        return self._by_rows.get(num_rows, self._factor)

    def fit(self, cost: StepCost) -> None:
        """Compare with `cost` from now on. Steps far over the median are left out as pauses, as
        long as they are rare."""
        if len(self._steps) < MIN_ERRORS:
            return
        ratios = [seconds / max(cost.seconds(shape), _LEAST_S) for shape, seconds in self._steps]
        most = _PAUSE * statistics.median(ratios)
        if sum(ratio > most for ratio in ratios) > max(1, _MOST_PAUSES * len(ratios)):
            most = max(ratios)
        by_rows: dict[int, list[float]] = {}
        for (shape, _), ratio in zip(self._steps, ratios, strict=True):
            if ratio <= most:
                by_rows.setdefault(shape.num_rows, []).append(ratio)
        self._factor = max(1.0, _kept_by([ratio for ratio in ratios if ratio <= most]))
        self._by_rows = {
            rows: _kept_by(some) for rows, some in by_rows.items() if len(some) >= _MIN_OF_ROWS
        }


def _kept_by(ratios: list[float]) -> float:
    """The percentile of the ratios that a promise is kept at; the largest, of a few."""
    return min(sorted(ratios)[math.ceil(_KEPT_SHARE * (len(ratios) - 1))], _MOST)
