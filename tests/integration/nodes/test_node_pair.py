"""A prefill and a decode node as processes with a tiny model: hand-offs, cancels, deaths,
shutdowns.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from deployments import marked_processes
from node_driver import (
    OUR_MARK,
    NodeProcess,
    Session,
    health,
    launch,
    ledgers,
    members,
    session,
    wait_idle,
    write_tiny_model,
)
from patience import AT_ONCE_S, SOON_S

from baton.cluster.redis_server import RedisServer
from baton.core.engine_config import EngineConfig
from baton.core.errors import NodeLost
from baton.core.membership import Member, Role
from baton.core.request.request import Request, Ticket
from baton.core.request.sampling_params import SamplingParams
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.execution.runner import ModelRunner
from baton.engine.kv.generations import Generations
from baton.engine.kv.limits import EngineLimits
from baton.engine.model import fingerprint

NUM_BLOCKS = 256


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(folder)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with RedisServer.start() as redis:
        yield redis.url


@dataclass
class Nodes:
    prefill: NodeProcess
    decode: NodeProcess
    redis_url: str


@pytest.fixture(scope="module")
def nodes(model_dir: Path, redis_url: str) -> Iterator[Nodes]:
    """Both nodes, shared by all tests here; they are ended by different signals, and must leave
    nothing."""
    flags = ("--model", str(model_dir), "--load-format", "dummy")
    flags += ("--num-kv-blocks", str(NUM_BLOCKS))
    pair = [launch(role, redis_url, *flags) for role in (Role.PREFILL, Role.DECODE)]
    try:
        for node in pair:
            assert node.address
        yield Nodes(*pair, redis_url)
        prefill, decode = pair
        pids = prefill.engine_pids() + decode.engine_pids()
        assert len(pids) == 2
        assert decode.end(signal.SIGINT) == 0
        assert prefill.end(signal.SIGKILL) == -signal.SIGKILL
        wait_gone(pids)
        assert not marked_processes(OUR_MARK)
    finally:
        for node in pair:
            if node.process.poll() is None:
                node.end(signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """A zombie has released all resources; its new parent may reap it late."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(pids: list[int], timeout_s: float = SOON_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline_s, "a process is left"
        time.sleep(0.01)


@dataclass
class Gateway:
    """Sessions to both engines."""

    prefill: Session
    decode: Session
    source: str
    puller: str
    source_address: str  # host:port of the engine
    num_requests: int = 0

    def request(self, num_prompt_tokens: int, *, max_tokens: int = 8, **sampling: float) -> Request:
        """A new request; its prompt shares no block with another request's."""
        self.num_requests += 1
        start = 31 * self.num_requests + 7 * num_prompt_tokens
        prompt = tuple((start + i * i) % 256 for i in range(num_prompt_tokens))
        params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling})
        return Request(os.urandom(16).hex(), 0, prompt, params)

    async def hand_off(self, request: Request) -> None:
        ticket = Ticket(request.request_id, self.source, self.puller)
        await self.prefill.dispatch(request, ticket)
        await self.decode.dispatch(request, ticket)

    async def finish(self, request: Request) -> list[int]:
        """Wait for the end on the decode node; returns all tokens."""
        key = request.key
        await self.decode.until(
            lambda: key in self.decode.received and self.decode.received[key].is_over
        )
        assert not self.decode.received[key].error
        # The two sessions are unordered: the source's message may arrive last.
        await self.prefill.until(
            lambda: key in self.prefill.received and bool(self.prefill.received[key].tokens)
        )
        return self.prefill.received[key].tokens + self.decode.received[key].tokens


