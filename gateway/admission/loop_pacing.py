"""Spaces calls at the event loop.

    calls ──► [waiting] ── one ──► its work │ other turns: steps are read and written │ ── one ──►
To look at a call, to send it out, or to account for its end, needs the loop for a millisecond each.
Many at once would be one long pause for all streams; so each begins some turns of the loop behind
the one before it. Where there is nothing else to do, a turn takes no time.
"""

from __future__ import annotations

import asyncio
from collections import deque

_APART = 3  # gRPC needs two turns to read a step, and the third passes it on


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
