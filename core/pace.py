"""How many of something may begin: so many at once, and then so many a second."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """A bucket of tokens. One thread uses it."""

    def __init__(
        self, per_s: float, burst: int, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s, self._burst = per_s, burst
        self._now_s = now_s
        self._num_left, self._at_s = float(burst), now_s()

    def wait_s(self) -> float:
        """How long until one may begin; 0: now."""
        now_s = self._now_s()
        self._num_left = min(self._burst, self._num_left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        return max(0.0, (1 - self._num_left) / self._per_s)

    def take(self) -> None:
        """One begins."""
        self._num_left -= 1