@asynccontextmanager
async def connected(nodes: Nodes, *, without: str = "") -> AsyncIterator[Gateway]:
    """Sessions to the current engines, once they are linked.

    `without`: an ended engine that the directory may still list.
    """

    def are_there(seen: Sequence[Member]) -> bool:
        return {m.role for m in seen if m.incarnation != without} == {*Role}

    found = await members(nodes.redis_url, are_there)
    by_role = {member.role: member for member in found if member.incarnation != without}
    prefill, decode = by_role[Role.PREFILL], by_role[Role.DECODE]
    async with (
        session(prefill.incarnation) as to_prefill,
        session(decode.incarnation) as to_decode,
    ):

        def is_linked() -> bool:
            return prefill.incarnation in [link.incarnation for link in to_decode.heartbeat.links]

        await to_decode.until(is_linked)
        await to_prefill.until(lambda: to_prefill.num_heartbeats > 0)
        ends = (prefill.incarnation, decode.incarnation, prefill.engine_address)
        yield Gateway(to_prefill, to_decode, *ends)


@pytest.fixture
async def gateway(nodes: Nodes) -> AsyncIterator[Gateway]:
    async with connected(nodes) as gateway:
        yield gateway
    await wait_idle(nodes.prefill.address, nodes.decode.address)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> ModelRunner:
    config = EngineConfig(
        model=str(model_dir), load_format="dummy", device="cpu", num_kv_blocks=NUM_BLOCKS
    )
    return ModelRunner(config)


def single_process_tokens(runner: ModelRunner, request: Request) -> list[int]:
    """The tokens of one engine alone."""
    engine = Engine(
        EngineParts(
            runner,
            EngineLimits(NUM_BLOCKS, 16, max_model_len=runner.max_model_len),
            Generations(NUM_BLOCKS),
            fingerprint=fingerprint.short(runner.fingerprint),
            eos_token_ids=runner.eos_token_ids,
        )
    )
    engine.add(request)
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token.token_id for token in engine.step().tokens]
    return tokens


async def test_handoffs_equal_a_single_process(gateway: Gateway, reference: ModelRunner) -> None:
    requests = [
        gateway.request(1),
        gateway.request(16),
        gateway.request(100, max_tokens=40),
        gateway.request(600, max_tokens=5),
        gateway.request(50, max_tokens=20, temperature=0.8, seed=5, top_p=0.9),
    ]
    for request in requests:
        await gateway.hand_off(request)
    for request in requests:
        assert await gateway.finish(request) == single_process_tokens(reference, request)
    long = gateway.decode.received[requests[3].key]
    (transfer,) = [o.transfer for o in long.outputs if o.HasField("transfer")]
    assert transfer.transport == "shm"
    assert transfer.bytes == 38 * reference.kv.block_bytes  # ceil(600 / 16)
    assert long.events == [
        "handoff_queued",
        "transfer_started",
        "transfer_ended",
        "decode_started",
        "first_decode_ended",
    ]
    assert gateway.prefill.received[requests[3].key].events == [
        "prefill_queued",
        "prefill_started",
        "first_token",
    ]


async def test_welcome_and_heartbeat_describe_the_engine(gateway: Gateway) -> None:
    welcome = gateway.prefill.welcome
    assert welcome is not None
    assert (welcome.incarnation, welcome.role) == (gateway.source, "prefill")
    assert (welcome.num_blocks, welcome.block_size) == (NUM_BLOCKS, 16)
    assert (welcome.vocab_size, welcome.max_model_len) == (256, 2048)
    await gateway.prefill.until(lambda: gateway.prefill.num_heartbeats >= 2)
    assert gateway.prefill.heartbeat.free_blocks == NUM_BLOCKS - 2
    assert gateway.prefill.heartbeat.credit_blocks == (NUM_BLOCKS - 2) // 2


@pytest.mark.parametrize("num_tokens_before", [0, 1, 5])
async def test_cancel_frees_both_nodes_at_once(
    gateway: Gateway, nodes: Nodes, num_tokens_before: int
) -> None:
    request = gateway.request(700, max_tokens=1000)
    await gateway.hand_off(request)

    def has_tokens() -> bool:
        received = gateway.decode.received.get(request.key)
        return received is not None and len(received.tokens) >= num_tokens_before

    if num_tokens_before:
        await gateway.decode.until(has_tokens)
    await gateway.prefill.cancel(request)
    await gateway.decode.cancel(request)
    cancelled_s = time.monotonic()
    await wait_idle(nodes.prefill.address, nodes.decode.address)
    assert time.monotonic() - cancelled_s < AT_ONCE_S


