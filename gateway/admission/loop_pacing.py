"""LoopPacing at the event loop for those who need it long: calls that arrive or end beside streams.

    calls ──► [waiting] ── one ──► its work │ other turns: steps are read and written │ ── one ──►
To take a call in, or to account for it, needs the loop for up to a millisecond. Many at once would
be one long pause for all streams; so each begins some turns of the loop behind the one before it.
Where there is nothing else to do, a turn takes no time.
"""

from __future__ import annotations

import asyncio
from collections import deque

_APART = 3  # gRPC needs two turns to read a step, and the third passes it on


class LoopPacing:
    """First come, first served. Use from one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_left = 0  # turns of the loop until the next may begin

    async def take(self) -> None:
        """Wait for one's turn: none, if nobody began a moment ago."""
        if not self._num_left:
            self._begin()
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
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
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # whoever waited may be gone
                turn.set_result(None)
                self._begin()
                return
