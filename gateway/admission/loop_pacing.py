"""Spaces calls at the event loop.

    calls ──► [waiting] ── one ──► its work │ other turns: steps are read and written │ ── one ──►
To look at a call, to send it out, or to account for its end, needs the loop for a millisecond each.
Many at once would be one long pause for all streams; so each begins some turns of the loop behind
the one before it. Where there is nothing else to do, a turn takes no time.
"""

from __future__ import annotations

import asyncio

_APART = 3  # gRPC needs two turns to read a step, and the third passes it on


class LoopPacing:
    """First come, first served, among those that are new and among those that go on: of the two
    kinds one of each by turns, so that neither waits for all of the other. Use from one event loop.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # held until the next may begin; the first of each kind wait
        self._firsts = asyncio.Lock(), asyncio.Lock()

    async def take(self, *, has_begun: bool = False) -> None:
        """Wait for one's turn: none, if nobody began a moment ago. `has_begun`: it is not its
        first."""
        async with self._firsts[has_begun]:
            await self._turn.acquire()
        self._pass(_APART - 1)  # who waits is woken a turn later

    def _pass(self, num_turns: int) -> None:
        """Let the next begin after so many turns of the loop."""
        if num_turns:
            asyncio.get_running_loop().call_soon(self._pass, num_turns - 1)
        else:
            self._turn.release()
