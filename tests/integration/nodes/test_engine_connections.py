"""A gateway's connections to real engines, by unix sockets and TCP: messages, and how connections
end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from node_driver import (
    CLUSTER,
    SECRET,
    NodeProcess,
    health,
    launch,
    ledgers,
    members,
    session,
    wait_idle,
    write_tiny_model,
)
from patience import AT_ONCE_S, SOON_S

from baton.cluster.redis_client import RedisClient
from baton.cluster.redis_server import RedisServer
from baton.cluster.secret import ClusterSecret
from baton.core.membership import Member, Role
from baton.core.ports import Clock
from baton.core.request.request import Request, Ticket
from baton.core.request.sampling_params import SamplingParams
from baton.gateway.engines.engine_connection import EngineConnection, Receive
from baton.gateway.engines.reported_load import ReportedLoad
from baton.gateway.request.engine_link import EngineOutput, PlainToken
from baton.prefix_index.pages import decode_contents
from baton.prefix_index.redis_link import RedisIndexLink

PATIENCE_S = 10.0
SILENCE_S = 1.2  # the gateway's limit
NOTICED_S = 1.5
ELSEWHERE = "f" * 32  # the id of another host: such an engine is dialled by TCP
BOTH_WAYS = pytest.mark.parametrize("by_tcp", [False, True], ids=["unix", "tcp"])
ONE_WAY = pytest.mark.parametrize(
    "by_tcp", [pytest.param(False, id="unix", marks=pytest.mark.slow), pytest.param(True, id="tcp")]
)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with RedisServer.start() as redis:
        yield redis.url


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[list[NodeProcess]]:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    flags = ("--model", str(folder), "--load-format", "dummy", "--num-kv-blocks", "256")
    pair = [launch(role, redis_url, *flags) for role in (Role.PREFILL, Role.DECODE)]
    try:
        for node in pair:
            assert node.address
        yield pair
    finally:
        for node in pair:
            node.end(signal.SIGKILL)


@dataclass
class Events:
    """ConnectionEvents. `tokens`: a request's tokens, which must come without gap or repetition."""

    load: ReportedLoad | None = None
    tokens: list[int] = field(default_factory=list)
    first_index: int = 0
    is_over: bool = False
    lost_by: list[tuple[str, bool]] = field(default_factory=list)  # reason, has_died

    def linked(self, engine: EngineConnection, welcome: object, load: ReportedLoad) -> Receive:
        self.load = load
        return self.receive

    def heartbeat(self, engine: EngineConnection, load: ReportedLoad) -> None:
        self.load = load

    def receive(self, outputs: Sequence[EngineOutput], tokens: Sequence[PlainToken]) -> None:
        assert not self.lost_by
        for _, _, index, token_id in tokens:
            self._take(index, (token_id,))
        for output in outputs:
            assert output.error is None
            self._take(output.first_index, output.token_ids)
            self.is_over |= output.finish_reason is not None

    def _take(self, index: int, token_ids: Sequence[int]) -> None:
        if token_ids:
            assert index == self.first_index + len(self.tokens)
            self.tokens += token_ids

    def ended(self, engine: EngineConnection) -> None: ...

    def lost(self, engine: EngineConnection, reason: str, *, has_died: bool) -> None:
        self.lost_by.append((reason, has_died))


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@dataclass
class Linked:
    """One gateway: a connection to the prefill engine and one to the decode engine."""

    engines: list[EngineConnection]
    events: list[Events]

    def start(self, max_tokens: int = 8) -> None:
        """Dispatch a request to both engines; only one at a time."""
        for events, first_index in zip(self.events, (0, 1), strict=True):
            events.tokens, events.first_index, events.is_over = [], first_index, False
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        prompt = tuple((7 + i * i) % 256 for i in range(100))
        request = Request(secrets.token_hex(16), 0, prompt, sampling)
        prefill, decode = (engine.member.incarnation for engine in self.engines)
        ticket = Ticket(request.request_id, prefill, decode)
        for engine in self.engines:
            engine.dispatch(request, ticket, 30.0)

    async def generate(self) -> list[int]:
        self.start()
        await until(lambda: self.events[1].is_over)
        return self.events[0].tokens + self.events[1].tokens

    def socket(self) -> socket.socket:
        """The gateway's socket of the connection to the decode engine."""
        transport = self.engines[1]._stream.transport
        assert transport is not None
        found: socket.socket = transport.get_extra_info("socket")
        return found


