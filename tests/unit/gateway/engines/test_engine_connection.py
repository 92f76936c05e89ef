"""A gateway's connection to one engine over real sockets; the test plays the engine."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from fakes.node.engine_door import ANOTHER_HOST, HOST, EngineDoor
from fakes.node.engine_door import EngineConnection as EngineEnd

from baton.cli.host.certs import make_certificates
from baton.cluster.secret import ClusterSecret, handshake_key
from baton.cluster.tls import ClusterTls
from baton.core.channels import admission
from baton.core.channels.addresses import host_id
from baton.core.channels.frames import MAX_FRAME_BYTES
from baton.core.errors import (
    AdapterRefused,
    EngineFailed,
    HandoffFailed,
    HostLost,
    InvalidRequest,
    NodeLost,
)
from baton.core.membership import Member, Role
from baton.core.ports import Clock
from baton.gateway.engines import engine_connection, engine_stream
from baton.gateway.engines.engine_connection import EngineConnection, Receive
from baton.gateway.engines.reported_load import ReportedLoad
from baton.gateway.request.engine_link import EngineOutput, PlainToken
from baton.proto import codec
from baton.proto.v1 import node_pb2

SECRET = "a secret of the cluster"
UNIX, TCP, TLS = "unix", "tcp", "tls"
WAYS = (UNIX, TCP, TLS)
SILENCE_S = 20.0


def step(index: int, text: str = "r") -> bytes:
    """A step whose only output is one plain token."""
    tokens = node_pb2.PlainTokens(request_ids=[text], attempts=[0], indices=[index], token_ids=[5])
    message = node_pb2.NodeMessage(outputs=node_pb2.StepOutputs(tokens=tokens))
    return message.SerializeToString()


def heartbeat(num_running: int) -> bytes:
    beat = node_pb2.Heartbeat(num_running=num_running)
    return node_pb2.NodeMessage(heartbeat=beat).SerializeToString()


@dataclass
class Events:
    """The events that the connection reported to the gateway, in order, as one line each."""

    received: list[str] = field(default_factory=list)
    welcome: node_pb2.Welcome | None = None
    loads: list[int] = field(default_factory=list)
    tokens: list[PlainToken] = field(default_factory=list)
    reason: str = ""
    has_ended: bool = False
    has_died: bool | None = None  # None: not lost
    fails_on: int = -1  # the index of a token

    def linked(
        self, engine: EngineConnection, welcome: node_pb2.Welcome, load: ReportedLoad
    ) -> Receive:
        self.received.append("linked")
        self.welcome = welcome
        self.loads.append(load.num_running)
        return self.receive

    def heartbeat(self, engine: EngineConnection, load: ReportedLoad) -> None:
        self.received.append("heartbeat")
        self.loads.append(load.num_running)

    def receive(self, outputs: Sequence[EngineOutput], tokens: Sequence[PlainToken]) -> None:
        if any(index == self.fails_on for _, _, index, _ in tokens):
            raise ZeroDivisionError
        self.received.append("outputs")
        self.tokens += tokens

    def ended(self, engine: EngineConnection) -> None:
        self.has_ended = True

    def lost(self, engine: EngineConnection, reason: str, *, has_died: bool) -> None:
        self.received.append("lost")
        self.reason, self.has_died = reason, has_died

    @property
    def indices(self) -> list[int]:
        return [index for _, _, index, _ in self.tokens]


@dataclass
class Scene:
    """An engine and its node, and a gateway that can dial them. `ends`: accepted connections."""

    member: Member
    door: EngineDoor
    node: asyncio.Server
    tls: ClusterTls | None = None
    secret: str = SECRET
    ends: list[EngineEnd] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    opening: Sequence[bytes] = ()  # what the engine sends first, in one write
    events: Events = field(default_factory=Events)

    def welcome(self, **changes: object) -> bytes:
        member = self.member
        fields: dict[str, object] = {
            "incarnation": member.incarnation,
            "role": member.role.value,
            "name": member.name,
            "model": member.model,
            "fingerprint": member.fingerprint,
            "max_num_seqs": 7,
        }
        welcome = node_pb2.Welcome(**fields | changes)  # type: ignore[arg-type]
        return node_pb2.NodeMessage(welcome=welcome).SerializeToString()

    def connection(self, silence_s: float = SILENCE_S) -> EngineConnection:
        return EngineConnection(
            *(self.member, ClusterSecret(self.secret), self.events),
            *(Clock(), silence_s, self.tls),
        )

    @asynccontextmanager
    async def linked(
        self, silence_s: float = SILENCE_S
    ) -> AsyncIterator[tuple[EngineConnection, EngineEnd, asyncio.Task[str]]]:
        """A linked gateway, the engine's end of the connection, and the gateway's `run` task."""
        connection = self.connection(silence_s)
        running = asyncio.create_task(connection.run())
        await until(lambda: "linked" in self.events.received or running.done())
        assert not running.done(), running.result()
        try:
            yield connection, self.ends[-1], running
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    async def die(self) -> None:
        """The engine's process ends while its node lives on."""
        await self.door.close()

    async def serve(self, end: EngineEnd) -> None:
        """Send the opening, then leave the connection to the test until it ends."""
        self.ends.append(end)
        self.arrived.set()
        end.send(*self.opening)
        await asyncio.Event().wait()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder / "all")
    return folder / "all"


