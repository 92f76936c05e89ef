"""The direct channel between two engines of one host: who gets one, and how it ends."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.core.errors import BatonError, HandoffFailed, NodeLost
from baton.kv_transfer.pool_address import socket_address
from baton.node import direct, direct_channel
from baton.node.direct import MAX_STRANGERS, TOKEN_BYTES, DirectChannels, DirectReady
from baton.node.frames import MAX_RELAYED_BYTES, FrameBuffer, encode_payload
from baton.node.inbox import Inbox
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
        port = handoff_pb2.DataPort(host_id=self.host_id)
        hello = Peer(hello=handoff_pb2.Hello(incarnation=self.incarnation, data=port))
        assert not self.direct.send(other.incarnation, hello)
        return hello

    def hear(self, other: End, message: Peer) -> None:
        if self.direct.heard(other.incarnation, message):
            self.heard.append(message)

    def turn(self, timeout_s: float = 0.0) -> None:
        for item in self.inbox.receive(timeout_s):
            assert isinstance(item, DirectReady)
            self.heard += [message for _, message in item.handle()]
        self.broken += self.direct.take_broken()

    def way(self, other: End) -> str:
        return self.direct.ledger()[other.incarnation]

    def close(self) -> None:
        self.direct.close()
        self.inbox.close()


@dataclass
class Pair:
    source: End
    puller: End

    def link(self) -> None:
        self.source.direct.linked(self.puller.incarnation, is_source=False)
        self.puller.direct.linked(self.source.incarnation, is_source=True)

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
        return speaker.direct.send(other.incarnation, message)

    def ways(self) -> tuple[str, str]:
        return self.source.way(self.puller), self.puller.way(self.source)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(End(), End())
    pair.source.direct.listen()
    yield pair
    pair.source.close()
    pair.puller.close()


@pytest.fixture
def joined(pair: Pair) -> Pair:
    pair.link()
    pair.greet()
    pair.settle()
    assert pair.ways() == ("direct", "direct")
    pair.source.heard.clear()
    pair.puller.heard.clear()
    return pair


def test_greeted_engines_of_one_host_speak_directly(pair: Pair) -> None:
    pair.link()
    assert not pair.say(pair.source, attach())  # so early it would go over the link
    pair.greet()
    assert not pair.puller.heard  # until it is known which way an answer will go
    pair.settle()
    assert pair.ways() == ("direct", "direct")
    (hello,) = pair.puller.heard
    assert hello.hello.incarnation == pair.source.incarnation
    for speaker, listener in ((pair.puller, pair.source), (pair.source, pair.puller)):
        listener.heard.clear()
        messages = [attach(f"{n}" * 1000) for n in range(50)]
        assert all(pair.say(speaker, message) for message in messages)
        pair.settle()
        assert listener.heard == messages
    assert not pair.source.broken and not pair.puller.broken


def test_puller_is_accepted_only_once_it_has_greeted(pair: Pair) -> None:
    pair.link()
    pair.puller.hear(pair.source, pair.source.hello(pair.puller))
    pair.settle()
    assert pair.ways() == ("asking", "asking")
    assert not pair.say(pair.source, attach())
    pair.source.hear(pair.puller, pair.puller.hello(pair.source))
    pair.settle()
    assert pair.ways() == ("direct", "direct")


def test_doubled_greeting_changes_nothing(pair: Pair) -> None:
    pair.link()
    hello = pair.source.hello(pair.puller)
    pair.puller.hear(pair.source, hello)
    pair.puller.hear(pair.source, hello)
    pair.source.hear(pair.puller, pair.puller.hello(pair.source))
    pair.settle()
    pair.puller.hear(pair.source, hello)
    pair.settle()
    assert pair.puller.heard == [hello, hello]
    assert pair.ways() == ("direct", "direct")


def assert_over_the_link(pair: Pair) -> None:
    pair.settle()
    assert pair.ways() == ("link", "link")
    assert [message.WhichOneof("body") for message in pair.puller.heard] == ["hello"]
    assert not pair.say(pair.source, attach()) and not pair.say(pair.puller, attach())
    assert not pair.source.broken and not pair.puller.broken


def test_other_hosts_are_not_tried(pair: Pair) -> None:
    pair.source.host_id = ELSEWHERE
    pair.link()
    pair.greet()
    assert_over_the_link(pair)


def test_nobody_listening_is_no_error() -> None:
    pair = Pair(End(), End())
    pair.link()
    pair.source.hear(pair.puller, pair.puller.hello(pair.source))
    hello = pair.source.hello(pair.puller)
    assert not hello.hello.direct_token
    hello.hello.direct_token = b"t" * TOKEN_BYTES
    pair.puller.hear(pair.source, hello)
    assert_over_the_link(pair)
    pair.source.close()
    pair.puller.close()


@pytest.mark.parametrize("token", [b"", b"t" * TOKEN_BYTES, b"t" * (TOKEN_BYTES - 1)])
def test_wrong_token_is_refused(pair: Pair, token: bytes) -> None:
    pair.link()
    pair.source.hear(pair.puller, pair.puller.hello(pair.source))
    hello = pair.source.hello(pair.puller)
    hello.hello.direct_token = token
    pair.puller.hear(pair.source, hello)
    assert_over_the_link(pair)


def test_token_is_of_one_link_alone(pair: Pair) -> None:
    pair.link()
    old = pair.source.hello(pair.puller)
    pair.link()
    pair.source.hear(pair.puller, pair.puller.hello(pair.source))
    assert old != pair.source.hello(pair.puller)
    pair.puller.hear(pair.source, old)
    assert_over_the_link(pair)


@pytest.mark.parametrize("side", ["source", "puller"])
def test_other_users_are_refused(pair: Pair, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(connection: socket.socket) -> None:
        raise HandoffFailed("the other end belongs to user 1")

    pair.link()
    pair.source.hear(pair.puller, pair.puller.hello(pair.source))
    hello = pair.source.hello(pair.puller)
    if side == "puller":
        monkeypatch.setattr(direct, "require_same_user", refuse)
    pair.puller.hear(pair.source, hello)
    monkeypatch.setattr(direct, "require_same_user", refuse)
    assert_over_the_link(pair)


def stranger_of(end: End) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(socket_address(end.incarnation, "handoff"))
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


@pytest.mark.parametrize(
    "words",
    [
        lambda pair: encode_payload(asking(pair, magic=b"BATONDR0")),
        lambda pair: encode_payload(asking(pair, source=os.urandom(16))),
        lambda pair: encode_payload(asking(pair, puller=os.urandom(16))),
        lambda pair: encode_payload(asking(pair, token=os.urandom(TOKEN_BYTES))),
        lambda pair: encode_payload(asking(pair)[:-1]),
        lambda pair: encode_payload(asking(pair) + b"!"),
        lambda pair: encode_payload(asking(pair)) * 2,
        lambda pair: encode_payload(b""),
        lambda pair: struct.pack("<I", 0xFFFFFFFF),
        lambda pair: b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["magic", "source", "puller", "token", "short", "long", "twice", "empty", "huge", "http"],
)
def test_strangers_are_turned_away(pair: Pair, words: Callable[[Pair], bytes]) -> None:
    pair.link()
    pair.source.hear(pair.puller, pair.puller.hello(pair.source))
    with stranger_of(pair.source) as stranger:
        stranger.sendall(words(pair))
        pair.source.turn(1.0)
        pair.source.turn(1.0)
        assert pair.source.way(pair.puller) == "link"
        assert stranger.recv(100) == b""
    assert not pair.source.broken


def test_silent_strangers_do_not_pile_up(pair: Pair) -> None:
    strangers = [stranger_of(pair.source) for _ in range(MAX_STRANGERS // 2)]
    pair.source.turn()
    strangers += [stranger_of(pair.source) for _ in range(MAX_STRANGERS // 2 + 3)]
    pair.source.turn()
    assert [s.recv(1) for s in strangers[:3]] == [b""] * 3
    with pytest.raises(TimeoutError):
        strangers[3].settimeout(0.01)
        strangers[3].recv(1)
    pair.link()
    pair.greet()
    pair.settle()
    assert pair.ways() == ("direct", "direct")
    for stranger in strangers:
        stranger.close()


def test_who_cannot_be_taken_in_uses_the_link(pair: Pair) -> None:
    def accept() -> None:
        raise OSError(24, "too many open files")

    pair.link()
    pair.source.hear(pair.puller, pair.puller.hello(pair.source))
    hello = pair.source.hello(pair.puller)
    source: Any = pair.source.direct
    source._listener = OutOfDescriptors(source._listener, accept)
    pair.puller.hear(pair.source, hello)
    assert_over_the_link(pair)
    assert not pair.source.hello(pair.puller).hello.direct_token


class OutOfDescriptors:
    """A listener whose `accept` is another."""

    def __init__(self, listener: Any, accept: Callable[[], None]) -> None:
        self.fileno, self.close, self.accept = listener.fileno, listener.close, accept


def test_second_connection_with_the_same_token_is_refused(joined: Pair) -> None:
    with stranger_of(joined.source) as stranger:
        stranger.sendall(encode_payload(asking(joined)))
        joined.source.turn(1.0)
        joined.source.turn(1.0)
        assert stranger.recv(100) == b""
    assert joined.say(joined.puller, attach())
    joined.settle()
    assert joined.source.heard == [attach()]


@pytest.mark.parametrize("name", ["source", "puller"])
def test_end_of_the_link_ends_the_channel_and_a_new_one_brings_another(
    joined: Pair, name: str
) -> None:
    first = getattr(joined, name)
    other = joined.puller if name == "source" else joined.source
    first.direct.lost(other.incarnation)
    other.turn(1.0)  # hears of it through the channel, before its own link's end
    ((incarnation, error),) = other.broken
    assert incarnation == first.incarnation and isinstance(error, NodeLost)
    assert other.way(first) == "broken"
    assert joined.say(other, attach())  # goes nowhere: the link is about to end
    other.broken.clear()
    joined.link()
    joined.greet()
    joined.settle()
    assert joined.ways() == ("direct", "direct")
    assert not joined.source.broken and not joined.puller.broken


def test_channel_that_broke_with_an_older_link_does_not_end_the_new_one(joined: Pair) -> None:
    joined.source.direct.lost(joined.puller.incarnation)
    for item in joined.puller.inbox.receive(1.0):
        assert not item.handle()
    joined.puller.direct.linked(joined.source.incarnation, is_source=True)
    assert not joined.puller.direct.take_broken()


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


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (encode_payload(b"\xff\xff\xff"), HandoffFailed),
        (struct.pack("<I", MAX_RELAYED_BYTES + 1), HandoffFailed),
        (encode_payload(Peer(hello=handoff_pb2.Hello()).SerializeToString()), NodeLost),
        (encode_payload(attach().SerializeToString()) + b"\xff\xff\xff\xff", HandoffFailed),
    ],
    ids=["no message", "no frame", "hello", "good, then bad"],
)
def test_bad_frames_end_the_channel(pair: Pair, words: bytes, error: type[BatonError]) -> None:
    with raw_end(pair) as raw:
        raw.sendall(words)
        pair.source.turn(1.0)
        assert len(pair.source.heard) == 1  # Hello, over the link
        ((_, found),) = pair.source.broken
        assert isinstance(found, error)
        assert raw.recv(100) == b""


@pytest.mark.parametrize("num_bytes", [0, 3, 4, 10])
def test_break_in_mid_message_is_a_break(pair: Pair, num_bytes: int) -> None:
    with raw_end(pair) as raw:
        whole = encode_payload(attach("t" * 32).SerializeToString())
        raw.sendall(whole + whole[:num_bytes])
    pair.source.turn(1.0)
    pair.source.turn(0.01)
    assert pair.source.heard[1:] == [attach("t" * 32)]  # what came whole counts
    assert len(pair.source.broken) == 1


def test_frame_that_comes_in_pieces_is_one_message(pair: Pair) -> None:
    with raw_end(pair) as raw:
        for byte in encode_payload(attach().SerializeToString()):
            raw.sendall(bytes([byte]))
            pair.source.turn(1.0)
        assert pair.source.heard[1:] == [attach()]
        pair.source.close()
        pair.source.__post_init__()


def test_peer_that_does_not_read_blocks_nobody(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_channel, "MAX_UNSENT_BYTES", 2 << 20)
    message = attach("t" * 100_000)
    with raw_end(pair) as raw:
        for _ in range(15):  # more than a socket holds, less than we keep
            assert pair.say(pair.source, message)
        assert pair.source.way(pair.puller) == "direct"
        frames, read = FrameBuffer(), []
        while len(read) < 15:  # it reads at last: nothing was lost
            pair.source.turn()
            assert frames.wait_for_more(raw)
            read += [Peer.FromString(payload) for payload in frames.take()]
        assert read == [message] * 15
        for _ in range(40):
            assert pair.say(pair.source, message)
        pair.source.turn()
        ((_, error),) = pair.source.broken
        assert "does not read" in error.message


def test_sending_to_a_peer_that_is_gone_breaks_the_channel(joined: Pair) -> None:
    joined.puller.direct.lost(joined.source.incarnation)
    assert joined.say(joined.source, attach())
    assert [name for name, _ in joined.source.direct.take_broken()] == [joined.puller.incarnation]


def test_nothing_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    pair = Pair(End(), End())
    pair.source.direct.listen()
    pair.link()
    pair.greet()
    pair.settle()
    with stranger_of(pair.source):
        pair.source.turn()
        pair.source.close()
        pair.puller.close()
    assert len(os.listdir("/proc/self/fd")) == before
