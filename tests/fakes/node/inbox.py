"""Inboxes whose emptiness a test can see; one is without sockets, and so without descriptors."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable

from baton.node.channels.inbox import Inbox
from baton.node.engine_process.engine_loop import Item

from .channel_pairs import PlayedChannel


class SocketInbox(Inbox[Item]):
    """The real one. It is empty when nothing would be received."""

    def empty(self) -> bool:
        return not self._epoll.poll(0)


class FakeInbox:
    """What the test puts is what the loop receives, with what came on channels; threads may put."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._watched: dict[int, tuple[PlayedChannel, Callable[[], Iterable[Item]]]] = {}

    def put(self, item: Item) -> None:
        self._items.put(item)

    def watch(self, channel: PlayedChannel, read: Callable[[], Iterable[Item]]) -> None:
        self._watched[channel.fileno()] = (channel, read)

    def watch_writes(self, channel: PlayedChannel, is_wanted: bool) -> None:
        assert not is_wanted

    def forget(self, channel: PlayedChannel) -> None:
        del self._watched[channel.fileno()]

    def empty(self) -> bool:
        return self._items.empty() and not any(each.is_ready for each, _ in self._watched.values())

    def receive(self, timeout_s: float | None) -> list[Item]:
        items: list[Item] = []
        for channel, read in self._watched.values():
            if channel.is_ready:
                items += read()
        try:
            if not items:
                items.append(self._items.get(block=timeout_s != 0, timeout=timeout_s))
            while True:
                items.append(self._items.get_nowait())
        except queue.Empty:
            return items