def tls_of(folder: Path, role: str) -> ClusterTls:
    return ClusterTls(folder / "ca.crt", folder / f"{role}.crt", folder / f"{role}.key")


def server_context(folder: Path, role: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / f"{role}.crt", folder / f"{role}.key")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


async def _stay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A node that only accepts connections."""
    await reader.read()
    writer.close()


@asynccontextmanager
async def engine(
    way: str, folder: Path | None = None, role: str = "decode"
) -> AsyncIterator[Scene]:
    """An engine that is reached by this transport; `folder`: its certificates."""
    incarnation = secrets.token_hex(16)
    node = await asyncio.start_server(_stay, HOST, 0)
    context = server_context(folder, role) if way == TLS and folder is not None else None
    member = Member(
        *(incarnation, Role.DECODE, "d1", "{}:{}".format(*node.sockets[0].getsockname())),
        *("demo", "fp", 512, 16, 66),
        host_id=host_id().hex() if way == UNIX else ANOTHER_HOST,
        engine_address=f"{HOST}:1",
    )
    key = handshake_key(SECRET)
    scene = Scene(member, EngineDoor(incarnation, key, lambda end: scene.serve(end), context), node)
    if way == UNIX:
        await scene.door.listen_here()
    else:
        port = await scene.door.listen()
        scene.member = replace(member, engine_address=f"{HOST}:{port}")
    if context is not None and folder is not None:
        scene.tls = tls_of(folder, "gateway")
    scene.opening = (scene.welcome(), heartbeat(0))
    try:
        yield scene
    finally:
        await scene.door.close()
        node.close()


@pytest.fixture(params=WAYS)
async def scene(request: pytest.FixtureRequest, certificates: Path) -> AsyncIterator[Scene]:
    async with engine(request.param, certificates) as scene:
        yield scene


@pytest.fixture
async def here() -> AsyncIterator[Scene]:
    """An engine for tests that do not depend on the transport."""
    async with engine(UNIX) as scene:
        yield scene


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("reads_on", [False, True])
async def test_an_engine_that_hangs_up_is_left_at_once(
    here: Scene, monkeypatch: pytest.MonkeyPatch, *, reads_on: bool
) -> None:
    """The connection ends at once even if the engine has not read all that was sent to it."""
    has_ended = engine_connection.has_ended

    async def ask_later(member: Member) -> bool:
        await asyncio.sleep(0.1)  # the transport may flush its buffer and close meanwhile
        return await has_ended(member)

    monkeypatch.setattr(engine_connection, "has_ended", ask_later)
    before = num_open_files()
    async with here.linked() as (connection, end, running):
        assert connection._stream.transport is not None
        while not connection._stream.transport.get_write_buffer_size():
            connection.cancel("r" * 100_000, 0)
            await asyncio.sleep(0)
        end.writer.write_eof()
        if reads_on:
            await end.reader.read()
        async with asyncio.timeout(5):
            assert await running == "the engine closed the connection"
        await until(lambda: num_open_files() == before + 1)  # the engine's end stays open


# --- opening --------------------------------------------------------------------------------------


async def test_an_engine_that_hangs_up_within_tls_is_lost_for_a_reason(certificates: Path) -> None:
    """The reason is given although Python's error for it has no text."""
    has_gone = asyncio.Event()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write_eof()
        await reader.read()
        writer.close()
        await writer.wait_closed()
        has_gone.set()

    async with (
        engine(TLS, certificates) as scene,
        await asyncio.start_server(hang_up, HOST) as ours,
    ):
        port = ours.sockets[0].getsockname()[1]
        scene.member = replace(scene.member, engine_address=f"{HOST}:{port}")
        assert await scene.connection().run() == "ConnectionResetError"
        await has_gone.wait()


