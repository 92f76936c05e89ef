"""Two ends of a channel: of sockets, or played, without descriptors.

A played end is as a `Channel`: what is sent to it waits until it is read, also behind the end.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeAlias

from baton.core.channels.channel import Channel, ChannelBroken


class PlayedChannel:
    """One end. Its inbox (fakes.node.inbox) knows it by `fileno`, which no descriptor has."""

    _num_made = 0

    def __init__(self) -> None:
        PlayedChannel._num_made += 1
        self._number = -1 - PlayedChannel._num_made
        self._other: PlayedChannel = self
        self._waiting: list[bytes] = []
        self.sent: list[bytes] = []
        self.has_unsent = False
        self.is_closed = self.is_cut = False

    def fileno(self) -> int:
        return self._number

    @property
    def is_ready(self) -> bool:
        return bool(self._waiting) or self.is_cut

    def send(self, payload: bytes) -> None:
        if self.is_cut or self.is_closed:
            raise ChannelBroken("the other side hung up")
        self.sent.append(payload)
        if payload:
            self._other._waiting.append(payload)

    def flush(self) -> None: ...

    def receive(self, max_chunks: int = 0) -> tuple[list[bytes], bool]:
        payloads, self._waiting = self._waiting, []
        return payloads, self.is_cut

    def cut(self) -> None:
        """Both ends find it over."""
        self.is_cut = self._other.is_cut = True

    def close(self) -> None:
        self.is_closed = True
        self.cut()


class SocketChannel(Channel):
    """The real one, which a test may break."""

    is_cut = False

    def cut(self) -> None:
        """Both ends find it over."""
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
