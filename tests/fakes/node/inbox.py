"""Inboxes whose emptiness a test can see; one is without sockets, and so without descriptors."""

from __future__ import annotations

import queue

from baton.node.channels.inbox import Inbox
from baton.node.engine_process.engine_loop import Item


class SocketInbox(Inbox[Item]):
    """The real one. It is empty when nothing would be received."""

    def empty(self) -> bool:
        return not self._epoll.poll(0)


class FakeInbox:
    """What the test puts is what the loop receives; threads may put."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()

    def put(self, item: Item) -> None:
        self._items.put(item)

    def empty(self) -> bool:
        return self._items.empty()

    def receive(self, timeout_s: float | None) -> list[Item]:
        items: list[Item] = []
        try:
            items.append(self._items.get(block=timeout_s != 0, timeout=timeout_s))
            while True:
                items.append(self._items.get_nowait())
        except queue.Empty:
            return items
