"""The gaps before single tokens, which nearly all deliveries are: gathered, and told of together.

    token ──► add ──► [gap gap gap ...] ── settle, a second's at most ──► whoever counts gaps
A token costs an append here, however many observers there are. Whoever reads what they count
settles first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

_MAX_GAPS = 1024  # that wait: counting them is a pause in all streams

TakeGaps = Callable[[Sequence[float], float], None]


class TokenGaps:
    """Of one second at a time. Use from one event loop."""

    def __init__(self) -> None:
        self._takers: list[TakeGaps] = []
        self._gaps_s: list[float] = []
        self._until_s = 0.0  # when the second ends that these are of

    def tell(self, take: TakeGaps) -> None:
        """From now on: `take` gets gaps in seconds, one a token, and when their second began."""
        self._takers.append(take)

    def add(self, gap_s: float, now_s: float) -> None:
        """A token came, `gap_s` behind its stream's last one."""
        if now_s >= self._until_s or len(self._gaps_s) >= _MAX_GAPS:
            self.settle()
            self._until_s = math.floor(now_s) + 1.0
        self._gaps_s.append(gap_s)

    def settle(self) -> None:
        """Tell of all that wait."""
        if self._gaps_s:
            gaps_s, self._gaps_s = self._gaps_s, []
            for take in self._takers:
                take(gaps_s, self._until_s - 1.0)
