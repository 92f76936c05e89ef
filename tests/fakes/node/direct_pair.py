"""The direct channels of two engines over real sockets; the test is their loops and their link."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass, field
from typing import Any

from baton.core.channels.direct_question import PURPOSE
from baton.core.channels.framing import encode_payload
from baton.core.channels.same_host import socket_address
from baton.core.errors import BatonError
from baton.node.channels.direct_channels import DirectChannels
from baton.node.channels.inbox import Inbox
from baton.node.channels.watched_channel import DirectReady, FromPeer
from baton.proto.v1 import handoff_pb2

HERE, ELSEWHERE = b"h" * 16, b"e" * 16
Peer = handoff_pb2.PeerMessage


def attach(name: str = "t") -> Peer:
    return Peer(attach=handoff_pb2.Attach(transfer_id=name))


@dataclass
class End:
    """One engine's channels; the test is its loop, and its link."""

    host_id: bytes = HERE
    incarnation: str = field(default_factory=lambda: secrets.token_hex(16))
    heard: list[Peer] = field(default_factory=list)
    broken: list[tuple[str, BatonError]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inbox: Inbox[Any] = Inbox()
        self.direct = DirectChannels(self.incarnation, self.host_id, self.inbox)

    def hello(self, other: End) -> Peer:
        """What its role says first, as the link carries it."""
        access = handoff_pb2.PoolAccess(host_id=self.host_id)
        hello = Peer(hello=handoff_pb2.Hello(incarnation=self.incarnation, access=access))
        assert not self.direct.peers.send(other.incarnation, hello)
        return hello

    def hear(self, other: End, message: Peer) -> None:
        if self.direct.peers.heard(other.incarnation, message):
            self.heard.append(message)

    def turn(self, timeout_s: float = 0.0) -> None:
        for item in self.inbox.receive(timeout_s):
            assert isinstance(item, DirectReady)
            for said in item.handle():
                assert isinstance(said, FromPeer)
                self.heard.append(said.message)
        self.broken += self.direct.peers.take_broken()

    def way(self, other: End) -> str:
        return self.direct.peers.ledger()[other.incarnation]

    def close(self) -> None:
        self.direct.close()
        self.inbox.close()


@dataclass
class Pair:
    source: End
    puller: End

    def link(self) -> None:
        self.source.direct.peers.linked(self.puller.incarnation, is_source=False)
        self.puller.direct.peers.linked(self.source.incarnation, is_source=True)

    def greet(self) -> None:
        """Both Hellos pass over the link."""
        self.source.hear(self.puller, self.puller.hello(self.source))
        self.puller.hear(self.source, self.source.hello(self.puller))

    def settle(self) -> None:
        for _ in range(6):
            self.source.turn()
            self.puller.turn()

    def say(self, speaker: End, message: Peer) -> bool:
        other = self.puller if speaker is self.source else self.source
        return speaker.direct.peers.send(other.incarnation, message)

    def ways(self) -> tuple[str, str]:
        return self.source.way(self.puller), self.puller.way(self.source)


def stranger_of(end: End) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(socket_address(end.incarnation, PURPOSE))
    stranger.settimeout(1.0)
    return stranger


def asking(pair: Pair, **other: bytes) -> bytes:
    """What the linked puller would say, but for `other`."""
    hello = pair.source.hello(pair.puller).hello
    said = {
        "magic": b"BATONDR1",
        "source": bytes.fromhex(pair.source.incarnation),
        "puller": bytes.fromhex(pair.puller.incarnation),
        "token": hello.direct_token,
    } | other
    return b"".join(said.values())


def raw_end(pair: Pair) -> socket.socket:
    """A linked puller whose end of the channel is in the test's hands."""
    pair.link()
    pair.source.hear(pair.puller, pair.puller.hello(pair.source))
    raw = stranger_of(pair.source)
    raw.sendall(encode_payload(asking(pair)))
    pair.source.turn(1.0)
    pair.source.turn(1.0)
    assert pair.source.way(pair.puller) == "direct"
    assert raw.recv(100) == encode_payload(b"BATONOK1")
    return raw
