"""Messages to all links of an engine from other threads than its loop's: heartbeats, and the reason
why the process ends. Ends of links that it detects go to the loop's inbox.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ...core.channels.channel import Channel, ChannelBroken
from ...core.errors import BatonError, NodeLost
from ...proto import codec
from ...proto.v1 import node_pb2
from .links import Kind, Link, LinkOver

_END_S = 0.3


class Broadcast:
    """Sends to the links that exist at the time. Any thread may call."""

    def __init__(
        self,
        links: Callable[[], list[Link]],
        put: Callable[[LinkOver | Callable[[], None]], None],
        watch_writes: Callable[[Link], None],
        welcome: node_pb2.Welcome,
        silence_s: float,
    ) -> None:
        """The loop calls `watch_writes` for a link that may have something unsent. A peer that is
        silent for `silence_s` is lost."""
        self._links = links
        self._put, self._watch_writes = put, watch_writes
        self._silence_s = silence_s
        self._welcome = node_pb2.NodeMessage(welcome=welcome).SerializeToString()
        self._heartbeat: bytes | None = None  # the last one
        self._last_beat_s = time.monotonic()
        self._beating = threading.Lock()  # a new gateway gets Welcome first, and no older numbers

    @contextlib.contextmanager
    def greeting(self) -> Iterator[list[bytes]]:
        """The first messages to a gateway. Its link is added within this scope, in which no
        heartbeat is sent."""
        with self._beating:
            yield list(filter(None, (self._welcome, self._heartbeat)))

    def heartbeat(self, numbers: node_pb2.Heartbeat) -> None:
        """Send `numbers` to all gateways and an empty frame to peers; look for silent peers."""
        payload = node_pb2.NodeMessage(heartbeat=numbers).SerializeToString()
        with self._beating:
            self._heartbeat = payload
            for link in self._links():
                self._send(link, payload if link.kind is Kind.GATEWAY else b"")
        self._listen_for_peers()

    def _listen_for_peers(self) -> None:
        """Report silent peers as lost: hung ones, or those behind proxies that still take data."""
        now_s = time.monotonic()
        stood_still = now_s - self._last_beat_s > self._silence_s / 2
        self._last_beat_s = now_s
        for link in self._links():
            if link.kind is Kind.GATEWAY:
                continue
            if stood_still:
                link.channel.restart_silence()
            elif link.channel.is_silent(self._silence_s):
                reason = f"nothing was received for {self._silence_s:g} s"
                self._put(LinkOver(link, NodeLost(reason)))

    def end(self, error: BatonError) -> None:
        """Send to all gateways why the process ends; returns when they have hung up, or after a
        timeout. Nothing can be sent after it.
        """
        message = node_pb2.NodeMessage(engine_ended=codec.error_to_wire(error))
        payload = message.SerializeToString()
        until_s = time.monotonic() + _END_S
        with self._beating:
            links = self._links()
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
            self._put(LinkOver(link, NodeLost(str(error))))
            return
        if link.channel.has_unsent:
            self._put(partial(self._watch_writes, link))


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
