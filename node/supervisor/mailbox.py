"""Messages on their way to one stream: bounded, and ended exactly once.

Between an engine's frames and a gRPC stream's writer, on the event loop. A reader that does not
read costs its own stream and nobody else's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from ...core.errors import BatonError, Overloaded

M = TypeVar("M")

MAX_MESSAGES = 4096  # minutes of steps; gRPC itself buffers some MiB before this grows at all


class Mailbox(Generic[M]):
    """One reader, any number of writers, one thread."""

    def __init__(self, max_messages: int = MAX_MESSAGES) -> None:
        self._messages: deque[M] = deque()
        self._max_messages = max_messages
        self._changed = asyncio.Event()
        self._is_over = False
        self._error: BatonError | None = None

    @property
    def is_over(self) -> bool:
        return self._is_over

    def put(self, message: M) -> None:
        """Queue a message; a full mailbox ends instead."""
        if self._is_over:
            return
        if len(self._messages) >= self._max_messages:
            self._messages.clear()
            self.end(Overloaded("the stream's reader is too slow"))
            return
        self._messages.append(message)
        self._changed.set()

    def end(self, error: BatonError | None = None) -> None:
        """No more messages; the reader gets those already queued, then `error`."""
        if not self._is_over:
            self._is_over, self._error = True, error
            self._changed.set()

    async def get(self) -> M | None:
        """The next message, or None at a quiet end. Raises the error that ended it."""
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self._is_over:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._messages.popleft()
