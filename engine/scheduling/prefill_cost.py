"""What a step that computes n prompt tokens takes here: step_s + n * token_s, as measured.

    samples of the last steps, by size:     1-, 2-, 4-, ... 1024-, 2048-, ... tokens
    median of each size ─► the line through them that has the median slope (Theil and Sen)

A few steps that took far too long (the first one, a compilation, a paused process) change nothing,
and steps of all one size, as bulk prompts have, do not displace what was seen of others. Knows no
step: its owner says which are worth a sample.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from itertools import combinations

_NUM_SAMPLES = 15  # of a size
_MIN_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """In seconds; neither is negative."""

    step_s: float
    token_s: float


class PrefillCostEstimator:
    """Samples in, the line out."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[int, float]]] = {}  # by bits of the number of tokens
        self._estimate: PrefillCost | None = None
        self._is_stale = False

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens, at least one, took so long."""
        size = num_tokens.bit_length()
        self._samples.setdefault(size, deque(maxlen=_NUM_SAMPLES)).append((num_tokens, seconds))
        self._is_stale = True

    def estimate(self) -> PrefillCost | None:
        """None until there are a few samples of each of two sizes, one of them twice the other."""
        if self._is_stale:
            self._is_stale = False
            self._estimate = self._fit() or self._estimate
        return self._estimate

    def expected_s(self, num_tokens: int) -> float | None:
        """How long a step of so many tokens takes; None where nothing like it was seen."""
        if (cost := self.estimate()) is not None:
            return cost.step_s + cost.token_s * num_tokens
        alike = self._samples.get(num_tokens.bit_length(), ())
        if len(alike) < _MIN_SAMPLES:
            return None
        return num_tokens * statistics.median(seconds / tokens for tokens, seconds in alike)

    def _fit(self) -> PrefillCost | None:
        points = [
            (statistics.median(tokens), statistics.median(seconds))
            for tokens, seconds in (
                zip(*samples, strict=True)
                for samples in self._samples.values()
                if len(samples) >= _MIN_SAMPLES
            )
        ]
        slopes = [
            (one[1] - other[1]) / (one[0] - other[0])
            for one, other in combinations(points, 2)
            if max(one[0], other[0]) >= 2 * min(one[0], other[0])
        ]
        if not slopes:
            return None
        token_s = max(0.0, statistics.median(slopes))
        step_s = statistics.median(seconds - tokens * token_s for tokens, seconds in points)
        return PrefillCost(max(0.0, step_s), token_s)
