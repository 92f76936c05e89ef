"""Two ends of a channel: over sockets, or simulated without descriptors.

A simulated end behaves like a `Channel`: messages sent to it wait until they are read, even after
the end of the channel.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from baton.core.channels.channel import Channel, ChannelBroken


class PlayedChannel:
    """One end. Its inbox (fakes.node.inbox) identifies it by `fileno`, which is no real
    descriptor."""

    _num_made = 0

    def __init__(self) -> None:
        PlayedChannel._num_made += 1
        self._number = -1 - PlayedChannel._num_made
        self._other: PlayedChannel = self
        self._waiting: deque[bytes | None] = deque()  # None: the end
        self._on_arrival: Callable[[], None] = lambda: None
        self.on_send: Callable[[bytes], None] = lambda payload: None
        self.has_unsent = False
        self.is_closed = self.is_cut = False

    def fileno(self) -> int:
        return self._number

    def watch(self, on_arrival: Callable[[], None]) -> None:
        """Set a callback for each item that can be received."""
        self._on_arrival = on_arrival
        for _ in self._waiting:
            on_arrival()

    def _arrive(self, payload: bytes | None) -> None:
        self._waiting.append(payload)
        self._on_arrival()

    def send(self, payload: bytes) -> None:
        if self.is_cut or self.is_closed:
            raise ChannelBroken("the other side hung up")
        self.on_send(payload)
        if payload:
            self._other._arrive(payload)

    def flush(self) -> None: ...

    def receive(self) -> tuple[list[bytes], bool]:
        """Receive one item at a time."""
        if not self._waiting:
            return [], False
        payload = self._waiting.popleft()
        return ([], True) if payload is None else ([payload], False)

    def cut(self) -> None:
        """End the channel for both sides."""
        for end in (self, self._other):
            if not end.is_cut:
                end.is_cut = True
                end._arrive(None)

    def close(self) -> None:
        self.is_closed = True
        self._on_arrival = lambda: None
        self.cut()


class SocketChannel(Channel):
    """The real channel, which a test may break."""

    is_cut = False

    def cut(self) -> None:
        """End the channel for both sides."""
        self.is_cut = True
        self._socket.shutdown(socket.SHUT_RDWR)


AnyChannel: TypeAlias = PlayedChannel | SocketChannel
MakePair: TypeAlias = Callable[[], tuple[AnyChannel, AnyChannel]]


def played_pair() -> tuple[PlayedChannel, PlayedChannel]:
    ours, theirs = PlayedChannel(), PlayedChannel()
    ours._other, theirs._other = theirs, ours
    return ours, theirs


def socket_pair() -> tuple[SocketChannel, SocketChannel]:
    ours, theirs = socket.socketpair()
    return SocketChannel(ours), SocketChannel(theirs)