async def test_end_of_the_stream_cancels_its_requests(nodes: Nodes) -> None:
    async with connected(nodes) as gateway:
        request = gateway.request(100, max_tokens=1000)
        await gateway.hand_off(request)
        await gateway.decode.until(lambda: request.key in gateway.decode.received)
    await wait_idle(nodes.prefill.address, nodes.decode.address, timeout_s=SOON_S)


async def test_strangers_are_refused(gateway: Gateway, nodes: Nodes) -> None:
    for at in (None, gateway.source_address):
        async with session(gateway.source, "wrong", at=at) as stranger:
            await stranger.until(lambda: stranger.ended is not None)
            assert isinstance(stranger.ended, NodeLost)
            assert "hung up" in str(stranger.ended)
        async with session(gateway.source, at=at) as known:
            await known.until(lambda: known.welcome is not None)
    async with session("0" * 32) as lost:
        assert isinstance(lost.ended, ConnectionRefusedError)
    async with session("0" * 32, at=gateway.source_address) as lost:
        assert isinstance(lost.ended, NodeLost)


async def test_crafted_ticket_is_refused(gateway: Gateway) -> None:
    request = gateway.request(20)
    ticket = Ticket(request.request_id, "0" * 32, gateway.puller)
    await gateway.prefill.dispatch(request, ticket)
    await gateway.prefill.until(lambda: request.key in gateway.prefill.received)
    assert gateway.prefill.received[request.key].error == "unknown_transfer"


async def test_paused_engine_is_not_ready_and_comes_back(gateway: Gateway, nodes: Nodes) -> None:
    (pid,) = nodes.prefill.engine_pids()
    async with health(nodes.prefill.address) as become, asyncio.timeout(10):
        await become(True)
        os.kill(pid, signal.SIGSTOP)
        try:
            await become(False)
        finally:
            os.kill(pid, signal.SIGCONT)
        await become(True)
    request = gateway.request(40)
    await gateway.hand_off(request)
    assert len(await gateway.finish(request)) == 8


@pytest.mark.parametrize("name", ["decode", "prefill"])
async def test_killed_engine_ends_its_streams_and_is_replaced(
    nodes: Nodes, reference: ModelRunner, name: str
) -> None:
    node: NodeProcess = getattr(nodes, name)
    async with connected(nodes) as gateway, health(node.address) as become:
        await become(True)
        request = gateway.request(100, max_tokens=1500)
        await gateway.hand_off(request)
        await gateway.decode.until(lambda: request.key in gateway.decode.received)
        (pid,) = node.engine_pids()
        killed = gateway.puller if name == "decode" else gateway.source
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        await become(False)
        stream = getattr(gateway, name)
        await stream.until(lambda: stream.ended is not None)
        assert isinstance(stream.ended, NodeLost)
        assert time.monotonic() - killed_s < AT_ONCE_S
        if name == "decode":  # its source detects the lost link, with no lease to wait for
            await wait_idle(nodes.prefill.address, timeout_s=SOON_S)
        async with asyncio.timeout(30):
            await become(True)
    async with connected(nodes, without=killed) as gateway:
        request = gateway.request(100)
        await gateway.hand_off(request)
        assert await gateway.finish(request) == single_process_tokens(reference, request)
    await wait_idle(nodes.prefill.address, nodes.decode.address)


async def test_ledger_of_both_nodes_names_the_peer(gateway: Gateway, nodes: Nodes) -> None:
    (source,) = await ledgers(nodes.prefill.address)
    (puller,) = await ledgers(nodes.decode.address)
    assert source["peers"] == {gateway.puller: "matched"}
    assert puller["peers"] == {gateway.source: "ready"}


