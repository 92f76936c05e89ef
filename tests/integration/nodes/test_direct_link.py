"""Links to engines of the gateway's host, on real nodes: what passes directly, how that ends."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from node_driver import SECRET, NodeProcess, launch, ledgers, members, wait_idle, write_tiny_model
from patience import SOON_S

from baton.cluster.redis_server import RedisServer
from baton.cluster.secret import ClusterSecret
from baton.core.membership import Member, Role
from baton.core.ports import SystemClock
from baton.core.request.request import Request, SamplingParams, Ticket
from baton.gateway.engines import direct_channel as direct_way
from baton.gateway.engines import node_link
from baton.gateway.engines.engine_table import ReportedLoad
from baton.gateway.engines.node_clock import NodeClock
from baton.gateway.engines.node_link import NodeLink
from baton.gateway.request.engine_link import EngineOutput, PlainToken, Work
from baton.proto.v1 import node_pb2

PATIENCE_S = 10.0


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
    """node_link.LinkEvents. `tokens` are a request's, which must come without gap or double."""

    load: ReportedLoad | None = None
    tokens: list[int] = field(default_factory=list)
    first_index: int = 0
    is_over: bool = False
    lost_by: list[tuple[str, bool]] = field(default_factory=list)  # reason, has_died

    def linked(self, link: NodeLink) -> None: ...

    def heartbeat(self, link: NodeLink, load: ReportedLoad) -> None:
        self.load = load

    def outputs(
        self, link: NodeLink, outputs: Sequence[EngineOutput], tokens: Sequence[PlainToken]
    ) -> None:
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

    def lost(self, link: NodeLink, reason: str, *, has_died: bool) -> None:
        self.lost_by.append((reason, has_died))


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@dataclass
class Linked:
    """One gateway: a link to the prefill engine and one to the decode engine."""

    links: list[NodeLink]
    events: list[Events]

    def start(self, max_tokens: int = 8) -> None:
        """Dispatch a request to both; only one at a time."""
        for events, first_index in zip(self.events, (0, 1), strict=True):
            events.tokens, events.first_index, events.is_over = [], first_index, False
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        prompt = tuple((7 + i * i) % 256 for i in range(100))
        request = Request(secrets.token_hex(16), 0, prompt, sampling)
        prefill, decode = (link.member.incarnation for link in self.links)
        ticket = Ticket(request.request_id, prefill, decode)
        for link, work in zip(self.links, (Work.PREFILL, Work.DECODE), strict=True):
            link.dispatch(request, work, ticket, 30.0)

    async def generate(self) -> list[int]:
        self.start()
        await until(lambda: self.events[1].is_over)
        return self.events[0].tokens + self.events[1].tokens


@asynccontextmanager
async def gateway(redis_url: str, *, without: str = "") -> AsyncIterator[Linked]:
    """`without`: an engine that has ended, as the directory will know soon."""

    def are_all_there(seen: Sequence[Member]) -> bool:
        return {m.role for m in seen if m.incarnation != without} == {*Role}

    found = [m for m in await members(redis_url, are_all_there) if m.incarnation != without]
    by_role: dict[Role, Member] = {member.role: member for member in found}
    events = [Events(), Events()]
    ends = [by_role[Role.PREFILL], by_role[Role.DECODE]]
    links = [
        NodeLink(member, ClusterSecret(SECRET), each, SystemClock(), 1.2)
        for member, each in zip(ends, events, strict=True)
    ]
    running = [asyncio.create_task(link.run()) for link in links]
    try:
        await until(lambda: events[0].load and events[1].load and events[1].load.links)
        yield Linked(links, events)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def ways(nodes: Sequence[NodeProcess]) -> list[list[str]]:
    """How each node's engine speaks with its gateways."""
    found = [(await ledgers(node.address))[0]["gateway_ways"] for node in nodes]
    return [sorted(of_engine.values()) for of_engine in found]


