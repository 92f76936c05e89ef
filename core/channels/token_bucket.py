"""A rate limit: a burst at once, then a steady rate."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class TokenBucket:
    """Its level can be spent at once; it starts full, and an empty bucket is full again after
    `fill_s`. Times are monotonic seconds. For one thread."""

    size: int
    fill_s: float
    _filled_s: float
    _level: float = field(init=False)

    def __post_init__(self) -> None:
        self._level = float(self.size)

    def wait_s(self, cost: int, now_s: float) -> float:
        """How long until `cost` can be spent; 0: now. More than `size` waits for a full bucket."""
        self._fill(now_s)
        missing = min(cost, self.size) - self._level
        return max(0.0, missing * self.fill_s / self.size)

    def spend(self, cost: int, now_s: float) -> None:
        """Take `cost` out, into debt if necessary; a negative `cost` is put back."""
        self._fill(now_s)
        self._level = min(self._level - cost, float(self.size))

    def _fill(self, now_s: float) -> None:
        gained = (now_s - self._filled_s) * self.size / self.fill_s
        self._level = min(self._level + gained, float(self.size))
        self._filled_s = now_s