@asynccontextmanager
async def gateway(
    redis_url: str, *, by_tcp: bool = False, without: str = "", silence_s: float = SILENCE_S
) -> AsyncIterator[Linked]:
    """A linked gateway. `without`: an ended engine that the directory may still list."""

    def are_all_there(seen: Sequence[Member]) -> bool:
        return {m.role for m in seen if m.incarnation != without} == {*Role}

    found = [m for m in await members(redis_url, are_all_there) if m.incarnation != without]
    by_role: dict[Role, Member] = {member.role: member for member in found}
    events = [Events(), Events()]
    ends = [by_role[Role.PREFILL], by_role[Role.DECODE]]
    if by_tcp:
        ends = [dataclasses.replace(member, host_id=ELSEWHERE) for member in ends]
    engines = [
        EngineConnection(member, ClusterSecret(SECRET), each, Clock(), silence_s)
        for member, each in zip(ends, events, strict=True)
    ]
    running = [asyncio.create_task(engine.run()) for engine in engines]
    try:
        await until(lambda: events[0].load and events[1].load and events[1].load.links)
        linked = Linked(engines, events)
        assert (linked.socket().family == socket.AF_INET) == by_tcp
        yield linked
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def num_gateways(nodes: Sequence[NodeProcess]) -> list[int]:
    """The number of gateways linked with each node's engine."""
    return [len((await ledgers(node.address))[0]["links"]["gateway"]) for node in nodes]


async def test_tokens_are_the_same_by_both_ways(nodes: list[NodeProcess], redis_url: str) -> None:
    async with gateway(redis_url) as near, gateway(redis_url, by_tcp=True) as far:
        assert await num_gateways(nodes) == [2, 2]
        expected = await near.generate()
        assert len(expected) == 8
        assert await asyncio.gather(near.generate(), far.generate()) == [expected] * 2
    await wait_idle(*(node.address for node in nodes))
    assert await num_gateways(nodes) == [0, 0]


@BOTH_WAYS
async def test_a_gateway_s_end_frees_the_engines(
    nodes: list[NodeProcess], redis_url: str, by_tcp: bool
) -> None:
    async with gateway(redis_url, by_tcp=by_tcp) as linked:
        linked.start(max_tokens=1000)
        await until(lambda: len(linked.events[1].tokens) > 5)
    await wait_idle(*(node.address for node in nodes), timeout_s=SOON_S)


@BOTH_WAYS
async def test_a_channel_that_breaks_ends_its_link_and_no_other(
    nodes: list[NodeProcess], redis_url: str, by_tcp: bool
) -> None:
    async with gateway(redis_url) as other, gateway(redis_url, by_tcp=by_tcp) as linked:
        linked.start(max_tokens=1000)
        await until(lambda: len(linked.events[1].tokens) > 5)
        linked.socket().shutdown(socket.SHUT_RDWR)
        await until(lambda: linked.events[1].lost_by)
        assert [has_died for _, has_died in linked.events[1].lost_by] == [False]
        assert not linked.events[0].lost_by
        assert len(await other.generate()) == 8
        assert not other.events[1].lost_by
    async with gateway(redis_url, by_tcp=by_tcp) as again:
        assert len(await again.generate()) == 8
    await wait_idle(*(node.address for node in nodes))


@BOTH_WAYS
async def test_a_gateway_that_stands_still_holds_up_nobody(
    nodes: list[NodeProcess], redis_url: str, by_tcp: bool
) -> None:
    """A gateway that stops reading delays no other; the unread data is there when it continues."""
    async with (
        gateway(redis_url) as other,
        gateway(redis_url, by_tcp=by_tcp, silence_s=60.0) as linked,
    ):
        linked.start(max_tokens=600)
        await until(lambda: len(linked.events[1].tokens) > 5)
        transport = linked.engines[1]._stream.transport
        assert isinstance(transport, asyncio.ReadTransport)
        transport.pause_reading()
        assert len(await other.generate()) == 8
        await wait_idle(*(node.address for node in nodes), timeout_s=20.0)
        assert len(linked.events[1].tokens) < 599
        transport.resume_reading()
        await until(lambda: linked.events[1].is_over)
        assert len(linked.events[1].tokens) == 599


