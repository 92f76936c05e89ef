"""May a request wait? Refuses at once what would only fail later, or wait longer than it may.

    tokens ahead at the best prefill engine + its own, ÷ tokens/s measured there = predicted wait
    predicted wait > what is left of its deadline, or --max-queue-s ► Overloaded, and when to retry
A request that nothing is ahead of is never refused: its prefill is what the next estimate needs.
Decode is not predicted: a full one holds its prefill engines back, which makes these slower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..core.errors import DeadlineExceeded, Overloaded
from .engine_table import EngineTable

_SOON_S = 0.1  # no retry sooner


class QueueLimit:
    """The rule of one gateway. `max_queue_s` None: a request's deadline alone bounds its wait."""

    def __init__(self, table: EngineTable, max_queue_s: float | None) -> None:
        self._table = table
        self._max_queue_s = math.inf if max_queue_s is None else max_queue_s

    def check(self, num_tokens: int, cached_tokens: Mapping[str, int], remaining_s: float) -> None:
        """Raise Overloaded unless a prompt of so many tokens can be computed in time.

        DeadlineExceeded where no time is left at all. `cached_tokens`: by incarnation, what engines
        are likely to have of it.
        """
        if remaining_s <= 0:
            raise DeadlineExceeded("the request's deadline passed")
        wait_s = self._table.predicted_prefill_s(num_tokens, cached_tokens)
        allowed_s = min(self._max_queue_s, remaining_s)
        if wait_s <= allowed_s:
            return
        bound = "its deadline" if remaining_s < self._max_queue_s else "the longest wait here"
        raise Overloaded(
            f"the prompt would be computed in about {wait_s:.1f} s, {bound} is {allowed_s:.1f} s",
            retry_after_s=max(_SOON_S, wait_s - allowed_s),
        )
