"""A limit per minute as a bucket that fills steadily and holds one minute's worth."""

from __future__ import annotations

_MINUTE_S = 60.0


class TokenBucket:
    """What lies in it can be spent at once; it begins full. Times are monotonic seconds."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._filled_s = now_s

    def change_rate(self, per_minute: int) -> None:
        """Another limit from now on; what lies in the bucket stays, as far as it holds it."""
        self._per_minute = per_minute
        self._level = min(self._level, float(per_minute))

    def wait_s(self, cost: int, now_s: float) -> float:
        """How long until `cost` can be spent; 0: now. More than it holds is due when it is full."""
        self._fill(now_s)
        missing = min(cost, self._per_minute) - self._level
        return max(0.0, missing * _MINUTE_S / self._per_minute)

    def spend(self, cost: int, now_s: float) -> None:
        """Take `cost` out, into debt if need be; negative `cost` puts back what was not used."""
        self._fill(now_s)
        self._level = min(self._level - cost, float(self._per_minute))

    def _fill(self, now_s: float) -> None:
        gained = (now_s - self._filled_s) * self._per_minute / _MINUTE_S
        self._level = min(self._level + gained, float(self._per_minute))
        self._filled_s = now_s
