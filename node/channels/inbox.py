"""The input queue of the engine loop.

    other threads ── put ──► items, bell ──┐
    supervisor, peers, listener ── watch ──┴─► Inbox.receive ──► items, on the loop's thread

The loop's thread reads the sockets itself: waking it from another thread takes longer than handling
most messages.
"""

from __future__ import annotations

import math
import os
import select
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from ...core.channels.channel import Channel, FrameSocket

T = TypeVar("T")

_SHORT_S = 0.02  # epoll rounds up to whole milliseconds; a wait this short is timed exactly


class Inbox(Generic[T]):
    """`put` may be called by any thread, everything else only by the thread that receives."""

    def __init__(self) -> None:
        """Create it early: `select` needs a small file descriptor."""
        self._items: deque[T] = deque()
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._sources: dict[int, Callable[[], Iterable[T]]] = {}
        self._writers: set[int] = set()  # also watched for room to write

    def put(self, item: T) -> None:
        self._items.append(item)
        os.eventfd_write(self._bell, 1)

    def watch(self, socket: Channel | FrameSocket, read: Callable[[], Iterable[T]]) -> None:
        """Call `read` for items whenever the socket is ready."""
        self._sources[socket.fileno()] = read
        self._epoll.register(socket.fileno(), select.EPOLLIN)

    def watch_writes(self, socket: Channel | FrameSocket, is_wanted: bool) -> None:
        """Whether a watched socket is also ready when it has room to write."""
        fd = socket.fileno()
        if is_wanted != (fd in self._writers):
            self._writers ^= {fd}
            self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if is_wanted else 0))

    def unwatch(self, socket: Channel | FrameSocket) -> None:
        """Must be called before a watched socket is closed."""
        del self._sources[socket.fileno()]
        self._writers.discard(socket.fileno())
        self._epoll.unregister(socket.fileno())

    def receive(self, timeout_s: float) -> list[T]:
        """All available items; waits at most `timeout_s` for the first."""
        if 0 < timeout_s < _SHORT_S:
            select.select([self._epoll], [], [], timeout_s)
            timeout_s = 0
        items: list[T] = []
        for fd, _ in self._epoll.poll(None if timeout_s == math.inf else timeout_s):
            if fd == self._bell:
                os.eventfd_read(fd)  # before the items: what is put after them sets it again
                while self._items:
                    items.append(self._items.popleft())
            elif (read := self._sources.get(fd)) is not None:
                items.extend(read())
        return items

    def close(self) -> None:
        """No `put` may follow. Watched sockets are left open."""
        self._epoll.close()
        os.close(self._bell)
