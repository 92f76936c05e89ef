"""Between an engine's frames and gRPC streams: what is relayed, and how streams end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from fakes.clock import FakeClock, FakeEntropy

from baton.cluster.link_handshake import ACCEPTED, HANDOFF, SESSION
from baton.cluster.secret import ClusterSecret, handshake_key
from baton.core.channels.handshake import Dialer
from baton.core.errors import NodeLost, Unauthenticated
from baton.node.channels.frames import encode, read_frame
from baton.node.supervisor import callers, rpc
from baton.node.supervisor.callers import Callers
from baton.node.supervisor.engine_handle import EngineHandle
from baton.node.supervisor.rpc import HandoffServicer, NodeServicer
from baton.proto.v1 import common_pb2, engine_pb2, handoff_pb2, node_pb2

ENGINE, PEER = "a" * 32, "b" * 32
ADDRESS = "127.0.0.1:5000"
HELLO = handoff_pb2.PeerMessage(hello=handoff_pb2.Hello(incarnation=ENGINE))
ATTACH = handoff_pb2.PeerMessage(attach=handoff_pb2.Attach(transfer_id="t"))


class FakeProcess:
    async def wait(self) -> int:
        return 0


class FakeEngine:
    """An engine process's end of the socket pair, in the test's hands."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def next(self) -> engine_pb2.EngineInput:
        payload = await asyncio.wait_for(read_frame(self._reader), 1.0)
        assert payload is not None
        return engine_pb2.EngineInput.FromString(payload)

    def say(self, **body: Any) -> None:
        self._writer.write(encode(engine_pb2.EngineOutput(**body)))

    def end(self) -> None:
        self._writer.close()


class Node:
    """One engine's handle, as the servicers see a node."""

    def __init__(self, handle: EngineHandle, engine: FakeEngine, clock: FakeClock) -> None:
        self.handle = handle
        self.engine = engine
        self.clock = clock
        self.over = asyncio.Event()
        self.strangers: set[str] = set()
        self.callers = Callers(ClusterSecret(), (ADDRESS,))

    def engines(self) -> list[EngineHandle]:
        return [self.handle]

    async def is_member(self, incarnation: str) -> bool:
        return incarnation not in self.strangers


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    welcome = node_pb2.Welcome(incarnation=ENGINE)
    process: Any = FakeProcess()
    clock = FakeClock()
    handle = EngineHandle(process, reader, writer, welcome, 0.25, clock, FakeEntropy())
    engine = FakeEngine(*await asyncio.open_connection(sock=theirs))
    node = Node(handle, engine, clock)
    running = asyncio.create_task(handle.run(node.over.set))
    yield node
    engine.end()
    await running


class Aborted(Exception):
    """What `abort` raises, as gRPC's does."""


class FakeContext:
    """A call's server side: messages and status out. It reads while `is_reading`."""

    def __init__(self) -> None:
        self.written: asyncio.Queue[Any] = asyncio.Queue()
        self.shaken: asyncio.Queue[bytes] = asyncio.Queue()  # the handshake's
        self.is_reading = True
        self.status: grpc.StatusCode | None = None

    async def write(self, message: Any) -> None:
        if message.handshake:
            self.shaken.put_nowait(message.handshake)
            return
        if not self.is_reading:
            await asyncio.Event().wait()
        self.written.put_nowait(message)

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: object) -> None:
        self.status = code
        raise Aborted(details)


async def calling(
    context: Any,
    then: AsyncIterator[Any],
    purpose: bytes = SESSION,
    *,
    secret: str | None = None,
    listener: str = ENGINE,
) -> AsyncIterator[Any]:
    """A caller's messages: its part of the handshake, then what it is about."""
    ours = Dialer(handshake_key(secret), purpose, dialer=PEER, listener=listener, address=ADDRESS)
    yield node_pb2.GatewayMessage(handshake=ours.opening)
    yield node_pb2.GatewayMessage(handshake=ours.answer(await context.shaken.get()))
    assert await context.shaken.get() == ACCEPTED
    async for message in then:
        yield message