async def test_ledger_of_both_nodes_names_who_is_linked(gateway: Gateway, nodes: Nodes) -> None:
    (source,) = await ledgers(nodes.prefill.address)
    (puller,) = await ledgers(nodes.decode.address)
    assert source["links"]["puller"] == source["links"]["source"] == [gateway.puller]
    assert puller["links"]["source"] == puller["links"]["puller"] == [gateway.source]
    assert len(source["links"]["gateway"]) == len(puller["links"]["gateway"]) == 1


def test_start_failures_are_told_in_words(model_dir: Path, redis_url: str) -> None:
    """A failed start prints an error without traceback and exits with 1; all cases run at once,
    since each has to load torch."""
    dummy = ("--model", str(model_dir), "--load-format", "dummy")
    expected = {
        ("--host", "192.0.2.1", "--insecure-bind", *dummy): "cannot listen on 192.0.2.1:0",
        ("--model", "/nowhere"): "there is no model directory /nowhere",
        ("--max-model-len", "100000", *dummy): "--max-model-len 100000",
    }
    started = [launch(Role.PREFILL, redis_url, *flags) for flags in expected]
    for node, words in zip(started, expected.values(), strict=True):
        assert node.wait() == 1
        assert any(line.startswith(f"error: {words}") for line in node.printed)
        assert not any("Traceback" in line for line in node.printed)


@pytest.fixture
def crowded(model_dir: Path, redis_url: str) -> Iterator[tuple[NodeProcess, int]]:
    """A node with two engines, and the port it was configured with, which is taken."""
    flags = ("--model", str(model_dir), "--load-format", "dummy", "--num-engines", "2")
    flags += ("--num-kv-blocks", str(NUM_BLOCKS), "--name", "n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        node = launch(Role.DECODE, redis_url, "--port", str(port), *flags)
        try:
            yield node, port
        finally:
            if node.process.poll() is None:
                node.end(signal.SIGTERM)


def test_a_node_whose_port_is_taken_says_so_and_takes_another(
    crowded: tuple[NodeProcess, int],
) -> None:
    """A process on the node's port cannot impersonate it, and must not keep the node from
    starting."""
    node, port = crowded
    assert not node.address.endswith(f":{port}")
    assert any(f"cannot listen on 127.0.0.1:{port}" in line for line in node.printed)


async def test_sigterm_lets_what_runs_finish(
    crowded: tuple[NodeProcess, int], redis_url: str, reference: ModelRunner
) -> None:
    """Each of two engines drains by itself, then the node ends. All processes of the node get the
    signal, as systemd and timeout(1) send it."""
    node, _ = crowded
    found = await members(redis_url, lambda seen: sum(m.name[0] == "n" for m in seen) == 2)
    ours = [member for member in found if member.name in ("n.0", "n.1")]
    async with (
        session(ours[0].incarnation) as busy,
        session(ours[1].incarnation) as idle,
    ):
        await busy.until(lambda: busy.num_heartbeats > 0)
        request, late = (
            Request(name * 32, 0, (1, 2, 3), SamplingParams(max_tokens=600, temperature=0.0))
            for name in "ab"
        )
        await busy.dispatch(request, None)
        await busy.until(lambda: request.key in busy.received)
        os.killpg(node.process.pid, signal.SIGTERM)
        await idle.until(lambda: idle.ended is not None)
        await busy.until(lambda: busy.heartbeat.is_draining)
        await busy.dispatch(late, None)
        await busy.until(lambda: busy.received[request.key].is_over)
        await busy.until(lambda: late.key in busy.received)
    expected = single_process_tokens(reference, request)
    assert busy.received[request.key].tokens == expected
    assert busy.received[late.key].error == "unavailable"
    assert node.wait() == 0
    assert "draining" in node.printed
