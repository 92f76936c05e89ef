"""How much of something may begin: so much at once, then at a steady rate."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class TokenBucket:
    """What lies in it can be spent at once; it begins full, and an empty one is full again after
    `fill_s`. Times are monotonic seconds. For one thread."""

    size: int
    fill_s: float
    _filled_s: float
    _level: float = field(init=False)

    def __post_init__(self) -> None:
        self._level = float(self.size)

    def wait_s(self, cost: int, now_s: float) -> float:
        """How long until `cost` can be spent; 0: now. More than it holds is due when it is full."""
        self._fill(now_s)
        missing = min(cost, self.size) - self._level
        return max(0.0, missing * self.fill_s / self.size)

    def spend(self, cost: int, now_s: float) -> None:
        """Take `cost` out, into debt if need be; negative `cost` puts back what was not used."""
        self._fill(now_s)
        self._level = min(self._level - cost, float(self.size))

    def _fill(self, now_s: float) -> None:
        gained = (now_s - self._filled_s) * self.size / self.fill_s
        self._level = min(self._level + gained, float(self.size))
        self._filled_s = now_s
