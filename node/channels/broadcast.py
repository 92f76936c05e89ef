"""What all links of an engine are sent from beside its loop: heartbeats, and why the process ends.

Any thread may call; what it finds out about a link goes to the loop, by its inbox.
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
    """One engine's, to `links` as they are at the time."""

    def __init__(
        self,
        links: Callable[[], list[Link]],
        put: Callable[[LinkOver | Callable[[], None]], None],
        watch_writes: Callable[[Link], None],
        welcome: node_pb2.Welcome,
        silence_s: float,
    ) -> None:
        """`watch_writes`, which the loop calls: there may be something unsent. A peer that is
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
        """What a gateway gets first. Its link joins the others in this scope, in which no heartbeat
        is sent."""
        with self._beating:
            yield list(filter(None, (self._welcome, self._heartbeat)))

    def heartbeat(self, numbers: node_pb2.Heartbeat) -> None:
        """To all gateways; peers get an empty frame, and are listened for."""
        payload = node_pb2.NodeMessage(heartbeat=numbers).SerializeToString()
        with self._beating:
            self._heartbeat = payload
            for link in self._links():
                self._send(link, payload if link.kind is Kind.GATEWAY else b"")
        self._listen_for_peers()

    def _listen_for_peers(self) -> None:
        """A network whose proxies still take what is sent, or a peer that hangs, is silent."""
        now_s = time.monotonic()
        stood_still = now_s - self._last_beat_s > self._silence_s / 2
        self._last_beat_s = now_s
        for link in self._links():
            if link.kind is Kind.GATEWAY:
                continue
            if stood_still:
                link.channel.restart_silence()
            elif link.channel.is_silent(self._silence_s):
                reason = f"nothing came for {self._silence_s:g} s"
                self._put(LinkOver(link, NodeLost(reason)))

    def end(self, error: BatonError) -> None:
        """Report to all gateways why the process ends; returns when they know, or have had their
        time. Nothing more is sent after it.
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
        """Without touching the inbox's sockets, which are the loop's."""
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
    """Drop what comes until the other ends hang up, for a moment.

    The end of a connection with something unread costs the other side what it has not read yet.
    """
    until_s = time.monotonic() + _END_S
    poll, by_fd = select.poll(), {channel.fileno(): channel for channel in channels}
    by_fd.pop(-1, None)  # the loop's thread has closed them
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    while by_fd and (left_s := until_s - time.monotonic()) > 0:
        for fd, _ in poll.poll(1000 * left_s):
            if not by_fd[fd].discard():
                poll.unregister(fd)
                del by_fd[fd]
