"""When a call may come in. QueueLimit refuses at once what would only fail later, or wait longer
than it may; LoopPacing spaces calls at the event loop.

    prompt tokens ahead, and its own, by the engine's own cost ─┐ the longer of the two
    requests ahead that wait for a decode place, by how many    ├─► longer than what is left of its
    places become free                                         ─┘   deadline, or --max-queue-s:
                                                                    Overloaded, and when to retry
What is ahead is reckoned in an order fair between callers: of each other caller, no more than this
one has waiting itself. So a light caller is not refused for what bulk callers have queued. Nothing
is refused on a guess: a time that no engine has measured yet counts as none.

    calls ──► [waiting] ── one ──► its work │ other turns: steps are read and written │ ── one ──►
To look at a call, to send it out, or to account for its end, needs the loop for a millisecond each.
Many at once would be one long pause for all streams; so each begins some turns of the loop behind
the one before it. Where there is nothing else to do, a turn takes no time.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping

from ...core.errors import DeadlineExceeded, Overloaded
from ...prefix_index.prefix_sources import CachedPrefix
from ..engines.engine_table import EngineTable
from ..request.dispatch_queue import SEQUENCE_TOKENS, CallerShare, DispatchQueue

_SOON_S = 0.1  # no retry sooner
_APART = 3  # gRPC needs two turns to read a step, and the third passes it on


class QueueLimit:
    """The rule of one gateway. `max_queue_s` None: a request's deadline alone bounds its wait."""

    def __init__(self, table: EngineTable, queue: DispatchQueue, max_queue_s: float | None) -> None:
        self._table, self._queue = table, queue
        self._max_queue_s = math.inf if max_queue_s is None else max_queue_s

    def check(
        self,
        caller_id: int,
        num_tokens: int,
        cached: Mapping[str, CachedPrefix],
        remaining_s: float,
    ) -> None:
        """Raise Overloaded unless a prompt of so many tokens can be computed in time.

        DeadlineExceeded where no time is left at all. `cached`: by incarnation, what engines have
        of it.
        """
        if remaining_s <= 0:
            raise DeadlineExceeded("the request's deadline passed")
        held = {caller: share.num_tokens for caller, share in self._queue.shares.items()}
        wait_s = max(
            self._table.predicted_prefill_s(caller_id, num_tokens, cached, held),
            self._place_s(caller_id, num_tokens),
        )
        allowed_s = min(self._max_queue_s, remaining_s)
        if wait_s <= allowed_s:
            return
        bound = "its deadline" if remaining_s < self._max_queue_s else "the longest wait here"
        raise Overloaded(
            f"the prompt would be computed in about {wait_s:.1f} s, {bound} is {allowed_s:.1f} s",
            retry_after_s=max(_SOON_S, wait_s - allowed_s),
        )

    def _place_s(self, caller_id: int, num_tokens: int) -> float:
        """Until as many decode places are free as requests are served before this one, and one."""
        places_per_s = self._table.places_per_s
        if not self._queue.has_no_place or not places_per_s:
            return 0.0
        shares = self._queue.shares
        own = shares.get(caller_id, CallerShare())
        cost = own.cost + num_tokens + SEQUENCE_TOKENS
        num_ahead = own.num_requests + sum(
            share.num_requests * min(1.0, cost / share.cost)
            for other, share in shares.items()
            if other != caller_id
        )
        return (num_ahead + 1) / places_per_s


class LoopPacing:
    """First come, first served, among those that are new and among those that go on: of the two
    kinds one of each by turns, so that neither waits for all of the other. Use from one event loop.
    """

    def __init__(self) -> None:
        self._new: deque[asyncio.Future[None]] = deque()
        self._begun: deque[asyncio.Future[None]] = deque()
        self._next = self._begun  # whose turn it is, if both wait
        self._num_left = 0  # turns of the loop until the next may begin

    async def take(self, *, has_begun: bool = False) -> None:
        """Wait for one's turn: none, if nobody began a moment ago. `has_begun`: it is not its
        first."""
        if not self._num_left:
            self._begin()
            return
        turn = asyncio.get_running_loop().create_future()
        (self._begun if has_begun else self._new).append(turn)
        await turn

    def _begin(self) -> None:
        self._num_left = _APART
        asyncio.get_running_loop().call_soon(self._pass)

    def _pass(self) -> None:
        """A turn of the loop is over."""
        self._num_left -= 1
        if self._num_left:
            asyncio.get_running_loop().call_soon(self._pass)
            return
        while waiting := self._next or self._begun or self._new:
            turn = waiting.popleft()
            if not turn.done():  # whoever waited may be gone
                self._next = self._new if waiting is self._begun else self._begun
                turn.set_result(None)
                self._begin()
                return