async def session(node: Node, context: Any, then: AsyncIterator[Any]) -> None:
    await NodeServicer(node, node.callers).Session(calling(context, then), context)


async def link(node: Node, context: Any, then: AsyncIterator[Any]) -> None:
    await HandoffServicer(node, node.callers).Link(calling(context, then, HANDOFF), context)


async def never() -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield


async def nothing() -> AsyncIterator[Any]:
    return
    yield


async def test_gateway_gets_its_outputs_and_everybody_heartbeats(node: Node) -> None:
    contexts = [FakeContext() for _ in range(2)]
    calls = [asyncio.create_task(session(node, context, never())) for context in contexts]
    welcomes = [await context.written.get() for context in contexts]
    assert all(message.welcome.incarnation == ENGINE for message in welcomes)
    node.engine.say(heartbeat=node_pb2.Heartbeat(num_steps=7))
    for context in contexts:
        assert (await context.written.get()).heartbeat.num_steps == 7
    for call in calls:
        call.cancel()
    lost = {(await node.engine.next()).gateway_lost for _ in calls}
    assert len(lost) == 2


async def test_each_gateway_is_told_a_token_of_its_own_and_the_engine_before(node: Node) -> None:
    node.handle.welcome.direct.host_id = b"h" * 16
    offers = []
    for _ in range(2):
        gateway, mailbox = node.handle.open_gateway()
        linked = (await node.engine.next()).gateway_linked
        welcome = await mailbox.get()
        assert welcome is not None
        offers.append(welcome.welcome.direct)
        assert (linked.gateway, linked.token) == (gateway, offers[-1].token)
        assert (offers[-1].gateway, offers[-1].host_id) == (gateway, b"h" * 16)
        assert len(linked.token) == 32
    assert offers[0].token != offers[1].token
    assert not node.handle.welcome.direct.token


async def test_a_gateway_whose_channel_broke_loses_its_stream_and_is_told_why(node: Node) -> None:
    context: Any = FakeContext()
    node.handle.welcome.direct.host_id = b"h" * 16
    call = asyncio.create_task(session(node, context, never()))
    gateway = (await node.engine.next()).gateway_linked.gateway
    error = common_pb2.Error(code="node_lost", message="the other side does not read")
    for name in ("e" * 32, gateway):  # another one's end is none of its
        node.engine.say(close_gateway=engine_pb2.CloseGateway(gateway=name, error=error))
    with pytest.raises(Aborted, match="does not read"):
        await call
    assert context.status is grpc.StatusCode.UNAVAILABLE
    assert (await node.engine.next()).gateway_lost == gateway


async def test_stream_that_opens_later_hears_the_last_heartbeat(node: Node) -> None:
    node.engine.say(heartbeat=node_pb2.Heartbeat(num_steps=7))
    for _ in range(2):
        _, mailbox = node.handle.open_gateway()
        bodies = [(await mailbox.get()).WhichOneof("body") for _ in range(2)]
        assert bodies == ["welcome", "heartbeat"]


async def test_an_engine_whose_frames_have_ended_is_not_ready(node: Node) -> None:
    """Its process may still be taking itself apart."""
    assert node.handle.is_progressing
    node.engine.end()
    await asyncio.wait_for(node.over.wait(), 1.0)
    assert node.handle.is_over and not node.handle.is_progressing


async def test_a_hung_engine_is_not_recommended_by_its_last_heartbeat(node: Node) -> None:
    """Else gateways would count on it again as soon as they have taken it for lost."""
    node.engine.say(heartbeat=node_pb2.Heartbeat(num_steps=7))
    _, mailbox = node.handle.open_gateway()
    assert [(await mailbox.get()).WhichOneof("body") for _ in range(2)] == ["welcome", "heartbeat"]
    node.clock.advance(0.6)
    _, mailbox = node.handle.open_gateway()
    assert (await mailbox.get()).HasField("welcome")
    mailbox.end()
    assert await mailbox.get() is None


