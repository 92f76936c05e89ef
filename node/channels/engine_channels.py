"""All channels of one engine: to gateways, to pullers, to the sources that it dialled.

    listener, dialer ── Connected ──► inbox ──► `add`       the loop's thread owns every channel;
    gateways, peers  ── frames ────► inbox ──► From*        heartbeats come from one of their own
    loop ── to_gateway, to_peer ──► frames

A pair of engines has a channel for each direction of pulls: a newer one takes the place of an
older. What belongs to a channel that was closed meanwhile is dropped by whoever handles the items.
Knows no request.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from google.protobuf.message import DecodeError

from ...core.channels.admission import LOST_S
from ...core.channels.channel import Channel, ChannelBroken
from ...core.channels.frames import BrokenStream
from ...core.errors import BatonError, HandoffFailed, InvalidRequest, NodeLost
from ...kv_transfer.protocol.messages import Message, Refused, decode, encode
from ...proto import codec
from ...proto.v1 import engine_pb2, node_pb2
from .mailboxes import Inbox, Kind

log = logging.getLogger(__name__)

_END_S = 0.3


@dataclass(slots=True, eq=False)
class Link:
    """One channel. `name`: a gateway's id or a peer's incarnation; `host`: where it was dialled.

    `ended_by`: why it is over, for people. `opens_late`: of a source that hands nothing off to us,
    whose pool need not be opened before something is pulled.
    """

    kind: Kind
    name: str
    channel: Channel
    host: str = ""
    ended_by: str = ""
    opens_late: bool = False
    is_watched: bool = field(default=False, repr=False)


@dataclass(frozen=True, slots=True)
class Connected:
    """A link that stands, from now on the loop's."""

    link: Link


@dataclass(frozen=True, slots=True)
class FromGateway:
    """What a gateway sent."""

    link: Link
    message: node_pb2.GatewayMessage


@dataclass(frozen=True, slots=True)
class FromPeer:
    """What a peer sent."""

    link: Link
    message: Message | Refused


@dataclass(frozen=True, slots=True)
class LinkOver:
    """Nothing more will come: `error` is why, which is not sent to the other end."""

    link: Link
    error: BatonError


@dataclass(frozen=True, slots=True)
class HasUnsent:
    """Another thread left something unsent."""

    link: Link


ChannelItem: TypeAlias = Connected | FromGateway | FromPeer | LinkOver | HasUnsent


class Follower(Protocol):
    """Whoever admits or dials engines."""

    def list_members(self, members: engine_pb2.Members) -> None: ...

    def link_over(self, link: Link) -> None: ...


