"""Which engines a request gets next, and for how long it waits where there are none.

fails on an engine ──► settle: all streams tell of a node's end, in any order
fails since an engine's partner is silent ──► until that one is heard of, or its end is
                  └──► avoid: that engine, or the pair, is left out for a moment
no engine can take it ──► until one can, or `recovery_wait_s` are over
engines are busy ──► until there is a place, or `max_queue_s` are over, of the first dispatch
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...core.errors import Overloaded, Unavailable
from .engine_link import Avoid, Blocked, Demand, EngineLink, MustWait, Route, Router
from .suspects import LATE_S, Suspects


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How long and how often a request tries.

    `max_engine_failures`: engines that may die under one request, since it may be what kills them,
    unless it has got further in between (suspects.py).
    `recovery_wait_s`: wait for an engine where none can take it. `avoid_s`: how long a failed
    engine is left out even if it is the only one; covers the age of heartbeats. `settle_s`: the end
    of a node is noticed on several streams, in any order; a retry waits until all were received.
    `max_queue_s`: wait for a place on engines that are there, of what was never dispatched.
    """

    max_attempts: int = 3
    max_engine_failures: int = 2
    recovery_wait_s: float = 10.0
    avoid_s: float = 0.3
    settle_s: float = 0.02
    max_queue_s: float = math.inf


class DispatchWait:
    """Of one session, created as it arrives. `blocked`: why the last `find` found nothing."""

    def __init__(
        self, limits: SessionLimits, router: Router, suspects: Suspects, now_s: float
    ) -> None:
        self.blocked: Blocked | None = None
        self._limits = limits
        self._router = router
        self._suspects = suspects
        self._avoid = Avoid()
        self._avoid_until_s = 0.0
        self._queue_until_s = now_s + limits.max_queue_s
        self._engine_until_s: float | None = None
        self._settle_until_s: float | None = None
        self._silent: tuple[EngineLink, float] | None = None  # since when

    def find(
        self, demand: Demand, fingerprint: str | None, suspect_call: str | None, now_s: float
    ) -> Route | None:
        """Engines, or None for now. `suspect_call`: the call's id if the request is a suspect.

        Raises what ends the request: no engine came in time, or its call has killed too many.
        """
        if self._settle_until_s is not None:
            if now_s < self._settle_until_s:
                self.blocked = None
                return None
            self._settle_until_s = None
        if self._silent is not None:
            partner, since_s = self._silent
            if partner.heard_s < since_s + self._limits.settle_s and now_s < since_s + LATE_S:
                self.blocked, self._settle_until_s = None, now_s + self._limits.settle_s
                return None
            self._silent = None
        if self._avoid and now_s >= self._avoid_until_s:
            self._avoid = Avoid()
        avoid = self._avoid
        if suspect_call is not None:
            if error := self._suspects.convicted.get(suspect_call):
                raise error
            if self._suspects.tries(suspect_call):
                self.blocked, self._settle_until_s = None, now_s + self._limits.settle_s
                return None
            avoid = self._suspects.keep_clear(avoid)
        try:
            route = self._router.choose(demand, avoid=avoid, fingerprint=fingerprint)
        except MustWait as wait:
            self.blocked, self._engine_until_s = wait.reason, None
            return None
        except Unavailable:
            self.blocked = Blocked.ENGINE
            if avoid != self._avoid:  # until another suspect's trial is over
                self.blocked, self._engine_until_s = None, None
                self._settle_until_s = now_s + self._limits.settle_s
            elif self._engine_until_s is None:
                self._engine_until_s = now_s + self._limits.recovery_wait_s
            elif now_s >= self._engine_until_s:
                raise
            return None
        self.blocked = self._engine_until_s = None
        return route

    def for_word_of(self, silent: EngineLink, now_s: float) -> None:
        """Its partner cannot reach it, so that the attempt failed: it may have died under the
        request, and the next attempt waits until that is known."""
        self._silent = silent, now_s

    def failed(self, blamed: str | None, pair: tuple[str, str], now_s: float) -> None:
        """An attempt did, by the engine `blamed` or by the pair."""
        if blamed is None:
            self._avoid = Avoid(self._avoid.incarnations, self._avoid.pairs | {pair})
        else:
            self._avoid = Avoid(self._avoid.incarnations | {blamed}, self._avoid.pairs)
        self._avoid_until_s = now_s + self._limits.avoid_s
        self._settle_until_s = now_s + self._limits.settle_s

    def engine_lost(self, incarnation: str) -> None:
        """Its end is known, and whether it died."""
        if self._silent is not None and self._silent[0].incarnation == incarnation:
            self._silent = None

    @contextmanager
    def without(self, incarnation: str, now_s: float) -> Iterator[None]:
        """That engine is left out, for one `find`."""
        before = self._avoid, self._avoid_until_s
        self._avoid = Avoid(self._avoid.incarnations | {incarnation}, self._avoid.pairs)
        self._avoid_until_s = now_s + self._limits.avoid_s
        yield
        self._avoid, self._avoid_until_s = before

    def for_a_place(self) -> None:
        """It waits in the queue, as if it had never been dispatched."""
        self.blocked, self._engine_until_s = Blocked.PLACE, None

    def queue_error(self, now_s: float) -> Overloaded | None:
        """What ends a request that waits for its first place, if that took too long."""
        if now_s < self._queue_until_s:
            return None
        return Overloaded(f"no place became free in {self._limits.max_queue_s:g} s")

    def until_s(self, *, is_queued: bool) -> float:
        """When something of this is over; `is_queued`: it waits for its first place."""
        waits = [self._queue_until_s if is_queued else math.inf]
        if self._settle_until_s is not None:
            waits.append(self._settle_until_s)
        if self._engine_until_s is not None:
            waits.append(self._engine_until_s)
        if self._avoid:
            waits.append(self._avoid_until_s)
        return min(waits)