async def test_end_of_the_gateways_side_ends_the_session(node: Node) -> None:
    context: Any = FakeContext()
    await session(node, context, nothing())
    assert (await node.engine.next()).HasField("gateway_lost")


async def broken() -> AsyncIterator[Any]:
    raise ValueError("a message that is none")
    yield


async def test_what_breaks_the_way_in_ends_the_stream_with_a_status(node: Node) -> None:
    gateway: Any = FakeContext()
    puller: Any = FakeContext()
    calls = [
        session(node, gateway, broken()),
        link(node, puller, broken()),
    ]
    for call in calls:
        with pytest.raises(Aborted):
            await asyncio.wait_for(call, 1.0)
    assert gateway.status is puller.status is grpc.StatusCode.INTERNAL
    said = {(await node.engine.next()).WhichOneof("body") for _ in range(3)}
    assert said == {"gateway_lost", "peer_linked", "peer_lost"}


async def test_a_message_that_cannot_be_passed_on_ends_its_stream(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def one() -> AsyncIterator[Any]:
        yield node_pb2.GatewayMessage()
        await asyncio.Event().wait()

    def break_down(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(node.handle, "from_gateway", break_down)
    gateway: Any = FakeContext()
    with pytest.raises(Aborted):
        await asyncio.wait_for(session(node, gateway, one()), 1.0)
    assert gateway.status is grpc.StatusCode.INTERNAL
    assert "ZeroDivisionError" in caplog.text


async def test_death_of_the_engine_ends_sessions_links_and_questions(node: Node) -> None:
    gateway, puller = (
        FakeContext(),
        FakeContext(),
    )
    calls = [
        asyncio.create_task(session(node, gateway, never())),
        asyncio.create_task(link(node, puller, never())),
        asyncio.create_task(node.handle.ledger()),
    ]
    await node.engine.next()
    node.engine.end()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [Aborted, Aborted, NodeLost]
    assert gateway.status is puller.status is grpc.StatusCode.UNAVAILABLE
    said = [gateway.written.get_nowait().WhichOneof("body") for _ in range(2)]
    assert said == ["welcome", "engine_ended"]
    _, mailbox = node.handle.open_gateway()  # too late
    assert [(await mailbox.get()).WhichOneof("body") for _ in range(2)] == said
    with pytest.raises(NodeLost):
        await mailbox.get()


async def test_reader_that_does_not_read_loses_its_session(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "WRITE_TIMEOUT_S", 0.01)
    context: Any = FakeContext()
    context.is_reading = False
    with pytest.raises(Aborted):
        await session(node, context, never())
    assert context.status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await node.engine.next()).HasField("gateway_lost")


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ({"secret": "wrong"}, grpc.StatusCode.UNAUTHENTICATED),
        ({"purpose": HANDOFF}, grpc.StatusCode.UNAUTHENTICATED),
        ({"listener": PEER}, grpc.StatusCode.UNAVAILABLE),
        (None, grpc.StatusCode.UNAUTHENTICATED),
    ],
)
async def test_calls_that_prove_nothing_are_refused(
    node: Node, said: dict[str, Any] | None, status: grpc.StatusCode
) -> None:
    context: Any = FakeContext()
    requests = nothing() if said is None else calling(context, never(), **said)
    with pytest.raises((Aborted, Unauthenticated)):
        await NodeServicer(node, node.callers).Session(requests, context)
    assert context.status in (status, None)  # None: the caller itself found out first
    assert context.written.empty()


async def test_a_dispatch_before_the_handshake_reaches_no_engine(node: Node) -> None:
    async def rude() -> AsyncIterator[Any]:
        yield node_pb2.GatewayMessage(dispatch=node_pb2.Dispatch(request_id="r"))

    context: Any = FakeContext()
    with pytest.raises(Aborted):
        await NodeServicer(node, node.callers).Session(rude(), context)
    assert context.status is grpc.StatusCode.UNAUTHENTICATED
    assert context.written.empty()


