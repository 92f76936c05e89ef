"""Inboxes that a test can check for emptiness; one of them needs no sockets and no descriptors."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.node.channels.inbox import Inbox
from baton.node.engine_process.engine_loop import Item

from .channel_pairs import PlayedChannel


class SocketInbox(Inbox[Item]):
    """The real inbox. It is empty when a receive would return nothing."""

    def empty(self) -> bool:
        return not self._epoll.poll(0)


class FakeInbox:
    """The loop receives what the test puts and what arrives on channels, in that order; threads may
    put.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item | _Arrival] = queue.SimpleQueue()
        self._reads: dict[int, Callable[[], Iterable[Item]]] = {}

    def put(self, item: Item) -> None:
        self._items.put(item)

    def watch(self, channel: PlayedChannel, read: Callable[[], Iterable[Item]]) -> None:
        self._reads[channel.fileno()] = read
        channel.watch(lambda: self._items.put(_Arrival(channel.fileno())))

    def watch_writes(self, channel: PlayedChannel, is_wanted: bool) -> None:
        assert not is_wanted

    def unwatch(self, channel: PlayedChannel) -> None:
        del self._reads[channel.fileno()]

    def empty(self) -> bool:
        return self._items.empty()

    def receive(self, timeout_s: float) -> list[Item]:
        items: list[Item] = []
        try:
            self._take(self._items.get(block=timeout_s != 0, timeout=timeout_s), items)
            while True:
                self._take(self._items.get_nowait(), items)
        except queue.Empty:
            return items

    def _take(self, item: Item | _Arrival, items: list[Item]) -> None:
        if not isinstance(item, _Arrival):
            items.append(item)
        elif (read := self._reads.get(item.fileno)) is not None:
            items += read()


@dataclass(frozen=True)
class _Arrival:
    """A notice that a channel has something to receive."""

    fileno: int
