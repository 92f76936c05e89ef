"""How an engine speaks with gateways: over their streams, or directly with those of its host.

    gateway                         supervisor                       engine
      │ ══ stream ═══════════════════► │ ── gateway_linked, token ────► │
      │ ◄═══ Welcome, with the token ══ │                                │
      │ asks (core/channels/direct_question.py)                         │ this stream's token?
      │ ◄───────────────────────────────────────────────── accepted ──  │
      │ ◄───────────── dispatches and cancels, steps' outputs ───────►  │

A gateway uses its stream for neither before it knows whether it is accepted. Only the engine loop's
thread is here, and nothing here waits: what a gateway leaves unread is kept, up to a limit.
"""

from __future__ import annotations

import hmac
import logging
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from ...core.channels.direct_channel import ChannelBroken
from ...core.channels.direct_question import ACCEPTED, Question
from ...core.channels.framing import MAX_FRAME_BYTES, MAX_RELAYED_BYTES, BrokenStream
from ...core.errors import BatonError, InvalidRequest, NodeLost
from ...proto.v1 import node_pb2
from .route import Way
from .watched_channel import FromGateway, WatchedChannel

log = logging.getLogger(__name__)

MAX_UNSENT_BYTES = MAX_FRAME_BYTES  # any message; of plain tokens minutes


@dataclass(slots=True)
class _Gateway:
    """One gateway with an open stream."""

    token: bytes | None  # None: it has opened a channel
    way: Way = Way.LINK
    channel: WatchedChannel | None = None
    is_used: bool = False  # something was said on the channel


class DirectGateways:
    """All gateways of one engine, by the ids of their streams."""

    def __init__(self) -> None:
        self._gateways: dict[str, _Gateway] = {}
        self._broken: list[tuple[str, BatonError]] = []

    def close(self) -> None:
        for name in [*self._gateways]:
            self.lost(name)

    def ledger(self) -> dict[str, str]:
        """Which way messages go, by stream."""
        return {name: gateway.way.value for name, gateway in self._gateways.items()}

    @property
    def has_unsent(self) -> bool:
        """Whether a gateway has not taken yet what it was told."""
        channels = [gateway.channel for gateway in self._gateways.values()]
        return any(channel.has_unsent for channel in channels if channel and not channel.is_closed)

    def linked(self, name: str, token: bytes) -> None:
        """A stream stands; who shows the token on a channel is its gateway."""
        self._gateways[name] = _Gateway(token)

    def lost(self, name: str) -> None:
        """The stream ended; that its channel had broken is of no more interest."""
        self._broken = [broken for broken in self._broken if broken[0] != name]
        gateway = self._gateways.pop(name, None)
        if gateway is not None and gateway.channel is not None:
            gateway.channel.close()

    def admit(self, question: Question, channel: WatchedChannel) -> bool:
        """Accept the gateway that has just proven who it is, unless it was accepted before."""
        name, gateway = question.name, self._gateways.get(question.name)
        if gateway is None or gateway.token is None:
            return False
        if not hmac.compare_digest(gateway.token, question.token):
            return False
        try:
            channel.send(ACCEPTED)
        except ChannelBroken:  # it has not waited so long, and uses its stream
            return False
        gateway.token, gateway.way, gateway.channel = None, Way.DIRECT, channel
        channel.allow(MAX_RELAYED_BYTES, MAX_UNSENT_BYTES)
        channel.on_ready(lambda: self._read(name, gateway, channel))
        log.info("speaks with gateway %s directly", name)
        return True

    def send(self, name: str, message: node_pb2.NodeMessage) -> bool:
        """Send a message directly; False: it is to go over the stream."""
        gateway = self._gateways.get(name)
        if gateway is None or gateway.channel is None:
            return False
        if gateway.way is Way.DIRECT:
            gateway.is_used = True
            try:
                gateway.channel.send(message.SerializeToString())
            except ChannelBroken as error:
                self._break(name, gateway, gateway.channel, NodeLost(str(error)))
        return True

    def take_broken(self) -> list[tuple[str, BatonError]]:
        """Gateways whose channel broke since the last call: their streams must be ended."""
        broken, self._broken = self._broken, []
        return broken

    def _read(self, name: str, gateway: _Gateway, channel: WatchedChannel) -> list[FromGateway]:
        """What a gateway has said; a channel that breaks is noted, behind what came before."""
        if channel.is_closed:
            return []
        messages: list[FromGateway] = []
        try:
            payloads, is_over = channel.receive()
            gateway.is_used |= bool(payloads)
            if is_over and not gateway.is_used:
                self._disengage(name, gateway, channel)
                return []
            for payload in payloads:
                messages.append(FromGateway(name, node_pb2.GatewayMessage.FromString(payload)))
            if is_over:
                raise ChannelBroken("the gateway closed it")
        except ChannelBroken as error:
            self._break(name, gateway, channel, NodeLost(str(error)))
        except (BrokenStream, DecodeError) as error:
            wrong = InvalidRequest(f"a gateway is not understood: {error}")
            self._break(name, gateway, channel, wrong)
        return messages

    def _disengage(self, name: str, gateway: _Gateway, channel: WatchedChannel) -> None:
        """It did not wait to hear that it is accepted, and uses its stream; or it ends."""
        channel.close()
        gateway.way, gateway.channel = Way.LINK, None
        log.info("gateway %s hung up before anything was said", name)

    def _break(
        self, name: str, gateway: _Gateway, channel: WatchedChannel, error: BatonError
    ) -> None:
        """Nothing more can be said: whoever runs the loop ends the stream."""
        channel.close()
        gateway.way = Way.BROKEN
        log.info("the direct channel to gateway %s ended: %s", name, error.message)
        self._broken.append((name, error))
