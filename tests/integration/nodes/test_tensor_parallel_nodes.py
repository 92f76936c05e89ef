"""Nodes whose engines have several ranks: hand-offs between equal and unequal ones, and a lost
rank.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from deployments import marked_processes
from engines.generation import outputs_of
from fakes.ranks.linked_nodes import Nodes, connected, request_of, wait_for_no_process
from node_driver import OUR_MARK, NodeProcess, health, launch, wait_idle, write_tiny_model

from baton.cluster.redis_server import RedisServer
from baton.core.engine_config import EngineConfig
from baton.core.errors import BatonError
from baton.core.membership import Role
from baton.core.request.request import Request
from baton.engine.execution.runner import ModelRunner
from baton.engine.local import LocalEngine

NUM_BLOCKS = 256


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(folder, vocab_size=253)


@pytest.fixture(scope="module")
def nodes(model_dir: Path) -> Iterator[Nodes]:
    flags = ("--model", str(model_dir), "--load-format", "dummy", "--rank-timeout-s", "1.5")
    flags += ("--num-kv-blocks", str(NUM_BLOCKS))
    with RedisServer.start() as redis:
        pair = [
            launch(role, redis.url, *flags, "--tp", "2") for role in (Role.PREFILL, Role.DECODE)
        ]
        try:
            yield Nodes(*pair, redis.url, flags)
            prefill, decode = pair
            assert decode.end(signal.SIGINT) == 0
            assert prefill.end(signal.SIGKILL) == -signal.SIGKILL
            wait_for_no_process()
        finally:
            for node in pair:
                if node.process.poll() is None:
                    node.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> LocalEngine:
    config = EngineConfig(
        model=str(model_dir), load_format="dummy", device="cpu", num_kv_blocks=NUM_BLOCKS
    )
    return LocalEngine(config, ModelRunner(config))


def expected_of(reference: LocalEngine, request: Request) -> list[int]:
    return outputs_of(reference, [request])[request.key]


async def test_handoffs_between_ranks_equal_one_process(
    nodes: Nodes, reference: LocalEngine
) -> None:
    requests = [
        request_of(1),
        request_of(100, max_tokens=30),
        request_of(600, max_tokens=5),
        request_of(50, max_tokens=20, temperature=0.8, seed=5, top_p=0.9),
        request_of(50, max_tokens=20, temperature=0.8, seed=6, repetition_penalty=1.2),
    ]
    async with connected(nodes) as pair:
        for request in requests:
            await pair.hand_off(request)
        for request in requests:
            assert await pair.finish(request) == expected_of(reference, request)
        outputs = pair.decode.received[requests[2].key].outputs
        (transfer,) = [output.transfer for output in outputs if output.HasField("transfer")]
        assert transfer.transport == "shm"
        # ceil(600 / 16) blocks, of which each rank has one of the two KV heads
        assert transfer.bytes == 38 * reference.runner.kv.block_bytes
    await wait_idle(nodes.prefill.address, nodes.decode.address)


async def test_cancel_in_a_handoff_frees_both_sides(nodes: Nodes) -> None:
    async with connected(nodes) as pair:
        request = request_of(900, max_tokens=500)
        await pair.hand_off(request)
        await pair.prefill.until(lambda: request.key in pair.prefill.received)
        await pair.prefill.cancel(request)
        await pair.decode.cancel(request)
        await wait_idle(nodes.prefill.address, nodes.decode.address, timeout_s=2.0)


def follower_pid(node: NodeProcess) -> int:
    (engine,) = node.engine_pids()
    (pid,) = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    return int(pid)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("decode", signal.SIGKILL),
        pytest.param("prefill", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
async def test_a_lost_rank_takes_its_engine_down_and_it_comes_back(
    nodes: Nodes, reference: LocalEngine, name: str, number: signal.Signals
) -> None:
    node: NodeProcess = getattr(nodes, name)
    async with connected(nodes) as pair, health(node.address) as become:
        await become(True)
        victim, stream = follower_pid(node), getattr(pair, name)
        lost = stream.welcome.incarnation
        os.kill(victim, number)
        request = request_of(60, max_tokens=1500)
        await stream.dispatch(request, None)
        begin_s = time.monotonic()
        await stream.until(lambda: stream.ended is not None)
        assert time.monotonic() - begin_s < 4.0
        async with asyncio.timeout(30):
            await become(False)
            await become(True)
    what = "rank 1 ended" if number == signal.SIGKILL else "rank 1 has not answered"
    assert isinstance(stream.ended, BatonError)
    assert stream.ended.message.startswith(what)
    assert any(line.startswith(f"engine lost: {what}") for line in node.printed)
    assert victim not in marked_processes(OUR_MARK)
    async with connected(nodes, without=lost) as pair:
        request = request_of(100)
        await pair.hand_off(request)
        assert await pair.finish(request) == expected_of(reference, request)
    await wait_idle(nodes.prefill.address, nodes.decode.address)


@pytest.mark.slow
def test_a_rank_that_hangs_while_it_loads_is_named(model_dir: Path) -> None:
    flags = ("--model", str(model_dir), "--load-format", "dummy", "--tp", "2")
    with RedisServer.start() as redis:
        node = launch(Role.DECODE, redis.url, *flags, "--rank-start-timeout-s", "2")
        try:
            deadline_s = time.monotonic() + 20
            while (pid := starting_follower(node)) is None:
                assert time.monotonic() < deadline_s, "there is no follower"
                time.sleep(0.01)
            os.kill(pid, signal.SIGSTOP)
            assert node.wait() == 1
        finally:
            if node.process.poll() is None:
                node.end(signal.SIGKILL)
    assert any("rank 1 has made no progress in its start for 2 s" in line for line in node.printed)
    assert pid not in marked_processes(OUR_MARK)


def starting_follower(node: NodeProcess) -> int | None:
    """The follower's pid once it runs its own program and is bound to its parent, else None.

    Before that it shares the memory and command line of the engine that starts it: stopped there,
    it would stop the engine, and outlive it.
    """
    try:
        pid = follower_pid(node)
        program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (ValueError, FileNotFoundError):  # no engine yet, or no rank of it
        return None
    return pid if program[1:3] == [b"-m", b"baton.node.engine_process.rank_process"] else None


@asynccontextmanager
async def beside(nodes: Nodes, role: Role, size: int) -> AsyncIterator[NodeProcess]:
    """One more node, with another number of ranks, which may be slow on two cores."""
    flags = ("--tp", str(size), "--rank-timeout-s", "20", "--name", "other")
    node = launch(role, nodes.redis_url, *nodes.flags, *flags)
    try:
        yield node
        assert node.end(signal.SIGTERM) == 0
    finally:
        if node.process.poll() is None:
            node.end(signal.SIGKILL)


async def hand_off_all(nodes: Nodes, reference: LocalEngine, reads_per_block: float) -> None:
    """Long, short and cancelled hand-offs; `reads_per_block`: bytes pulled per block, in units of a
    block of an engine with one rank."""
    requests = [request_of(1), request_of(300, max_tokens=20), request_of(40, temperature=0.7)]
    async with connected(nodes) as pair:
        cancelled = request_of(900, max_tokens=500)
        for request in (cancelled, *requests):
            await pair.hand_off(request)
        await pair.decode.cancel(cancelled)
        await pair.prefill.cancel(cancelled)
        for request in requests:
            assert await pair.finish(request) == expected_of(reference, request)
        outputs = pair.decode.received[requests[1].key].outputs
        (transfer,) = [output.transfer for output in outputs if output.HasField("transfer")]
        assert transfer.transport == "shm"
        assert transfer.bytes == 19 * reads_per_block * reference.runner.kv.block_bytes
    await wait_idle(nodes.prefill.address, nodes.decode.address)


@pytest.mark.slow
async def test_one_rank_hands_over_to_two(nodes: Nodes, reference: LocalEngine) -> None:
    async with beside(nodes, Role.PREFILL, 1) as other:
        await hand_off_all(dataclasses.replace(nodes, prefill=other), reference, 1)


@pytest.mark.slow
async def test_two_ranks_hand_over_to_one(nodes: Nodes, reference: LocalEngine) -> None:
    async with beside(nodes, Role.DECODE, 1) as other:
        await hand_off_all(dataclasses.replace(nodes, decode=other), reference, 1)


@pytest.mark.slow
async def test_four_ranks_pull_each_head_twice(nodes: Nodes, reference: LocalEngine) -> None:
    async with beside(nodes, Role.DECODE, 4) as other:
        await hand_off_all(dataclasses.replace(nodes, decode=other), reference, 2)


@pytest.mark.slow
async def test_four_ranks_hand_over_to_one(nodes: Nodes, reference: LocalEngine) -> None:
    async with (
        beside(nodes, Role.PREFILL, 4) as source,
        beside(nodes, Role.DECODE, 1) as puller,
    ):
        pair = dataclasses.replace(nodes, prefill=source, decode=puller)
        await hand_off_all(pair, reference, 1)
