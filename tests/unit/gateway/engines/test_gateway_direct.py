"""The gateway's side of its channel to an engine of its host, and when it does without one."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from fakes.node.direct_gateway import EngineEnd, cancel, step

from baton.cluster.secret import ClusterSecret
from baton.core.channels.direct_channel import DirectChannel
from baton.core.channels.direct_question import ACCEPTED
from baton.core.channels.framing import MAX_RELAYED_BYTES, FrameBuffer, encode_payload
from baton.core.errors import HandoffFailed
from baton.core.membership import Member, Role
from baton.core.ports import SystemClock
from baton.gateway.engines import direct_channel as direct_way
from baton.gateway.engines.direct_channel import DirectWay, open_direct
from baton.gateway.engines.node_link import NodeLink
from baton.proto.v1 import node_pb2

Change = Callable[[node_pb2.Welcome], object]


@asynccontextmanager
async def running() -> AsyncIterator[EngineEnd]:
    """An engine that takes its turns as the event loop does."""
    engine = EngineEnd()
    loop = asyncio.get_running_loop()
    loop.add_reader(engine.inbox._epoll.fileno(), engine.turn)
    try:
        yield engine
    finally:
        loop.remove_reader(engine.inbox._epoll.fileno())
        engine.close()


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_messages_pass_both_ways_in_order() -> None:
    async with running() as engine:
        welcome, heard = engine.link(), []
        channel = await open_direct(welcome)
        assert channel is not None and engine.way(welcome) == "direct"
        way = DirectWay(channel, heard.append)
        sent = [cancel(f"{n}" * 1000) for n in range(50)]
        told = [step(n) for n in range(50)]
        for message, answer in zip(sent, told, strict=True):
            way.send(message)
            engine.say(welcome, answer)
        await until(lambda: len(engine.heard) == 50 == len(heard))
        assert [message for _, message in engine.heard] == sent and heard == told
        way.close()
        await until(lambda: engine.broken)
        assert not asyncio.all_tasks() - {asyncio.current_task()}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: w.ClearField("direct"), "it offers no direct channel"),
        (lambda w: setattr(w.direct, "host_id", b"e" * 16), "it is on another host"),
        (lambda w: setattr(w.direct, "token", b"t" * 32), "did not accept"),
        (lambda w: setattr(w.direct, "token", b"t" * 31), "offers no"),
        (lambda w: setattr(w.direct, "gateway", "../../etc"), "offers no"),
        (lambda w: setattr(w.direct, "gateway", secrets.token_hex(16)), "did not accept"),
        (lambda w: setattr(w, "incarnation", secrets.token_hex(16)), "refused"),
        (lambda w: setattr(w, "incarnation", "\0"), "32 hex digits"),
    ],
    ids=["old node", "host", "token", "short token", "no name", "name", "nobody", "no incarnation"],
)
async def test_else_the_stream_is_used(
    change: Change, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running() as engine:
        welcome = engine.link()
        name = welcome.direct.gateway
        change(welcome)
        before = len(os.listdir("/proc/self/fd"))
        assert await open_direct(welcome) is None
        await until(lambda: len(os.listdir("/proc/self/fd")) == before)
        assert engine.direct.gateways.ledger()[name] == "link"
    assert "over its node" in caplog.text and reason in caplog.text


async def test_an_engine_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(direct_way, "ACCEPT_TIMEOUT_S", 0.05)
    caplog.set_level(logging.INFO)
    engine = EngineEnd()
    welcome = engine.link()
    assert await open_direct(welcome) is None
    assert "in 0.05 s" in caplog.text
    engine.turn(1.0)  # it wakes up at last: nobody is there to be accepted
    engine.turn(1.0)
    assert engine.way(welcome) == "link" and not engine.broken
    engine.close()


async def test_an_engine_of_another_user_is_not_spoken_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(connection: socket.socket) -> None:
        raise HandoffFailed("the other end belongs to user 1")

    monkeypatch.setattr("baton.core.channels.direct_question.require_same_user", refuse)
    async with running() as engine:
        assert await open_direct(engine.link()) is None


class Raw:
    """A gateway's way whose engine's end is in the test's hands."""

    def __init__(self) -> None:
        ours, self.engine = socket.socketpair()
        self.heard: list[node_pb2.NodeMessage] = []
        self.way = DirectWay(DirectChannel(ours, len(ACCEPTED), 0), self.heard.append)


@pytest.fixture
async def raw() -> AsyncIterator[Raw]:
    raw = Raw()
    yield raw
    raw.way.close()
    raw.engine.close()