async def test_messages_pass_both_ways_in_order(scene: Scene) -> None:
    async with scene.linked() as (connection, end, _):
        assert scene.events.welcome is not None and scene.events.welcome.max_num_seqs == 7
        for index in range(50):
            connection.cancel(f"{index}" * 1000, index)
        end.send(heartbeat(3))
        for index in range(50):
            end.send(step(index, "r" * 1000))
        for index in range(50):
            cancel = node_pb2.GatewayMessage.FromString(await end.receive()).cancel
            assert (cancel.request_id, cancel.attempt) == (f"{index}" * 1000, index)
        await until(lambda: len(scene.events.tokens) == 50)
        assert scene.events.indices == list(range(50))
        assert scene.events.received[:2] == ["linked", "heartbeat"]
    assert scene.events.received.count("lost") == 1


async def test_orders_are_answered_each_by_its_number_or_with_the_end(here: Scene) -> None:
    async with here.linked() as (connection, end, _):
        answers = [connection.load_adapter(name, f"/{name}") for name in ("a", "b", "c", "d")]
        orders = [
            node_pb2.GatewayMessage.FromString(await end.receive()).load_adapter for _ in answers
        ]
        assert [(order.name, order.path) for order in orders] == [
            (name, f"/{name}") for name in ("a", "b", "c", "d")
        ]
        answers[0].cancel()  # its caller has gone
        refused = codec.error_to_wire(AdapterRefused("r is 99"))
        for loaded in (
            node_pb2.AdapterLoaded(order_id=orders[1].order_id, error=refused),
            node_pb2.AdapterLoaded(order_id=orders[0].order_id, digest="0" * 32),
            node_pb2.AdapterLoaded(order_id=orders[2].order_id, digest="1" * 32),
        ):
            end.send(node_pb2.NodeMessage(adapter_loaded=loaded).SerializeToString())
        assert await answers[2] == "1" * 32
        refusal = await answers[1]
        assert isinstance(refusal, AdapterRefused) and refusal.message == "r is 99"
        assert not answers[3].done()
        await here.die()
        end.writer.close()
        assert isinstance(await answers[3], NodeLost)


async def test_what_comes_directly_behind_the_welcome_is_heard(scene: Scene) -> None:
    """A message that follows the welcome is received, also if it comes in the verdict's segment."""
    scene.opening = (scene.welcome(), b"", heartbeat(5), step(0))
    async with scene.linked():
        await until(lambda: scene.events.tokens)
        assert scene.events.received == ["linked", "outputs"]
        assert scene.events.loads == [5]


async def test_an_engine_counts_from_its_first_heartbeat_to_its_streams_end(here: Scene) -> None:
    here.opening = (here.welcome(), step(0))
    connection = here.connection()
    running = asyncio.create_task(connection.run())
    await until(lambda: connection.is_starting)
    assert here.events.received == []
    here.ends[-1].send(heartbeat(3), step(1))
    await until(lambda: here.events.tokens)
    assert not connection.is_starting
    await here.die()
    await running
    assert not connection.is_starting
    assert (here.events.received, here.events.indices) == (["linked", "outputs", "lost"], [1])


async def test_an_engine_that_ends_before_it_reports_was_never_there(here: Scene) -> None:
    here.opening = (here.welcome(),)
    connection = here.connection()
    running = asyncio.create_task(connection.run())
    await until(lambda: connection.is_starting)
    await here.die()
    await running
    assert here.events.received == [] and not here.events.has_ended and not connection.is_starting


@pytest.mark.parametrize("name", ["incarnation", "role", "model", "fingerprint"])
async def test_who_is_not_what_was_announced_is_left(here: Scene, name: str) -> None:
    here.opening = (here.welcome(**{name: "other"}), heartbeat(1), step(0))
    reason = await here.connection().run()
    assert reason.startswith(f"{name} is 'other', announced was")
    assert here.events.received == []


async def test_what_comes_before_a_welcome_counts_for_nothing(
    here: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_stream, "_CONNECT_TIMEOUT_S", 0.2)
    here.opening = (heartbeat(1), step(0))
    assert await here.connection().run() == "no welcome within 0.2 s"
    assert here.events.received == []


