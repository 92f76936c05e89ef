"""Time and entropy under a test's control: fakes of core/ports.py."""

from __future__ import annotations

from baton.core.ports import Clock, Entropy


class FakeClock(Clock):
    """A clock that stands still until it is advanced. Wall time starts at 2000-01-01 and keeps
    step."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic_s(self) -> float:
        return self._now_s

    def unix_ns(self) -> int:
        return 946_684_800_000_000_000 + round(self._now_s * 1e9)

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self._now_s += seconds


class TickingClock(FakeClock):
    """A clock that advances by a millisecond at each reading."""

    def monotonic_s(self) -> float:
        self.advance(0.001)
        return super().monotonic_s()


class FakeEntropy(Entropy):
    """Counts instead of drawing. `node` separates the identifiers of several fakes."""

    def __init__(self, node: int = 0) -> None:
        self._node = node
        self._num_drawn = 0

    def new_id(self) -> str:
        return f"{self._node:016x}{self._next():016x}"

    def new_seed(self) -> int:
        return self._next()

    def _next(self) -> int:
        self._num_drawn += 1
        return self._num_drawn