async def test_what_a_dying_engine_said_is_heard_before_its_end(raw: Raw) -> None:
    told = [step(n, size=50_000) for n in range(3)]
    for message in told:
        raw.engine.sendall(encode_payload(message.SerializeToString()))
    raw.engine.close()
    assert await raw.way.over == "its direct channel ended"
    assert raw.heard == told


async def test_it_is_heard_even_if_sending_finds_the_engine_gone(raw: Raw) -> None:
    raw.engine.sendall(encode_payload(step(7).SerializeToString()))
    raw.engine.close()
    raw.way.send(cancel())
    assert not raw.heard  # whoever sends is in the middle of something
    await raw.way.over
    assert raw.heard == [step(7)]
    raw.way.send(cancel())  # goes nowhere


async def test_a_message_cut_off_is_none(raw: Raw) -> None:
    whole = encode_payload(step(7).SerializeToString())
    raw.engine.sendall(whole + whole[:-1])
    raw.engine.close()
    await raw.way.over
    assert raw.heard == [step(7)]


@pytest.mark.parametrize(
    "words",
    [encode_payload(b"\xff\xff\xff"), (MAX_RELAYED_BYTES + 1).to_bytes(4, "little")],
    ids=["no message", "no frame"],
)
async def test_what_is_not_understood_ends_it(raw: Raw, words: bytes) -> None:
    raw.engine.sendall(words)
    assert "not understood" in await raw.way.over
    assert raw.engine.recv(1) == b""


async def test_an_engine_that_does_not_read_costs_no_wait_and_not_all_memory(
    raw: Raw,
) -> None:
    raw.way._channel.allow(MAX_RELAYED_BYTES, 2 << 20)
    sent = [cancel(f"{number}" * 100_000) for number in range(10)]
    for message in sent:  # more than a socket holds, less than is kept
        raw.way.send(message)
    frames, read = FrameBuffer(), []
    while len(read) < len(sent):
        await asyncio.sleep(0.001)
        assert frames.wait_for_more(raw.engine)
        read += map(node_pb2.GatewayMessage.FromString, frames.take())
    assert read == sent
    for _ in range(40):
        raw.way.send(cancel("r" * 100_000))
    assert "does not read" in await raw.way.over


async def test_a_message_that_its_hearer_fails_on_costs_no_other() -> None:
    ours, engine = socket.socketpair()
    heard, failed = [], []

    def hear(message: node_pb2.NodeMessage) -> None:
        if message == step(1):
            raise ZeroDivisionError
        heard.append(message)

    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    way = DirectWay(DirectChannel(ours, len(ACCEPTED), 0), hear)
    with engine:
        engine.sendall(b"".join(encode_payload(step(n).SerializeToString()) for n in range(3)))
    await way.over
    assert heard == [step(0), step(2)]
    assert [type(context["exception"]) for context in failed] == [ZeroDivisionError]


async def test_a_gateway_that_is_cancelled_while_it_asks_leaves_nothing() -> None:
    before = len(os.listdir("/proc/self/fd"))
    engine = EngineEnd()
    asking = asyncio.create_task(open_direct(engine.link()))
    await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    engine.close()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_step_that_cannot_be_read_ends_the_channel(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, engine = socket.socketpair()
    member = Member("a" * 32, Role.DECODE, "d", "127.0.0.1:1", "demo", "fp", 512, 16, 66)
    link = NodeLink(member, ClusterSecret(), NoEvents(), SystemClock(), 1.2)
    link._direct = DirectWay(DirectChannel(ours, len(ACCEPTED), 0), link._hear_directly)
    uneven = node_pb2.PlainTokens(request_ids=["r"], attempts=[0], indices=[1])
    message = node_pb2.NodeMessage(outputs=node_pb2.StepOutputs(tokens=uneven))
    with engine:
        engine.sendall(encode_payload(message.SerializeToString()))
        assert "columns of tokens" in await link._direct.over
        assert engine.recv(1) == b""
    assert "columns of tokens" in caplog.text


class NoEvents:
    """node_link.LinkEvents of a link of which nothing may be heard."""

    def linked(self, link: NodeLink) -> None: ...

    def heartbeat(self, link: NodeLink, load: object) -> None: ...

    def outputs(self, link: NodeLink, outputs: object, tokens: object) -> None:
        raise AssertionError("an output")

    def lost(self, link: NodeLink, reason: str, *, has_died: bool) -> None: ...
