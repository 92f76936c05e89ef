"""The two origins of an engine's links: its listener, and its dialer of sources."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...core.channels.addresses import engine_addresses_of, host_id
from ...core.channels.admission import GATEWAY, LOST_S, PULLER
from ...core.channels.channel import Channel
from ...core.channels.channel_listener import AcceptPolicy, ChannelListener
from ...core.channels.engine_tls import EngineTls, wait_for_pumps
from ...core.channels.handshake import Opening
from ...core.config import NodeConfig
from ...core.errors import BatonError, PermissionDenied, StartupFailed
from ...proto.v1 import engine_pb2, node_pb2
from ..channels.engine_channels import EngineChannels
from ..channels.inbox import Inbox
from ..channels.links import Kind, Link
from ..channels.source_dialer import SourceDialer

log = logging.getLogger(__name__)

_FLUSH_S = 1.0  # time to encrypt the data that was sent last
_HEARTBEATS_MISSED = 4  # of a peer, assumed to have the same heartbeat interval


@dataclass(frozen=True, slots=True)
class Keys:
    """The key that the engine proves as a dialer, and those that it accepts, by key id."""

    dialing: bytes
    accepted: Mapping[bytes, bytes]


class EngineLinks:
    """`channels` and `dialer` are used by the loop; `start` begins to accept, `close` ends
    everything."""

    def __init__(
        self,
        inbox: Inbox[Any],
        welcome: node_pb2.Welcome,
        node: NodeConfig,
        keys: Keys,
        tls: EngineTls | None,
    ) -> None:
        """Raises StartupFailed if the engine cannot listen."""
        self._inbox = inbox
        self._tls = tls
        secure = None if tls is None else tls.puller_wrap()
        self.dialer = SourceDialer(welcome, keys.dialing, secure, inbox.put)
        silence_s = max(LOST_S, _HEARTBEATS_MISSED * node.heartbeat_s)
        self.channels = EngineChannels(inbox, welcome, silence_s)
        admission = AcceptPolicy(keys.accepted, (GATEWAY, PULLER), self._check)
        self._listener = _listen(welcome.incarnation, node, admission, tls)

    def ready(self, welcome: node_pb2.Welcome) -> engine_pb2.Ready:
        """The message with what the supervisor announces."""
        return engine_pb2.Ready(welcome=welcome, port=self._listener.port, host_id=host_id())

    def start(self) -> None:
        self._listener.start(self._accepted)

    def end(self, error: BatonError) -> None:
        """Report to all gateways why the process ends; it may exit after this. Any thread."""
        self.channels.links.end(error)
        wait_for_pumps(_FLUSH_S)

    def close(self) -> None:
        """Call once nothing receives from the inbox any more."""
        self._listener.close()
        self.dialer.close()
        for item in self._inbox.receive(0):
            if isinstance(item, Link):  # accepted too late
                item.channel.close()
        self.channels.links.close()
        wait_for_pumps(_FLUSH_S)

    def _check(self, opening: Opening, names: frozenset[str] | None) -> None:
        """Raises PermissionDenied."""
        is_gateway = opening.purpose == GATEWAY
        if self._tls is not None and names is not None:
            wanted = {self._tls.gateway_name} if is_gateway else self._tls.engine_names
            if names.isdisjoint(wanted):
                either = " or ".join(sorted(wanted))
                raise PermissionDenied(f"this needs the certificate of {either}")
        if not is_gateway and not self.dialer.is_listed(opening.dialer):
            raise PermissionDenied(f"engine {opening.dialer} is not in the directory")

    def _accepted(self, opening: Opening, channel: Channel) -> None:
        kind = Kind.GATEWAY if opening.purpose == GATEWAY else Kind.PULLER
        peer = "" if kind is Kind.GATEWAY else self.dialer.name_of(opening.dialer)
        self._inbox.put(Link(kind, opening.dialer, channel, peer=peer))


def _listen(
    incarnation: str, node: NodeConfig, policy: AcceptPolicy, tls: EngineTls | None
) -> ChannelListener:
    """Listen at the engine's port, or at a free one if it is taken: the directory contains it.

    Raises StartupFailed.
    """
    listen = partial(
        ChannelListener,
        *(incarnation, node.host),
        addresses=partial(engine_addresses_of, node),
        policy=policy,
        secure=None if tls is None else tls.accept(),
    )
    try:
        return listen(node.engine_port)
    except StartupFailed:
        if not node.engine_port or node.advertise_engine is not None:
            raise
        log.warning("port %d is taken: the engine listens on another", node.engine_port)
        return listen(0)