async def test_a_refusal_is_the_reason(scene: Scene) -> None:
    scene.door.refusal = "this needs the certificate of gateway"
    assert await scene.connection().run() == scene.door.refusal
    assert (scene.events.received, scene.ends) == ([], [])


async def test_a_stranger_at_the_address_is_not_spoken_with(scene: Scene) -> None:
    """A process without the key receives nothing but the opening."""
    scene.door._key = handshake_key("a secret of somebody else")
    reason = await scene.connection().run()
    assert reason == "it hung up during the handshake"  # the process cannot verify the gateway
    assert (scene.events.received, scene.ends) == ([], [])


async def test_who_answers_without_the_key_is_not_believed(
    here: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = []

    async def pretend(end: EngineEnd) -> None:
        await end.reader.readexactly(admission.OPENING_BYTES)
        end.writer.write(bytes(admission.CHALLENGE_BYTES))
        end.send(b"", here.welcome())
        answered.append(await end.reader.read())

    monkeypatch.setattr(here.door, "_handshake", pretend)
    assert await here.connection().run() == "the other end does not hold the key"
    await until(lambda: answered)
    assert answered == [b""] and here.events.received == []


async def test_who_says_nothing_is_not_waited_for(
    here: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def listen(end: EngineEnd) -> None:
        await end.reader.read()
        raise ConnectionError

    monkeypatch.setattr(here.door, "_handshake", listen)
    monkeypatch.setattr(engine_stream, "_CONNECT_TIMEOUT_S", 0.1)
    assert await here.connection().run() == "no welcome within 0.1 s"


async def test_a_refusal_has_an_end(here: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal of excessive length is rejected: without a secret, any process passes the
    handshake."""
    handshake = here.door._handshake

    async def refuse_at_length(end: EngineEnd) -> None:
        monkeypatch.setattr(end, "send", lambda _: end.writer.write(b"\0\0\0\1" + bytes(1000)))
        await handshake(end)
        await end.reader.read()
        raise ConnectionError

    monkeypatch.setattr(here.door, "_handshake", refuse_at_length)
    assert "a frame of 16777216 bytes" in await here.connection().run()


async def test_an_engine_of_another_user_is_not_spoken_with(
    here: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(connection: socket.socket) -> None:
        raise HandoffFailed("the other end belongs to user 1")

    monkeypatch.setattr(engine_stream, "require_same_user", refuse)
    before = num_open_files()
    assert "belongs to user 1" in await here.connection().run()
    await until(lambda: num_open_files() <= before)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"incarnation": "f" * 32}, "refused"),
        ({"incarnation": "../../etc"}, "32 hex digits"),
        ({"host_id": ANOTHER_HOST, "engine_address": f"{HOST}:1"}, "connect call failed"),
        ({"host_id": ANOTHER_HOST, "engine_address": "no..such.host:1"}, "is no address"),
        ({"host_id": ANOTHER_HOST, "engine_address": f"{'h' * 64}:1"}, "is no address"),
        ({"host_id": ANOTHER_HOST, "engine_address": f"{HOST}:99999"}, "is no address"),
    ],
    ids=["nobody", "no incarnation", "no listener", "no host", "no name", "no port"],
)
async def test_an_engine_that_cannot_be_reached_is_said_so(
    here: Scene, change: dict[str, str], reason: str
) -> None:
    here.member = replace(here.member, **change)  # type: ignore[arg-type]
    assert reason in (await here.connection().run()).lower()
    assert here.events.received == []


async def test_an_engine_is_found_at_every_address_of_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each address of a name is tried: `localhost` can be ::1 first, where the engine does not
    listen."""
    async with engine(TCP) as scene:
        port = int(scene.member.engine_address.rpartition(":")[2])

        async def both(*_: object, **__: object) -> list[object]:
            stream = socket.SOCK_STREAM
            first = (socket.AF_INET, stream, 0, "", ("127.0.0.2", port))
            return [first, (socket.AF_INET, stream, 0, "", (HOST, port))]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
        async with scene.linked():
            pass


# --- certificates ---------------------------------------------------------------------------------


async def test_an_engine_of_another_role_is_not_spoken_with(certificates: Path) -> None:
    async with engine(TLS, certificates, role="prefill") as scene:
        assert "certificate" in (await scene.connection().run()).lower()
        assert scene.ends == []


async def test_an_engine_of_another_ca_is_not_spoken_with(
    certificates: Path, tmp_path: Path
) -> None:
    make_certificates(tmp_path / "others")
    async with engine(TLS, tmp_path / "others") as scene:
        scene.tls = tls_of(certificates, "gateway")
        assert "certificate" in (await scene.connection().run()).lower()
        assert scene.ends == []


async def test_certificates_that_cannot_be_read_are_the_reason(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_: ClusterTls) -> ssl.SSLContext:
        raise FileNotFoundError("no such file")

    async with engine(TLS, certificates) as scene:
        monkeypatch.setattr(ClusterTls, "client_context", gone)
        assert "no such file" in await scene.connection().run()


# --- closing --------------------------------------------------------------------------------------


async def test_silence_is_an_end(scene: Scene) -> None:
    scene.opening = (scene.welcome(), heartbeat(0), step(0))
    connection = scene.connection(silence_s=0.2)
    assert await connection.run() == "no heartbeat for 0.2 s"
    assert scene.events.received == ["linked", "outputs", "lost"]
    assert scene.events.has_died is False


async def test_whatever_comes_ends_the_silence(here: Scene) -> None:
    async with here.linked(silence_s=0.4) as (_, end, running):
        for _ in range(16):
            end.send(b"")
            await asyncio.sleep(0.05)
        assert not running.done()


async def test_a_gateway_that_stood_still_counts_the_silence_anew(here: Scene) -> None:
    async with here.linked(silence_s=0.4) as (_, end, running):
        time.sleep(0.8)  # noqa: ASYNC251
        end.send(heartbeat(2))
        await until(lambda: here.events.loads == [0, 2] or running.done())
        assert not running.done()
        assert await running == "no heartbeat for 0.4 s"


async def test_the_engines_last_word_is_the_reason(scene: Scene) -> None:
    async with scene.linked() as (_, end, running):
        ended = codec.error_to_wire(EngineFailed("out of memory"))
        end.send(step(0), node_pb2.NodeMessage(engine_ended=ended).SerializeToString(), step(1))
        assert await running == "out of memory"
        assert scene.events.received == ["linked", "outputs", "lost"]
        assert (scene.events.indices, scene.events.has_died) == ([0], True)
        assert scene.events.reason == "out of memory"


async def test_an_engine_that_lost_a_host_was_killed_by_no_request(scene: Scene) -> None:
    async with scene.linked() as (_, end, running):
        ended = codec.error_to_wire(HostLost("rank 1 on there has sent nothing for 1.2 s"))
        end.send(node_pb2.NodeMessage(engine_ended=ended).SerializeToString())
        await scene.die()
        assert await running == "rank 1 on there has sent nothing for 1.2 s"
        assert not scene.events.has_died


async def test_a_refused_gateway_does_not_take_the_engine_for_dead(here: Scene) -> None:
    async with here.linked() as (_, end, running):
        refused = codec.error_to_wire(InvalidRequest("what came cannot be read"))
        end.send(node_pb2.NodeMessage(refused=refused).SerializeToString())
        assert await running == "what came cannot be read"
        assert here.events.has_died is False


@pytest.mark.parametrize("lives", ["node", "both", "neither", "engine"])
@pytest.mark.parametrize("way", WAYS)
async def test_who_still_answers_says_who_has_died(
    certificates: Path, way: str, lives: str
) -> None:
    async with engine(way, certificates) as scene:
        scene.opening = (scene.welcome(), heartbeat(0), step(0))
        async with scene.linked() as (_, end, running):
            await until(lambda: scene.events.tokens)
            if lives in ("node", "neither"):
                await scene.die()
            else:
                end.writer.transport.abort()
            if lives in ("neither", "engine"):
                scene.node.close()
            await running
            assert scene.events.received == ["linked", "outputs", "lost"]
            assert scene.events.has_died is (lives == "node")


async def test_an_engine_takes_nothing_while_it_is_asked_whether_it_has_died(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[tuple[bool, bool | None]] = []

    async def has_ended(_: Member) -> bool:
        reported.append((scene.events.has_ended, scene.events.has_died))
        return True

    monkeypatch.setattr(engine_connection, "has_ended", has_ended)
    async with scene.linked() as (_, end, running):
        end.writer.close()
        await running
    assert reported == [(True, None)] and scene.events.has_died


async def test_an_engine_whose_port_closes_while_it_is_asked_has_died(
    here: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine counts as dead if its port closes during the probe: a connection that was not yet
    accepted is reset."""
    open_socket, answers = engine_stream.open_socket, iter([ConnectionResetError()])

    async def reset_once(member: Member) -> socket.socket:
        for error in answers:
            raise error
        return await open_socket(member)

    async with here.linked() as (_, _, running):
        monkeypatch.setattr(engine_stream, "open_socket", reset_once)
        await here.die()
        await asyncio.wait_for(running, 5)
        assert here.events.has_died is True


async def test_a_killed_node_whose_port_closes_behind_its_engine_has_not_lost_it_alone(
    here: Scene,
) -> None:
    async with here.linked() as (_, _, running):
        place = here.node.sockets[0].getsockname()
        here.node.close()
        with socket.create_server(place) as dying:
            asyncio.get_running_loop().call_later(0.05, dying.close)
            await here.die()
            await asyncio.wait_for(running, 5)
        assert here.events.has_died is False


async def test_a_node_that_does_not_answer_is_not_waited_for(
    here: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(engine_stream, "_open_tcp", never)
    async with here.linked() as (_, _, running):
        await here.die()
        await asyncio.wait_for(running, 5)
        assert here.events.has_died is False


async def test_what_a_dying_engine_said_is_heard_before_its_end(scene: Scene) -> None:
    async with scene.linked() as (_, end, running):
        for index in range(3):
            end.send(step(index, "r" * 50_000))
        end.writer.write(b"\7\0\0\0cut")
        end.writer.close()
        await running
        assert scene.events.received == ["linked", *["outputs"] * 3, "lost"]
        assert scene.events.indices == [0, 1, 2]


UNEVEN = node_pb2.PlainTokens(request_ids=["r"], attempts=[0], indices=[1])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (b"\3\0\0\0\xff\xff\xff", "cannot be read"),
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "little"), "cannot be read: a frame of"),
        (
            node_pb2.NodeMessage(outputs=node_pb2.StepOutputs(tokens=UNEVEN)),
            "columns of tokens do not match",
        ),
    ],
    ids=["no message", "no frame", "no step"],
)
async def test_what_cannot_be_read_is_an_end(
    scene: Scene, words: bytes | node_pb2.NodeMessage, reason: str
) -> None:
    async with scene.linked() as (_, end, running):
        if isinstance(words, bytes):
            end.writer.write(words)
        else:
            end.send(words.SerializeToString())
        assert reason in await running
        assert await end.reader.read() == b""
    assert scene.events.received == ["linked", "lost"] and scene.events.has_died is False


async def test_an_engine_that_does_not_read_costs_no_wait_and_not_all_memory(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_connection, "MAX_UNSENT_BYTES", 12 << 20)
    async with scene.linked() as (connection, end, running):
        sent = [f"{index}" * 100_000 for index in range(10)]
        for text in sent:  # more than a socket buffers, less than the limit
            connection.cancel(text, 0)
        for text in sent:
            got = node_pb2.GatewayMessage.FromString(await end.receive()).cancel
            assert got.request_id == text
        end.writer.transport.pause_reading()
        for _ in range(400):
            connection.cancel("r" * 100_000, 0)
        assert await running == "the engine does not read its messages"
        assert scene.events.has_died is False
        connection.cancel("r", 0)  # not sent anywhere


async def test_a_message_that_its_hearer_fails_on_costs_no_other(here: Scene) -> None:
    failed: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    here.events.fails_on = 1
    async with here.linked() as (_, end, running):
        end.send(*map(step, range(3)))
        await until(lambda: here.events.indices == [0, 2])
        assert not running.done()
    assert [type(context["exception"]) for context in failed] == [ZeroDivisionError]  # type: ignore[index]


async def test_a_gateway_that_is_cancelled_hangs_up(scene: Scene) -> None:
    async with scene.linked() as (_, end, running):
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert scene.events.received == ["linked", "lost"]
        assert (scene.events.reason, scene.events.has_died) == ("closed by the gateway", False)
        with suppress(ConnectionError):
            assert await end.reader.read() == b""


async def test_a_gateway_that_is_cancelled_while_it_dials_leaves_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = asyncio.Event()

    async def listen(end: EngineEnd) -> None:
        reached.set()
        await end.reader.read()
        raise ConnectionError

    monkeypatch.setattr(scene.door, "_handshake", listen)
    before = num_open_files()
    running = asyncio.create_task(scene.connection().run())
    await reached.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: num_open_files() <= before)
    assert scene.events.received == []