async def test_messages_pass_directly_and_tokens_are_those_of_the_stream(
    nodes: list[NodeProcess], redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_channel(welcome: node_pb2.Welcome) -> None:
        return None

    with monkeypatch.context() as patch:
        patch.setattr(node_link, "open_direct", no_channel)
        async with gateway(redis_url) as linked:
            expected = await linked.generate()
            assert await ways(nodes) == [["link"], ["link"]]
    assert len(expected) == 8
    on_streams: list[node_pb2.StepOutputs] = []
    hear = NodeLink._hear_directly

    def count(step: node_pb2.StepOutputs, clock: NodeClock) -> Any:
        on_streams.append(step)
        return from_wire(step, clock)

    def uncount(link: NodeLink, message: node_pb2.NodeMessage) -> None:
        hear(link, message)
        on_streams.pop()

    from_wire = node_link._step_from_wire
    monkeypatch.setattr(node_link, "_step_from_wire", count)
    monkeypatch.setattr(NodeLink, "_hear_directly", uncount)
    async with gateway(redis_url) as first, gateway(redis_url) as second:
        assert await ways(nodes) == [["direct"] * 2] * 2
        found = await asyncio.gather(first.generate(), second.generate())
        assert found == [expected] * 2
        assert not on_streams
        assert all(link._outgoing.empty() for link in (*first.links, *second.links))
    await wait_idle(*(node.address for node in nodes))
    assert await ways(nodes) == [[], []]


async def test_cancel_and_a_gateway_s_end_free_the_engines(
    nodes: list[NodeProcess], redis_url: str
) -> None:
    async with gateway(redis_url) as linked:
        linked.start(max_tokens=1000)
        await until(lambda: len(linked.events[1].tokens) > 5)
    await wait_idle(*(node.address for node in nodes), timeout_s=SOON_S)


async def test_a_channel_that_breaks_ends_its_link_and_no_other(
    nodes: list[NodeProcess], redis_url: str
) -> None:
    async with gateway(redis_url) as other, gateway(redis_url) as linked:
        linked.start(max_tokens=1000)
        await until(lambda: len(linked.events[1].tokens) > 5)
        direct = linked.links[1]._direct
        assert direct is not None
        direct._channel._socket.shutdown(socket.SHUT_RDWR)
        await until(lambda: linked.events[1].lost_by)
        ((reason, has_died),) = linked.events[1].lost_by
        assert reason.startswith("UNAVAILABLE: ") and not has_died  # as the stream says
        assert not linked.events[0].lost_by
        assert len(await other.generate()) == 8
        assert not other.events[1].lost_by
    async with gateway(redis_url) as again:
        assert len(await again.generate()) == 8
    await wait_idle(*(node.address for node in nodes))


async def test_a_gateway_that_stands_still_holds_up_nobody(
    nodes: list[NodeProcess], redis_url: str
) -> None:
    """It reads nothing; what it left unread is there when it goes on."""
    async with gateway(redis_url) as other, gateway(redis_url) as linked:
        linked.start(max_tokens=600)
        await until(lambda: len(linked.events[1].tokens) > 5)
        direct = linked.links[1]._direct
        assert direct is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(direct._channel.fileno())
        assert len(await other.generate()) == 8
        await wait_idle(*(node.address for node in nodes), timeout_s=20.0)
        loop.add_reader(direct._channel.fileno(), direct._read)
        await until(lambda: linked.events[1].is_over)
        assert len(linked.events[1].tokens) == 599


async def test_a_supervisor_that_stands_still_ends_the_link_and_the_engine_is_free(
    nodes: list[NodeProcess], redis_url: str
) -> None:
    async with gateway(redis_url) as linked:
        linked.start(max_tokens=1500)
        await until(lambda: len(linked.events[1].tokens) > 5)
        os.kill(nodes[1].process.pid, signal.SIGSTOP)
        try:
            await until(lambda: linked.events[1].lost_by)
        finally:
            os.kill(nodes[1].process.pid, signal.SIGCONT)
        assert [has_died for _, has_died in linked.events[1].lost_by] == [False]
    await wait_idle(*(node.address for node in nodes))
    async with gateway(redis_url) as again:
        assert len(await again.generate()) == 8


async def test_an_engine_that_does_not_accept_is_spoken_with_over_its_node(
    nodes: list[NodeProcess], redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_way, "ACCEPT_TIMEOUT_S", 0.0)
    async with gateway(redis_url) as linked:
        assert len(await linked.generate()) == 8
        assert await ways(nodes) == [["link"], ["link"]]
    await wait_idle(*(node.address for node in nodes))


async def test_an_engine_that_is_killed_has_said_all_that_it_said(
    nodes: list[NodeProcess], redis_url: str
) -> None:
    async with gateway(redis_url) as linked:
        linked.start(max_tokens=1500)
        await until(lambda: len(linked.events[1].tokens) > 5)
        (pid,) = nodes[1].engine_pids()
        os.kill(pid, signal.SIGKILL)
        await until(lambda: linked.events[1].lost_by)
        assert linked.events[1].lost_by == [("its process ended", True)]
        assert len(linked.events[1].tokens) > 5  # without a gap: Events looks at each
        killed = linked.links[1].member.incarnation
    async with gateway(redis_url, without=killed) as again:
        assert len(await again.generate()) == 8
        assert await ways(nodes) == [["direct"], ["direct"]]
    await wait_idle(*(node.address for node in nodes))
