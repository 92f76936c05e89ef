"""The engine's side of gateways' channels: who gets one, and how it ends."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from fakes.node.direct_gateway import EngineEnd, cancel, question, raw_gateway, step, stranger_of

from baton.core.channels.direct_question import TOKEN_BYTES, Asker
from baton.core.channels.framing import MAX_RELAYED_BYTES, FrameBuffer, encode_payload
from baton.core.errors import BatonError, InvalidRequest, NodeLost
from baton.node.channels import direct_gateways
from baton.node.channels.listener import MAX_STRANGERS
from baton.proto.v1 import node_pb2


@pytest.fixture
def engine() -> Iterator[EngineEnd]:
    engine = EngineEnd()
    yield engine
    engine.close()


def test_accepted_gateway_is_heard_and_told_in_order(engine: EngineEnd) -> None:
    welcome = engine.link()
    assert not engine.say(welcome, step(0))  # over the stream
    with raw_gateway(engine, welcome) as raw:
        messages = [cancel(f"{n}" * 1000) for n in range(50)]
        raw.sendall(b"".join(encode_payload(m.SerializeToString()) for m in messages))
        engine.turn(1.0)
        assert engine.heard == [(welcome.direct.gateway, message) for message in messages]
        told = [step(n) for n in range(50)]
        assert all(engine.say(welcome, message) for message in told)
        frames = FrameBuffer()
        assert frames.wait_for_more(raw)
        assert [*map(node_pb2.NodeMessage.FromString, frames.take())] == told


@pytest.mark.parametrize(
    "change",
    [
        lambda right: replace(right, asker=Asker.PULLER),
        lambda right: replace(right, engine=os.urandom(16).hex()),
        lambda right: replace(right, name=os.urandom(16).hex()),
        lambda right: replace(right, token=os.urandom(TOKEN_BYTES)),
    ],
    ids=["asker", "engine", "name", "token"],
)
def test_who_asks_wrongly_is_turned_away(engine: EngineEnd, change: Callable) -> None:
    welcome = engine.link()
    wrong = change(question(welcome)).pack()
    with stranger_of(engine, encode_payload(wrong)) as stranger:
        engine.turn(1.0)
        engine.turn(1.0)
        assert stranger.recv(100) == b""
    assert engine.way(welcome) == "link"
    assert not engine.broken


@pytest.mark.parametrize(
    "words",
    [
        lambda packed: encode_payload(b"BATONGW0" + packed[8:]),
        lambda packed: encode_payload(packed[:-1]),
        lambda packed: encode_payload(packed) * 2,
        lambda packed: struct.pack("<I", 0xFFFFFFFF),
        lambda packed: b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["magic", "short", "twice", "huge", "http"],
)
def test_strangers_are_turned_away(engine: EngineEnd, words: Callable[[bytes], bytes]) -> None:
    welcome = engine.link()
    with stranger_of(engine, words(question(welcome).pack())) as stranger:
        engine.turn(1.0)
        engine.turn(1.0)
        assert stranger.recv(100) == b""
    assert engine.way(welcome) == "link"


def test_token_is_good_for_one_channel_of_one_stream(engine: EngineEnd) -> None:
    welcome = engine.link()
    asked = encode_payload(question(welcome).pack())
    with raw_gateway(engine, welcome):
        for _ in range(2):  # while the stream lives, and behind its end
            with stranger_of(engine, asked) as again:
                engine.turn(1.0)
                engine.turn(1.0)
                assert again.recv(100) == b""
            engine.direct.gateways.lost(welcome.direct.gateway)
    assert not engine.broken


def test_a_flood_of_strangers_keeps_no_gateway_out(engine: EngineEnd) -> None:
    welcome = engine.link()
    strangers = []
    for _ in range(2 * MAX_STRANGERS):
        strangers.append(stranger_of(engine))
        engine.turn()
    with raw_gateway(engine, welcome):
        assert [s.recv(1) for s in strangers[:MAX_STRANGERS]] == [b""] * MAX_STRANGERS
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (b"", NodeLost),
        (encode_payload(cancel().SerializeToString())[:-1], NodeLost),
        (encode_payload(b"\xff\xff\xff"), InvalidRequest),
        (struct.pack("<I", MAX_RELAYED_BYTES + 1), InvalidRequest),
    ],
    ids=["end", "cut off", "no message", "no frame"],
)
def test_a_break_is_told_behind_what_came_before(
    engine: EngineEnd, words: bytes, error: type[BatonError]
) -> None:
    welcome = engine.link()
    with raw_gateway(engine, welcome) as raw:
        raw.sendall(encode_payload(cancel().SerializeToString()))
        engine.turn(1.0)
        raw.sendall(words)
    while not engine.broken:
        engine.turn(1.0)
    assert engine.heard == [(welcome.direct.gateway, cancel())]
    ((name, found),) = engine.broken
    assert name == welcome.direct.gateway and isinstance(found, error)
    assert engine.way(welcome) == "broken"
    assert engine.say(welcome, step(0))  # goes nowhere: the stream is about to end


def test_a_gateway_that_waited_too_short_is_spoken_with_over_its_stream(engine: EngineEnd) -> None:
    welcome = engine.link()
    asked = encode_payload(question(welcome).pack())
    raw_gateway(engine, welcome).close()
    engine.turn(1.0)
    assert engine.way(welcome) == "link" and not engine.broken
    assert not engine.say(welcome, step(0))
    with stranger_of(engine, asked) as again:  # the token is used up
        engine.turn(1.0)
        engine.turn(1.0)
        assert again.recv(100) == b""


def test_a_gateway_that_comes_again_is_another(engine: EngineEnd) -> None:
    old = engine.link()
    with raw_gateway(engine, old):
        new = engine.link()
        with raw_gateway(engine, new) as raw:
            engine.direct.gateways.lost(old.direct.gateway)  # its end is heard late
            assert not engine.say(old, step(0))
            assert engine.say(new, step(1))
            assert raw.recv(100) == encode_payload(step(1).SerializeToString())
    assert not engine.broken


def test_end_of_the_stream_ends_the_channel(engine: EngineEnd) -> None:
    welcome = engine.link()
    with raw_gateway(engine, welcome) as raw:
        engine.direct.gateways.lost(welcome.direct.gateway)
        assert raw.recv(100) == b""
    assert not engine.broken and not engine.direct.gateways.ledger()


def test_a_gateway_that_does_not_read_blocks_nobody(
    engine: EngineEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_gateways, "MAX_UNSENT_BYTES", 2 << 20)
    welcome = engine.link()
    with raw_gateway(engine, welcome) as raw:
        told = [step(n, size=100_000) for n in range(15)]  # more than a socket holds
        for message in told:
            assert engine.say(welcome, message)
        assert engine.direct.gateways.has_unsent
        frames, read = FrameBuffer(), []
        while len(read) < len(told):  # it reads at last: nothing was lost
            engine.turn()
            assert frames.wait_for_more(raw)
            read += map(node_pb2.NodeMessage.FromString, frames.take())
        assert read == told
        assert not engine.direct.gateways.has_unsent
        for _ in range(40):
            assert engine.say(welcome, told[0])
        engine.turn()
        ((_, error),) = engine.broken
        assert "does not read" in error.message
        assert not engine.direct.gateways.has_unsent


def test_nothing_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    engine = EngineEnd()
    with raw_gateway(engine, engine.link()), stranger_of(engine):
        engine.turn()
        engine.close()
    assert len(os.listdir("/proc/self/fd")) == before
