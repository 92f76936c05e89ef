"""Spaces the work of calls on the event loop.

    calls ──► [waiting] ── one ──► its work │ loop turns: steps are read and written │ ── one ──►
To validate a call, to dispatch it, and to record its end take the loop a millisecond each. Many at
once would pause all streams; so each starts a few turns of the loop after the one before it. On an
idle loop a turn takes no time.
"""

from __future__ import annotations

import asyncio

_APART = 3  # turns: gRPC reads a step in two, and the third passes it on


class LoopPacing:
    """First come, first served among new calls, and among calls in progress; the two kinds
    alternate, so that neither waits for all of the other. Use from one event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # held until the next call may start; each kind's first waits
        self._firsts = asyncio.Lock(), asyncio.Lock()

    async def take(self, *, has_begun: bool = False) -> None:
        """Wait for a turn; returns at once if no call started a moment ago. `has_begun`: the call
        is in progress."""
        async with self._firsts[has_begun]:
            await self._turn.acquire()
        self._pass(_APART - 1)  # a waiter wakes one turn after the release

    def _pass(self, num_turns: int) -> None:
        """Let the next call start after this many turns of the loop."""
        if num_turns:
            asyncio.get_running_loop().call_soon(self._pass, num_turns - 1)
        else:
            self._turn.release()
