"""An inbox without sockets: what the test puts is what the loop receives."""

from __future__ import annotations

import queue

from baton.node.engine_loop import Item


class FakeInbox:
    """`node.inbox.Inbox` without a file descriptor; threads may put."""

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
