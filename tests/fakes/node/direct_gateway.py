"""The engine's end of gateways' channels over real sockets; the test is its loop."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass, field
from typing import Any

from baton.core.channels.direct_question import ACCEPTED, PURPOSE, Asker, Question
from baton.core.channels.framing import encode_payload
from baton.core.channels.same_host import host_id, socket_address
from baton.core.errors import BatonError
from baton.node.channels.direct_channels import DirectChannels
from baton.node.channels.inbox import Inbox
from baton.node.channels.watched_channel import DirectReady, FromGateway
from baton.proto.v1 import node_pb2


def cancel(name: str = "r") -> node_pb2.GatewayMessage:
    return node_pb2.GatewayMessage(cancel=node_pb2.Cancel(request_id=name))


def step(number: int, size: int = 0) -> node_pb2.NodeMessage:
    """A step's outputs, of about `size` bytes."""
    output = node_pb2.RequestOutput(request_id="r" * size, first_index=number)
    return node_pb2.NodeMessage(outputs=node_pb2.StepOutputs(outputs=[output]))


@dataclass
class EngineEnd:
    """One engine's channels; `link` is what its supervisor does when a stream opens."""

    incarnation: str = field(default_factory=lambda: secrets.token_hex(16))
    heard: list[tuple[str, node_pb2.GatewayMessage]] = field(default_factory=list)
    broken: list[tuple[str, BatonError]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inbox: Inbox[Any] = Inbox()
        self.direct = DirectChannels(self.incarnation, host_id(), self.inbox)
        self.direct.listen()

    def link(self) -> node_pb2.Welcome:
        """A gateway's stream has opened: what it is told."""
        name, token = secrets.token_hex(16), secrets.token_bytes(32)
        self.direct.gateways.linked(name, token)
        offer = node_pb2.DirectOffer(host_id=host_id(), gateway=name, token=token)
        return node_pb2.Welcome(incarnation=self.incarnation, name="engine", direct=offer)

    def turn(self, timeout_s: float = 0.0) -> None:
        for item in self.inbox.receive(timeout_s):
            assert isinstance(item, DirectReady)
            for said in item.handle():
                assert isinstance(said, FromGateway)
                self.heard.append((said.gateway, said.message))
        self.broken += self.direct.gateways.take_broken()

    def say(self, welcome: node_pb2.Welcome, message: node_pb2.NodeMessage) -> bool:
        return self.direct.gateways.send(welcome.direct.gateway, message)

    def way(self, welcome: node_pb2.Welcome) -> str:
        return self.direct.gateways.ledger()[welcome.direct.gateway]

    def close(self) -> None:
        self.direct.close()
        self.inbox.close()


def question(welcome: node_pb2.Welcome, asker: Asker = Asker.GATEWAY) -> Question:
    """What the gateway that was told this would ask."""
    offer = welcome.direct
    return Question(asker, welcome.incarnation, offer.gateway, offer.token)


def stranger_of(engine: EngineEnd, words: bytes = b"") -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(socket_address(engine.incarnation, PURPOSE))
    stranger.settimeout(1.0)
    stranger.sendall(words)
    return stranger


def raw_gateway(engine: EngineEnd, welcome: node_pb2.Welcome) -> socket.socket:
    """An accepted gateway whose end of the channel is in the test's hands."""
    raw = stranger_of(engine, encode_payload(question(welcome).pack()))
    engine.turn(1.0)
    engine.turn(1.0)
    assert engine.way(welcome) == "direct"
    assert raw.recv(100) == encode_payload(ACCEPTED)
    return raw
