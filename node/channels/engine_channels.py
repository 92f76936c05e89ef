"""All channels of one engine: to gateways, to pullers, and to the sources that it dialled.

    listener, dialer ── Link ────► inbox ──► `add`        the loop's thread owns every channel;
    gateways, peers  ── frames ──► inbox ──► Received     heartbeats are sent by their own thread
    loop ── to_gateway, to_peer ──► frames

A pair of engines has one channel for each direction of pulls; a newer one replaces an older one.
The loop drops items of a channel that has been closed since. Knows no request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from ...core.channels.admission import LOST_S
from ...core.channels.channel import ChannelBroken
from ...core.channels.frames import BrokenStream
from ...core.errors import BatonError, HandoffFailed, InvalidRequest, NodeLost
from ...kv_transfer.protocol.messages import Message, Refused, decode, encode
from ...proto import codec
from ...proto.v1 import node_pb2
from .broadcast import Broadcast
from .inbox import Inbox
from .links import ChannelItem, Kind, Link, LinkOver, Received

log = logging.getLogger(__name__)


class EngineChannels:
    """Used by the loop's thread only; any thread may call `broadcast`."""

    def __init__(
        self,
        inbox: Inbox[Any],
        welcome: node_pb2.Welcome,
        on_over: Callable[[Link], None] = lambda link: None,
        silence_s: float = LOST_S,
    ) -> None:
        """`on_over` is called with each link that ends. A peer that is silent for `silence_s` is
        lost."""
        self._inbox = inbox
        self._on_over = on_over
        self._links: dict[tuple[Kind, str], Link] = {}  # by name
        self.broadcast = Broadcast(
            self._all_links, inbox.put, self.watch_writes, welcome, silence_s
        )

    def close(self) -> None:
        for link in self._all_links():
            self.remove(link)

    def _all_links(self) -> list[Link]:
        """May be called by any thread: the copy is atomic."""
        return [*self._links.values()]

    def ledger(self) -> dict[str, object]:
        """Who is linked, by kind."""
        return {
            "links": {
                kind.value: [name for each, name in self._links if each is kind] for kind in Kind
            }
        }

    @property
    def has_unsent(self) -> bool:
        """Whether something is still to be written to a gateway."""
        return any(
            link.channel.has_unsent for link in self._links.values() if link.kind is Kind.GATEWAY
        )

    def add(self, link: Link) -> Link | None:
        """Add a new link; returns the older one of the same pair, which has been removed."""
        older = self._links.get((link.kind, link.name))
        if older is not None:
            self.remove(older)
        self._inbox.watch(link.channel, lambda: self._read(link))
        log.info("linked with %s", link)
        with self.broadcast.greeting() as payloads:
            self._links[link.kind, link.name] = link
            if link.kind is Kind.GATEWAY:
                for payload in payloads:
                    self._send(link, payload)
        return older

    def remove(self, link: Link) -> None:
        """Close a link, if it is open."""
        if link.channel.is_closed:
            return
        del self._links[link.kind, link.name]
        self._inbox.unwatch(link.channel)
        link.channel.close()
        self._on_over(link)

    def watch_writes(self, link: Link) -> None:
        """If anything is unsent, send it once there is room."""
        if not link.channel.is_closed:
            self._inbox.watch_writes(link.channel, link.channel.has_unsent)

    # -- out ---------------------------------------------------------------------------------------

    def to_gateway(self, name: str, message: node_pb2.NodeMessage) -> None:
        """Does nothing if the gateway is gone."""
        if (link := self._links.get((Kind.GATEWAY, name))) is not None:
            self._send(link, message.SerializeToString())

    def to_peer(self, kind: Kind, incarnation: str, message: Message | Refused) -> None:
        """Does nothing if the peer is gone. Behind Refused, the loop ends its link when it gets the
        LinkOver."""
        if (link := self._links.get((kind, incarnation))) is not None:
            self._send(link, encode(message))
            if isinstance(message, Refused):
                self._inbox.put(LinkOver(link, message.error))

    def refuse(self, link: Link, error: BatonError) -> None:
        """Send the last message of a link: why it ends. The caller has to remove the link."""
        if link.kind is Kind.GATEWAY:
            refused = node_pb2.NodeMessage(refused=codec.error_to_wire(error))
            self._send(link, refused.SerializeToString())
        else:
            self._send(link, encode(Refused(error)))

    def _send(self, link: Link, payload: bytes) -> None:
        try:
            link.channel.send(payload)
        except ChannelBroken as error:
            self._inbox.put(LinkOver(link, NodeLost(str(error))))
        self.watch_writes(link)

    # -- in ----------------------------------------------------------------------------------------

    def _read(self, link: Link) -> Sequence[ChannelItem]:
        """The other end's messages, then LinkOver if the link has ended."""
        channel = link.channel
        if channel.is_closed:
            return ()
        items: list[ChannelItem] = []
        try:
            channel.flush()
            self.watch_writes(link)  # another thread may have sent what there was
            payloads, is_over = channel.receive()
            for payload in payloads:
                is_gateway = link.kind is Kind.GATEWAY
                unpack = node_pb2.GatewayMessage.FromString if is_gateway else decode
                items.append(Received(link, unpack(payload)))
            if is_over:
                items.append(LinkOver(link, NodeLost("the other end closed it")))
        except ChannelBroken as error:
            items.append(LinkOver(link, NodeLost(str(error))))
        except (BrokenStream, DecodeError, HandoffFailed) as error:
            reason = f"the message cannot be read: {error}"
            wrong = InvalidRequest if link.kind is Kind.GATEWAY else HandoffFailed
            self.refuse(link, wrong(reason))
            items.append(LinkOver(link, wrong(reason)))
        return items