async def test_what_is_no_message_is_refused_like_any_stranger(node: Node) -> None:
    async def garbage() -> AsyncIterator[Any]:
        yield node_pb2.GatewayMessage.FromString(b"\xff" * 9)  # as gRPC does it

    context: Any = FakeContext()
    with pytest.raises(Aborted):
        await NodeServicer(node, node.callers).Session(garbage(), context)
    assert context.status is grpc.StatusCode.UNAUTHENTICATED
    assert context.written.empty()


async def test_a_puller_that_the_directory_does_not_have_gets_no_link(node: Node) -> None:
    node.strangers.add(PEER)
    context: Any = FakeContext()
    with pytest.raises(Aborted, match="not in the directory"):
        await HandoffServicer(node, node.callers).Link(calling(context, never(), HANDOFF), context)
    assert context.status is grpc.StatusCode.PERMISSION_DENIED


async def test_a_claimed_name_does_not_end_a_link_that_stands(node: Node) -> None:
    standing = node.handle.open_peer(PEER, is_source=False)
    for said in ({"secret": "wrong"}, {"purpose": SESSION}):
        context: Any = FakeContext()
        with pytest.raises((Aborted, Unauthenticated)):
            await HandoffServicer(node, node.callers).Link(
                calling(context, never(), **{"purpose": HANDOFF, **said}), context
            )
    assert not standing.outgoing.is_over


async def test_callers_that_prove_nothing_are_few_and_short(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "ADMIT_S", 0.05)
    contexts: list[Any] = [FakeContext() for _ in range(callers.MAX_PENDING + 1)]
    calls = [NodeServicer(node, node.callers).Session(never(), context) for context in contexts]
    assert all(isinstance(e, Aborted) for e in await asyncio.gather(*calls, return_exceptions=True))
    statuses = [context.status for context in contexts]
    assert statuses.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 1
    assert statuses.count(grpc.StatusCode.UNAUTHENTICATED) == callers.MAX_PENDING
    assert node.callers.num_pending == 0


async def test_newer_link_of_a_pair_replaces_the_older(node: Node) -> None:
    older = node.handle.open_peer(PEER, is_source=False)
    newer = node.handle.open_peer(PEER, is_source=False)
    assert older.outgoing.is_over
    bodies = [(await node.engine.next()).WhichOneof("body") for _ in range(3)]
    assert bodies == ["peer_linked", "peer_lost", "peer_linked"]
    node.handle.from_peer(PEER, older, ATTACH)  # late: dropped
    node.handle.close_peer(PEER, older)  # its handler ends: says nothing
    node.handle.from_peer(PEER, newer, HELLO)
    assert (await node.engine.next()).from_peer.message == HELLO


async def test_what_was_meant_for_an_older_link_is_not_said_on_the_new_one(node: Node) -> None:
    peer = node.handle.open_peer(PEER, is_source=False)
    for message in (ATTACH, HELLO, ATTACH):
        node.engine.say(to_peer=engine_pb2.ToPeer(incarnation=PEER, message=message))
    assert [await peer.outgoing.get() for _ in range(2)] == [HELLO, ATTACH]


async def test_a_refused_peer_is_told_why(node: Node) -> None:
    context: Any = FakeContext()
    call = asyncio.create_task(link(node, context, never()))
    await node.engine.next()
    error = common_pb2.Error(code="fingerprint_mismatch", message="dtype: 'a' here, 'b' there")
    close = engine_pb2.ClosePeer(incarnation=PEER, error=error)
    node.engine.say(close_peer=close)
    with pytest.raises(Aborted, match="dtype: 'a' here"):
        await call
    assert context.status is grpc.StatusCode.FAILED_PRECONDITION


async def test_an_answer_behind_the_end_of_its_question_ends_nothing(node: Node) -> None:
    """The call may be cancelled in the very moment in which its answer is read."""
    asking = asyncio.create_task(node.handle.ledger())
    query = (await node.engine.next()).get_ledger
    asking.cancel()
    node.handle._route(engine_pb2.EngineOutput(ledger=engine_pb2.Ledger(query=query, json="{}")))
    with pytest.raises(asyncio.CancelledError):
        await asking
