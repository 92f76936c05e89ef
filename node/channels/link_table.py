"""The links of one engine: their begin and end, and messages to all of them, which other threads
than the loop's send: heartbeats, and the reason why the process ends.

A pair of engines has one link for each direction of pulls; a newer one replaces an older one. Ends
of links that are detected while sending go to the loop's inbox.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...core.channels.channel import Channel, ChannelBroken
from ...core.errors import BatonError, NodeLost
from ...proto import codec
from ...proto.v1 import node_pb2
from .inbox import Inbox
from .links import ChannelItem, Kind, Link, LinkOver

log = logging.getLogger(__name__)

_END_S = 0.3


@dataclass(eq=False)
class LinkTable:
    """Any thread may call `heartbeat` and `end`, the loop's thread all the rest.

    The loop calls `_read` for items when a link's channel is ready, and `_watch_writes` for a link
    that may have something unsent. A peer that is silent for `_silence_s` is lost.
    """

    _inbox: Inbox[Any]
    _read: Callable[[Link], Sequence[ChannelItem]]
    _watch_writes: Callable[[Link], None]
    _welcome: node_pb2.Welcome
    _silence_s: float
    by_name: dict[tuple[Kind, str], Link] = field(default_factory=dict)
    _heartbeat: node_pb2.Heartbeat | None = None  # the last one
    _last_beat_s: float = field(default_factory=lambda: time.monotonic())
    # A new gateway gets Welcome first, and no older numbers.
    _beating: threading.Lock = field(default_factory=threading.Lock)

    def add(self, link: Link) -> Link | None:
        """Add a new link; returns the older one of the same pair, which has been removed."""
        older = self.by_name.get((link.kind, link.name))
        if older is not None:
            self.remove(older)
        self._inbox.watch(link.channel, lambda: self._read(link))
        log.info("linked with %s", link)
        with self._beating:
            self.by_name[link.kind, link.name] = link
            if link.kind is Kind.GATEWAY:
                self._send(link, _packed(welcome=self._welcome))
                if self._heartbeat is not None:
                    self._send(link, _packed(heartbeat=self._heartbeat))
        return older

    def remove(self, link: Link) -> None:
        """Close a link, if it is open."""
        if not link.channel.is_closed:
            del self.by_name[link.kind, link.name]
            self._inbox.unwatch(link.channel)
            link.channel.close()

    def close(self) -> None:
        for link in self._all_links():
            self.remove(link)

    def _all_links(self) -> list[Link]:
        """May be called by any thread: the copy is atomic."""
        return [*self.by_name.values()]

    def ledger(self) -> dict[str, object]:
        """Who is linked, by kind."""
        return {
            "links": {
                kind.value: [name for each, name in self.by_name if each is kind] for kind in Kind
            }
        }

    @property
    def has_unsent(self) -> bool:
        """Whether something is still to be written to a gateway."""
        return any(
            link.channel.has_unsent for link in self.by_name.values() if link.kind is Kind.GATEWAY
        )

    # -- any thread --------------------------------------------------------------------------------

    def heartbeat(self, numbers: node_pb2.Heartbeat) -> None:
        """Send `numbers` to all gateways and an empty frame to peers; look for silent peers."""
        payload = _packed(heartbeat=numbers)
        with self._beating:
            self._heartbeat = numbers
            for link in self._all_links():
                self._send(link, payload if link.kind is Kind.GATEWAY else b"")
        self._listen_for_peers()

    def _listen_for_peers(self) -> None:
        """Report silent peers as lost: hung ones, or those behind proxies that still take data."""
        now_s = time.monotonic()
        stood_still = now_s - self._last_beat_s > self._silence_s / 2
        self._last_beat_s = now_s
        for link in self._all_links():
            if link.kind is Kind.GATEWAY:
                continue
            if stood_still:
                link.channel.restart_silence()
            elif link.channel.is_silent(self._silence_s):
                reason = f"nothing was received for {self._silence_s:g} s"
                self._inbox.put(LinkOver(link, NodeLost(reason)))

    def end(self, error: BatonError) -> None:
        """Send to all gateways why the process ends; returns when they have hung up, or after a
        timeout. Nothing can be sent after it.
        """
        payload = _packed(engine_ended=codec.error_to_wire(error))
        until_s = time.monotonic() + _END_S
        with self._beating:
            links = self._all_links()
            gateways = [link for link in links if link.kind is Kind.GATEWAY]
            for link in links:
                if link.kind is Kind.GATEWAY:
                    self._send(link, payload)
                link.channel.end_sending(until_s)
        _wait_for_ends([link.channel for link in gateways])

    def _send(self, link: Link, payload: bytes) -> None:
        """Send without touching the inbox's sockets, which belong to the loop."""
        if link.channel.is_closed:
            return
        try:
            link.channel.send(payload)
        except ChannelBroken as error:
            self._inbox.put(LinkOver(link, NodeLost(str(error))))
            return
        if link.channel.has_unsent:
            self._inbox.put(partial(self._watch_writes, link))


def _packed(**body: Any) -> bytes:
    return node_pb2.NodeMessage(**body).SerializeToString()


def _wait_for_ends(channels: Sequence[Channel]) -> None:
    """Discard input until the other ends hang up, or a timeout.

    Closing a connection with unread input resets it, and the other side loses unread output.
    """
    until_s = time.monotonic() + _END_S
    poll, by_fd = select.poll(), {channel.fileno(): channel for channel in channels}
    by_fd.pop(-1, None)  # closed by the loop's thread
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    while by_fd and (left_s := until_s - time.monotonic()) > 0:
        for fd, _ in poll.poll(1000 * left_s):
            if not by_fd[fd].discard():
                poll.unregister(fd)
                del by_fd[fd]
