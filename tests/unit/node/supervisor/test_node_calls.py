"""The frames between a supervisor and an engine, and the node's own RPCs: which callers are
allowed.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
from fakes.clock import FakeClock

from baton.cluster.entries import decode_entry
from baton.cluster.known_nodes import ACCEPTED, ANY_ENGINE, LEDGERS, MEMBERS
from baton.cluster.secret import ClusterSecret, handshake_key
from baton.core.channels.frames import encode_payload
from baton.core.channels.handshake import Dialer
from baton.core.config import NodeConfig
from baton.core.errors import NodeLost, Unauthenticated
from baton.core.membership import Member, Role
from baton.node.supervisor import rpc
from baton.node.supervisor.engine_handle import (
    HEARTBEATS_MISSED,
    EngineCommand,
    EngineHandle,
    read_frame,
)
from baton.node.supervisor.rpc import NodeServicer
from baton.proto.v1 import common_pb2, engine_pb2, node_pb2

ENGINE, CALLER = "a" * 32, "b" * 32
ADDRESS = "127.0.0.1:5000"
HEARTBEAT_S = 0.25
COMMAND = EngineCommand("baton.none", "{}", {}, NodeConfig(heartbeat_s=HEARTBEAT_S))
MEMBER = Member(
    ENGINE, Role.DECODE, "d", ADDRESS, "m", "f", 512, 16, 66,
    engine_address="127.0.0.1:5001", host_id="c" * 32,
)  # fmt: skip


class FakeProcess:
    async def wait(self) -> int:
        return 0


class FakeEngine:
    """An engine process's end of the socket pair, controlled by the test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def next(self) -> engine_pb2.EngineInput:
        payload = await asyncio.wait_for(read_frame(self._reader), 1.0)
        assert payload is not None
        return engine_pb2.EngineInput.FromString(payload)

    def say(self, **body: Any) -> None:
        self._writer.write(encode_payload(engine_pb2.EngineOutput(**body).SerializeToString()))

    def end(self) -> None:
        self._writer.close()


class Node:
    """One engine's handle, in place of the node that the servicer uses."""

    def __init__(self, handle: EngineHandle, engine: FakeEngine, clock: FakeClock) -> None:
        self.handle = handle
        self.engine = engine
        self.clock = clock
        self.over = asyncio.Event()
        self.servicer = NodeServicer(self.engines, self.members, ClusterSecret(), (ADDRESS,))

    def engines(self) -> Sequence[EngineHandle]:
        return [self.handle]

    def members(self) -> Sequence[Member]:
        return [MEMBER]


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    ready = engine_pb2.Ready(welcome=node_pb2.Welcome(incarnation=ENGINE), port=5001)
    process: Any = FakeProcess()
    clock = FakeClock()
    handle = EngineHandle(process, reader, writer, ready, COMMAND, clock)
    engine = FakeEngine(*await asyncio.open_connection(sock=theirs))
    node = Node(handle, engine, clock)
    running = asyncio.create_task(handle.run(node.over.set))
    yield node
    engine.end()
    await running


class Aborted(Exception):
    """Raised by `abort`, as in gRPC."""


class FakeContext:
    """The server side of a call: messages and status that it returns."""

    def __init__(self) -> None:
        self.written: asyncio.Queue[Any] = asyncio.Queue()
        self.shaken: asyncio.Queue[bytes] = asyncio.Queue()  # handshake messages
        self.status: grpc.StatusCode | None = None

    async def write(self, message: Any) -> None:
        if message.handshake:
            self.shaken.put_nowait(message.handshake)
        else:
            self.written.put_nowait(message)

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: object) -> None:
        self.status = code
        raise Aborted(details)


async def calling(
    context: Any,
    purpose: bytes = LEDGERS,
    *,
    secret: str | None = None,
    address: str = ADDRESS,
) -> AsyncIterator[Any]:
    """The messages of a caller of either RPC: they differ in name only."""
    key = handshake_key(secret)
    ours = Dialer(key, purpose, dialer=CALLER, listener=ANY_ENGINE, address=address)
    yield node_pb2.GetLedgersRequest(handshake=ours.opening)
    yield node_pb2.GetLedgersRequest(handshake=ours.answer(await context.shaken.get()))
    assert await context.shaken.get() == ACCEPTED


async def never() -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield


async def nothing() -> AsyncIterator[Any]:
    return
    yield


# -- the engine's frames ---------------------------------------------------------------------------


async def until(node: Node) -> None:
    """Wait until everything that the engine has sent so far is routed."""
    asking = asyncio.create_task(node.handle.ledger())
    assert (await node.engine.next()).get_ledger
    node.engine.say(ledger="{}")
    assert await asking == "{}"


async def test_an_engine_is_ready_while_its_heart_beats(node: Node) -> None:
    for _ in range(3):
        node.clock.advance(HEARTBEAT_S * HEARTBEATS_MISSED - 0.01)
        assert node.handle.is_progressing
        node.engine.say(heartbeat=node_pb2.Heartbeat(num_steps=7))
        await until(node)
    node.clock.advance(HEARTBEAT_S * HEARTBEATS_MISSED)
    assert not node.handle.is_progressing and not node.handle.is_over
    assert node.handle.silent_s == HEARTBEAT_S * HEARTBEATS_MISSED


