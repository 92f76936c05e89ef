"""How a direct channel ends: with its link, or by a peer that is gone, is mad or does not read."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest
from fakes.node.direct_pair import End, Pair, Peer, attach, raw_end, stranger_of

from baton.core.channels.framing import MAX_RELAYED_BYTES, FrameBuffer, encode_payload
from baton.core.errors import BatonError, HandoffFailed, NodeLost
from baton.node.channels import direct_peers
from baton.proto.v1 import handoff_pb2


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


@pytest.mark.parametrize("name", ["source", "puller"])
def test_end_of_the_link_ends_the_channel_and_a_new_one_brings_another(
    joined: Pair, name: str
) -> None:
    first = getattr(joined, name)
    other = joined.puller if name == "source" else joined.source
    first.direct.peers.lost(other.incarnation)
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
    joined.source.direct.peers.lost(joined.puller.incarnation)
    for item in joined.puller.inbox.receive(1.0):
        assert not item.handle()
    joined.puller.direct.peers.linked(joined.source.incarnation, is_source=True)
    assert not joined.puller.direct.peers.take_broken()


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
    monkeypatch.setattr(direct_peers, "MAX_UNSENT_BYTES", 2 << 20)
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
    joined.puller.direct.peers.lost(joined.source.incarnation)
    assert joined.say(joined.source, attach())
    assert [name for name, _ in joined.source.direct.peers.take_broken()] == [
        joined.puller.incarnation
    ]


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