class EngineChannels:
    """Belongs to the loop's thread, but for `heartbeat` and `end`, which any thread may call."""

    def __init__(
        self,
        inbox: Inbox[Any],
        welcome: node_pb2.Welcome,
        followers: Sequence[Follower] = (),
        silence_s: float = LOST_S,
    ) -> None:
        """`followers` want to know what changes; a peer that is silent for `silence_s` is lost."""
        self._silence_s = silence_s
        self._last_beat_s = time.monotonic()
        self._inbox = inbox
        self._followers = followers
        self._welcome = node_pb2.NodeMessage(welcome=welcome).SerializeToString()
        self._heartbeat: bytes | None = None  # the last one
        self._beating = threading.Lock()  # a new gateway gets Welcome first, and no older numbers
        self._by_kind: dict[Kind, dict[str, Link]] = {kind: {} for kind in Kind}

    def close(self) -> None:
        for link in self._links():
            self.remove(link)

    def _links(self) -> list[Link]:
        # Each kind's at once: another thread may look while links come and go.
        return [link for links in self._by_kind.values() for link in [*links.values()]]

    @property
    def _gateways(self) -> dict[str, Link]:
        return self._by_kind[Kind.GATEWAY]

    def ledger(self) -> dict[str, object]:
        """Who is linked, by kind."""
        return {"links": {kind.value: [*links] for kind, links in self._by_kind.items()}}

    @property
    def has_unsent(self) -> bool:
        """Whether a gateway has not taken yet what was sent to it."""
        return any(gateway.channel.has_unsent for gateway in self._gateways.values())

    def add(self, link: Link) -> Link | None:
        """A link stands; returns the older one of the same pair, which is over."""
        links = self._by_kind[link.kind]
        older = links.get(link.name)
        if older is not None:
            self.remove(older)
        self._inbox.watch(link.channel, lambda: self._read(link))
        link.is_watched = True
        log.info("linked with %s %s", link.kind.value, link.name)
        with self._beating:
            links[link.name] = link
            if link.kind is Kind.GATEWAY:
                for payload in filter(None, (self._welcome, self._heartbeat)):
                    self._send(link, payload)
        return older

    def remove(self, link: Link) -> None:
        """End a link. A second time does nothing."""
        if link.channel.is_closed:
            return
        links = self._by_kind[link.kind]
        if links.get(link.name) is link:
            del links[link.name]
        if link.is_watched:
            self._inbox.forget(link.channel)
        link.channel.close()
        for follower in self._followers:
            follower.link_over(link)

    def list_members(self, members: engine_pb2.Members) -> None:
        """The directory has these engines now."""
        for follower in self._followers:
            follower.list_members(members)

    def watch_writes(self, link: Link) -> None:
        """Send the rest once there is room, if anything is left."""
        if link.is_watched and not link.channel.is_closed:
            self._inbox.watch_writes(link.channel, link.channel.has_unsent)

    # -- out ---------------------------------------------------------------------------------------

    def to_gateway(self, name: str, message: node_pb2.NodeMessage) -> None:
        """Goes nowhere if the gateway is gone."""
        if (link := self._gateways.get(name)) is not None:
            self._send(link, message.SerializeToString())

    def to_peer(self, kind: Kind, incarnation: str, message: Message) -> None:
        """Goes nowhere if the peer is gone."""
        if (link := self._by_kind[kind].get(incarnation)) is not None:
            self._send(link, encode(message))

    def refuse(self, link: Link, error: BatonError) -> None:
        """The last message of a link: why it ends. Whoever runs the loop removes it."""
        if link.kind is Kind.GATEWAY:
            refused = node_pb2.NodeMessage(refused=codec.error_to_wire(error))
            self._send(link, refused.SerializeToString())
        else:
            self._send(link, encode(Refused(error)))

    def end_peer(self, kind: Kind, incarnation: str, error: BatonError) -> None:
        """Refuse a peer, and end its link once the loop comes to it."""
        if (link := self._by_kind[kind].get(incarnation)) is not None:
            self.refuse(link, error)
            self._inbox.put(LinkOver(link, error))

    def _send(self, link: Link, payload: bytes) -> None:
        try:
            link.channel.send(payload)
        except ChannelBroken as error:
            self._inbox.put(LinkOver(link, NodeLost(str(error))))
        self.watch_writes(link)

    def heartbeat(self, numbers: node_pb2.Heartbeat) -> None:
        """Send it to all gateways; peers get an empty frame, and are listened for. Any thread."""
        payload = node_pb2.NodeMessage(heartbeat=numbers).SerializeToString()
        with self._beating:
            self._heartbeat = payload
            for link in self._links():
                self._send_beside(link, payload if link.kind is Kind.GATEWAY else b"")
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
                link.channel.forgive()
            elif link.channel.is_silent(self._silence_s):
                reason = f"nothing came for {self._silence_s:g} s"
                self._inbox.put(LinkOver(link, NodeLost(reason)))

    def end(self, error: BatonError) -> None:
        """Report to all gateways why the process ends; returns when they know, or have had their
        time. Nothing more is sent after it. Any thread.
        """
        message = node_pb2.NodeMessage(engine_ended=codec.error_to_wire(error))
        payload = message.SerializeToString()
        until_s = time.monotonic() + _END_S
        with self._beating:
            gateways = list(self._gateways.values())
            for link in self._links():
                if link.kind is Kind.GATEWAY:
                    self._send_beside(link, payload)
                link.channel.end_sending(until_s)
        _wait_for_ends([link.channel for link in gateways])

    def _send_beside(self, link: Link, payload: bytes) -> None:
        """From a thread that must not touch the inbox's sockets."""
        if link.channel.is_closed:
            return
        try:
            link.channel.send(payload)
        except ChannelBroken as error:
            self._inbox.put(LinkOver(link, NodeLost(str(error))))
            return
        if link.channel.has_unsent:
            self._inbox.put(HasUnsent(link))

    # -- in ----------------------------------------------------------------------------------------

    def _read(self, link: Link) -> Sequence[ChannelItem]:
        """What the other end has sent; at last, that the link is over."""
        channel = link.channel
        if channel.is_closed:
            return ()
        items: list[ChannelItem] = []
        try:
            channel.flush()
            self.watch_writes(link)  # another thread may have sent what there was
            payloads, is_over = channel.receive()
            for payload in payloads:
                items.append(_decode(link, payload))
            if is_over:
                items.append(LinkOver(link, NodeLost("the other end closed it")))
        except ChannelBroken as error:
            items.append(LinkOver(link, NodeLost(str(error))))
        except (BrokenStream, DecodeError, HandoffFailed) as error:
            reason = f"what came cannot be read: {error}"
            wrong = InvalidRequest if link.kind is Kind.GATEWAY else HandoffFailed
            self.refuse(link, wrong(reason))
            items.append(LinkOver(link, wrong(reason)))
        return items


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


def _decode(link: Link, payload: bytes) -> FromGateway | FromPeer:
    """Raises DecodeError, HandoffFailed."""
    if link.kind is Kind.GATEWAY:
        return FromGateway(link, node_pb2.GatewayMessage.FromString(payload))
    return FromPeer(link, decode(payload))
