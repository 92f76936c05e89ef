"""A direct channel in the inbox of an engine's loop: its owner hears when there is something to do.

Belongs to the loop's thread, as the inbox does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...core.channels.direct_channel import DirectChannel
from ...proto.v1 import handoff_pb2, node_pb2
from .inbox import Inbox


@dataclass(frozen=True, slots=True)
class FromPeer:
    """What the peer with this incarnation said."""

    incarnation: str
    message: handoff_pb2.PeerMessage


@dataclass(frozen=True, slots=True)
class FromGateway:
    """What came over the gateway's stream of this id, or over its channel."""

    gateway: str
    message: node_pb2.GatewayMessage


Said: TypeAlias = FromPeer | FromGateway


@dataclass(frozen=True, slots=True)
class DirectReady:
    """There is something to read, or room to write: `handle` returns what was said."""

    handle: Callable[[], Sequence[Said]]


class WatchedChannel:
    """Owns the channel. `on_ready` says who hears of it first, and may be called again."""

    def __init__(self, channel: DirectChannel, inbox: Inbox[Any]) -> None:
        self._channel = channel
        self._inbox = inbox
        self._is_watched = False

    @property
    def is_closed(self) -> bool:
        return self._channel.is_closed

    @property
    def has_unsent(self) -> bool:
        return self._channel.has_unsent

    def on_ready(self, handle: Callable[[], Sequence[Said]]) -> None:
        """From now on this is called at each turn in which there is something to do."""
        if self._is_watched:
            self._inbox.forget(self._channel)
        ready = (DirectReady(handle),)
        self._inbox.watch(self._channel, lambda: ready)
        self._is_watched = True
        self._watch_writes()

    def allow(self, max_frame_bytes: int, max_unsent_bytes: int) -> None:
        self._channel.allow(max_frame_bytes, max_unsent_bytes)

    def send(self, payload: bytes) -> None:
        """See DirectChannel.send; what is kept is sent once there is room."""
        self._channel.send(payload)
        self._watch_writes()

    def receive(self) -> tuple[list[bytes], bool]:
        """See DirectChannel.receive. Raises ChannelBroken too: what was kept cannot be sent."""
        if self._channel.has_unsent:
            self._channel.flush()
            self._watch_writes()
        return self._channel.receive()

    def close(self) -> None:
        """A second time does nothing."""
        if not self._channel.is_closed:
            if self._is_watched:
                self._inbox.forget(self._channel)
            self._channel.close()

    def _watch_writes(self) -> None:
        self._inbox.watch_writes(self._channel, self._channel.has_unsent)