async def test_an_engine_whose_frames_have_ended_is_not_ready(node: Node) -> None:
    """An engine whose connection has ended is not ready, though its process may still run."""
    assert node.handle.is_progressing
    node.engine.end()
    await asyncio.wait_for(node.over.wait(), 1.0)
    assert node.handle.is_over and not node.handle.is_progressing


async def test_what_the_engine_says_of_its_end_is_why_it_ended() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    process: Any = FakeProcess()
    handle = EngineHandle(process, reader, writer, engine_pb2.Ready(), COMMAND, FakeClock())
    engine = FakeEngine(*await asyncio.open_connection(sock=theirs))
    engine.say(failed=common_pb2.Error(code="engine_failed", message="out of memory"))
    engine.end()
    error = await asyncio.wait_for(handle.run(), 1.0)
    assert error is not None and error.message == "out of memory"


async def test_death_of_the_engine_ends_questions_and_later_ones(node: Node) -> None:
    asking = asyncio.create_task(node.handle.ledger())
    await node.engine.next()
    node.engine.end()
    for question in (asking, node.handle.ledger()):
        with pytest.raises(NodeLost):
            await asyncio.wait_for(question, 1.0)


async def test_orders_to_an_engine_that_is_gone_go_nowhere(node: Node) -> None:
    node.engine.end()
    await asyncio.wait_for(node.over.wait(), 1.0)
    node.handle.drain()
    node.handle.send(engine_pb2.EngineInput(members=engine_pb2.Members()))


async def test_an_answer_behind_the_end_of_its_question_ends_nothing(node: Node) -> None:
    """A reply to a cancelled call is ignored: the call may be cancelled while its reply is read."""
    asking = asyncio.create_task(node.handle.ledger())
    assert (await node.engine.next()).get_ledger
    asking.cancel()
    node.handle._route(engine_pb2.EngineOutput(ledger="{}"))
    with pytest.raises(asyncio.CancelledError):
        await asking


# -- calls -----------------------------------------------------------------------------------------


async def test_who_proves_the_key_gets_the_engines_ledgers(node: Node) -> None:
    context: Any = FakeContext()
    call = asyncio.create_task(node.servicer.GetLedgers(calling(context), context))
    assert (await node.engine.next()).get_ledger
    node.engine.say(ledger='{"requests": {}}')
    await asyncio.wait_for(call, 1.0)
    assert context.written.get_nowait().ledgers == ['{"requests": {}}']
    assert context.status is None


async def test_an_engine_that_does_not_answer_is_said_so(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "LEDGER_TIMEOUT_S", 0.01)
    context: Any = FakeContext()
    await asyncio.wait_for(node.servicer.GetLedgers(calling(context), context), 1.0)
    (text,) = context.written.get_nowait().ledgers
    assert json.loads(text) == {"incarnation": ENGINE, "error": "no answer"}


async def test_who_proves_the_key_hears_what_the_directory_would_have(node: Node) -> None:
    context: Any = FakeContext()
    await asyncio.wait_for(node.servicer.GetMembers(calling(context, MEMBERS), context), 1.0)
    (entry,) = context.written.get_nowait().entries
    listed = decode_entry(entry, ClusterSecret()).member
    assert (listed.incarnation, listed.engine_address) == (ENGINE, "127.0.0.1:5001")


@pytest.mark.parametrize("name", ["GetLedgers", "GetMembers"])
@pytest.mark.parametrize(
    "claims", [{"secret": "wrong"}, {"purpose": b"kv"}, {"address": "a:1"}, None]
)
async def test_calls_that_prove_nothing_are_refused(
    node: Node, name: str, claims: dict[str, Any] | None
) -> None:
    context: Any = FakeContext()
    purpose = LEDGERS if name == "GetLedgers" else MEMBERS
    requests = nothing() if claims is None else calling(context, **{"purpose": purpose, **claims})
    with pytest.raises((Aborted, Unauthenticated)):
        await getattr(node.servicer, name)(requests, context)
    # None: the caller itself has failed first
    assert context.status in (grpc.StatusCode.UNAUTHENTICATED, None)
    assert context.written.empty()


async def test_a_handshake_for_one_call_is_none_for_another(node: Node) -> None:
    context: Any = FakeContext()
    with pytest.raises(Aborted):
        await node.servicer.GetMembers(calling(context, LEDGERS), context)
    assert context.status is grpc.StatusCode.UNAUTHENTICATED and context.written.empty()


async def test_what_is_no_message_is_refused_like_any_stranger(node: Node) -> None:
    async def garbage() -> AsyncIterator[Any]:
        yield node_pb2.GetLedgersRequest.FromString(b"\xff" * 9)  # as gRPC decodes it

    context: Any = FakeContext()
    with pytest.raises(Aborted):
        await node.servicer.GetLedgers(garbage(), context)
    assert context.status is grpc.StatusCode.UNAUTHENTICATED
    assert context.written.empty()


async def test_callers_that_prove_nothing_are_few_and_short(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "ADMIT_S", 0.05)
    contexts: list[Any] = [FakeContext() for _ in range(rpc.MAX_PENDING + 1)]
    calls = [node.servicer.GetLedgers(never(), context) for context in contexts]
    assert all(isinstance(e, Aborted) for e in await asyncio.gather(*calls, return_exceptions=True))
    statuses = [context.status for context in contexts]
    assert statuses.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 1
    assert statuses.count(grpc.StatusCode.UNAUTHENTICATED) == rpc.MAX_PENDING
    assert node.servicer.num_pending == 0