@ONE_WAY
async def test_a_supervisor_that_stands_still_is_of_no_matter_to_streams(
    nodes: list[NodeProcess], redis_url: str, by_tcp: bool
) -> None:
    async with gateway(redis_url, by_tcp=by_tcp) as linked:
        with stopped(nodes[0].process.pid), stopped(nodes[1].process.pid):
            began_s = time.monotonic()
            while time.monotonic() - began_s < 2 * SILENCE_S:
                assert len(await linked.generate()) == 8
            async with gateway(redis_url, by_tcp=by_tcp) as newcomer:
                assert len(await newcomer.generate()) == 8
        assert [events.lost_by for events in linked.events] == [[], []]
    await wait_idle(*(node.address for node in nodes))


@BOTH_WAYS
async def test_an_engine_that_hangs_is_noticed(
    nodes: list[NodeProcess], redis_url: str, by_tcp: bool
) -> None:
    async with gateway(redis_url, by_tcp=by_tcp) as linked:
        linked.start(max_tokens=1500)
        await until(lambda: len(linked.events[1].tokens) > 5)
        (pid,) = nodes[1].engine_pids()
        with stopped(pid):
            began_s = time.monotonic()
            await until(lambda: linked.events[1].lost_by)
            assert time.monotonic() - began_s < NOTICED_S
        assert linked.events[1].lost_by == [(f"no heartbeat for {SILENCE_S:g} s", False)]
        assert not linked.events[0].lost_by
    await wait_idle(*(node.address for node in nodes))
    async with gateway(redis_url, by_tcp=by_tcp) as again:
        assert len(await again.generate()) == 8


@BOTH_WAYS
async def test_an_engine_that_is_killed_has_said_all_that_it_said(
    nodes: list[NodeProcess], redis_url: str, by_tcp: bool
) -> None:
    async with (
        gateway(redis_url, by_tcp=by_tcp) as linked,
        health(nodes[1].address) as become,
    ):
        await become(True)
        linked.start(max_tokens=1500)
        await until(lambda: len(linked.events[1].tokens) > 5)
        (pid,) = nodes[1].engine_pids()
        os.kill(pid, signal.SIGKILL)
        began_s = time.monotonic()
        await until(lambda: linked.events[1].lost_by)
        assert time.monotonic() - began_s < AT_ONCE_S
        ((reason, has_died),) = linked.events[1].lost_by
        assert has_died, reason
        assert len(linked.events[1].tokens) > 5  # Events checks that there is no gap
        assert not linked.events[0].lost_by
        killed = linked.engines[1].member.incarnation
        async with asyncio.timeout(30):
            await become(False)
            await become(True)
    async with gateway(redis_url, by_tcp=by_tcp, without=killed) as again:
        assert len(await again.generate()) == 8
    await wait_idle(*(node.address for node in nodes))


async def test_a_supervisor_that_stops_alone_costs_its_engine_nothing(
    tmp_path: Path, redis_url: str
) -> None:
    """A stopped supervisor does not disturb its engine, whose socket buffers some hundred unread
    heartbeats. Blocks cached meanwhile are in the ledger and the index once it continues."""
    flags = ("--model", str(write_tiny_model(tmp_path)), "--load-format", "dummy")
    own = ("--heartbeat-s", "0.01", "--num-kv-blocks", "256", "--name", "alone")
    node = launch(Role.DECODE, redis_url, *flags, *own)
    try:
        assert node.address
        found = await members(redis_url, lambda them: any(m.name == "alone" for m in them))
        (incarnation,) = [m.incarnation for m in found if m.name == "alone"]
        async with session(incarnation) as engine:
            with stopped(node.process.pid):
                num_before = engine.num_heartbeats
                await engine.until(lambda: engine.num_heartbeats > num_before + 800)
                for first in range(4):
                    prompt = tuple(range(first, first + 200))
                    request = Request(f"r{first}", 0, prompt, SamplingParams(max_tokens=4))
                    await engine.dispatch(request, None)
                    await engine.until(lambda key=request.key: key in engine.received)  # type: ignore[misc]
                    received = engine.received[request.key]
                    await engine.until(lambda received=received: received.is_over)  # type: ignore[misc]
                    assert len(received.tokens) == 4
            redis = RedisClient(redis_url, CLUSTER, ClusterSecret(SECRET))
            link, num_cached = RedisIndexLink(redis), 0
            async with asyncio.timeout(PATIENCE_S):
                while num_cached < 4 * (200 // 16):
                    packed = await link.read_contents(incarnation)
                    num_cached = decode_contents(packed, incarnation).device_blocks
            await redis.close()
            await wait_idle(node.address)
            (ledger,) = await ledgers(node.address)
            assert ledger["blocks"]["cached"] == num_cached
    finally:
        node.end(signal.SIGKILL)
