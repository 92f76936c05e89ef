"""Engines of both roles as processes: each pulls cached prefixes from each other, and computes
those that cannot be pulled.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from node_driver import (
    NodeProcess,
    Session,
    launch,
    members,
    session,
    wait_idle,
    write_tiny_model,
)

from baton.cluster.redis_server import RedisServer
from baton.core.engine_config import EngineConfig
from baton.core.membership import Member, Role
from baton.core.request.request import PrefixSource, Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.execution.runner import ModelRunner
from baton.engine.kv.generations import Generations
from baton.engine.kv.limits import EngineLimits
from baton.engine.model import fingerprint

NUM_BLOCKS = 256
BLOCK_SIZE = 16
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
LENGTH = 200
PREFIX_BLOCKS = (LENGTH - 1) // BLOCK_SIZE
LIMIT_S = 5.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> ModelRunner:
    return ModelRunner(
        EngineConfig(
            model=str(model_dir), load_format="dummy", device="cpu", num_kv_blocks=NUM_BLOCKS
        )
    )


def single_process_tokens(runner: ModelRunner, request: Request) -> list[int]:
    engine = Engine(
        EngineParts(
            runner,
            EngineLimits(NUM_BLOCKS, BLOCK_SIZE, max_model_len=runner.max_model_len),
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


@dataclass
class Engines:
    nodes: dict[str, NodeProcess]
    sessions: dict[str, Session]
    incarnations: dict[str, str]

    def request(self, seed: int, **options: str) -> Request:
        prompt = tuple((seed * 31 + 7 * i) % 256 for i in range(LENGTH))
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        return Request(os.urandom(16).hex(), 0, prompt, params, **options)

    async def run(self, name: str, request: Request) -> tuple[list[int], int]:
        """The request's tokens, and its number of cached prompt tokens."""
        to = self.sessions[name]
        await to.dispatch(request, None)
        await to.until(lambda: request.key in to.received and to.received[request.key].is_over)
        received = to.received[request.key]
        assert not received.error
        (cached,) = [o.cached_tokens for o in received.outputs if o.HasField("cached_tokens")]
        return received.tokens, cached

    def from_peer(self, request: Request, name: str) -> Request:
        source = PrefixSource(self.incarnations[name], PREFIX_BLOCKS, LIMIT_S)
        return replace(request, prefix_source=source)


@pytest.fixture(scope="module", params=["shm", "tcp"])
def nodes(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[tuple[dict, str]]:
    flags = ("--model", str(model_dir), "--load-format", "dummy", "--num-kv-blocks")
    flags += (str(NUM_BLOCKS), "--kv-transport", request.param)
    with RedisServer.start() as redis:
        launched = {
            name: launch(Role(name.partition("-")[0]), redis.url, *flags, "--name", name)
            for name in NAMES
        }
        try:
            for node in launched.values():
                assert node.address
            yield launched, redis.url
        finally:
            for node in launched.values():
                if node.process.poll() is None:
                    node.end(signal.SIGKILL)


@pytest.fixture
async def engines(nodes: tuple[dict[str, NodeProcess], str]) -> AsyncIterator[Engines]:
    launched, redis_url = nodes
    alive = [name for name, node in launched.items() if node.process.poll() is None]

    def are_there(seen: Sequence[Member]) -> bool:
        return {member.name for member in seen} >= {*alive}

    found = {member.name: member.incarnation for member in await members(redis_url, are_there)}
    async with AsyncExitStack() as stack:
        sessions = {name: await stack.enter_async_context(session(found[name])) for name in alive}
        for name, to in sessions.items():
            await to.until(lambda to=to: to.num_heartbeats > 0)
            if name.startswith("decode"):
                prefills = {found[other] for other in alive if other.startswith("prefill")}
                await to.until(
                    lambda to=to, all=prefills: all <= {x.incarnation for x in to.heartbeat.links}
                )
        yield Engines(launched, sessions, found)
    await wait_idle(*(launched[name].address for name in alive if _runs(launched[name])))


def _runs(node: NodeProcess) -> bool:
    return node.process.poll() is None


@pytest.mark.parametrize("target", NAMES)
async def test_every_engine_pulls_from_every_other(
    engines: Engines, reference: ModelRunner, target: str
) -> None:
    for number, source in enumerate(name for name in NAMES if name != target):
        seed = 100 * NAMES.index(target) + number
        cold = engines.request(seed)
        expected = single_process_tokens(reference, cold)
        assert await engines.run(source, cold) == (expected, 0)
        remote = engines.from_peer(engines.request(seed), source)
        assert await engines.run(target, remote) == (expected, PREFIX_BLOCKS * BLOCK_SIZE)
        local = engines.request(seed)
        assert await engines.run(target, local) == (expected, PREFIX_BLOCKS * BLOCK_SIZE)
    to = engines.sessions[target]
    await to.until(lambda: to.heartbeat.counters.num_fetches >= len(NAMES) - 1)
    counters = to.heartbeat.counters
    assert counters.fetched_blocks == PREFIX_BLOCKS * (len(NAMES) - 1)
    assert counters.fetched_bytes == counters.fetched_blocks * reference.kv.block_bytes
    assert counters.fetch_s > 0 and not counters.failed_fetches


async def test_two_engines_pull_from_each_other_under_load(
    engines: Engines, reference: ModelRunner
) -> None:
    pairs = [("prefill-0", "decode-0"), ("decode-0", "prefill-0")]
    jobs, expected = [], []
    for number in range(12):
        source, target = pairs[number % 2]
        cold = engines.request(1000 + number)
        expected.append(single_process_tokens(reference, cold))
        await engines.run(source, cold)
        jobs.append((target, engines.from_peer(engines.request(1000 + number), source)))
    found = await asyncio.gather(*(engines.run(*job) for job in jobs))
    assert [tokens for tokens, _ in found] == expected


async def test_another_tenant_s_prefix_does_not_come(
    engines: Engines, reference: ModelRunner
) -> None:
    await engines.run("decode-0", engines.request(2000, cache_salt="yours"))
    mine = engines.from_peer(engines.request(2000, cache_salt="mine"), "decode-0")
    expected = single_process_tokens(reference, replace(mine, prefix_source=None))
    assert await engines.run("prefill-0", mine) == (expected, 0)


async def test_a_source_that_hangs_or_is_killed_costs_no_attempt(
    engines: Engines, reference: ModelRunner
) -> None:
    """A failed fetch costs no attempt: the prefix is computed. Last here, since it ends an
    engine."""
    cold = engines.request(3000)
    expected = single_process_tokens(reference, cold)
    await engines.run("decode-1", cold)
    (pid,) = engines.nodes["decode-1"].engine_pids()
    os.kill(pid, signal.SIGSTOP)
    requested = engines.from_peer(engines.request(3000), "decode-1")
    requested = replace(requested, prefix_source=replace(requested.prefix_source, limit_s=0.3))
    assert await engines.run("prefill-0", requested) == (expected, 0)
    waiting = engines.from_peer(engines.request(3000), "decode-1")
    job = asyncio.create_task(engines.run("prefill-1", waiting))
    await asyncio.sleep(0.05)
    assert not job.done()
    engines.nodes["decode-1"].process.kill()
    os.kill(pid, signal.SIGKILL)
    engines.nodes["decode-1"].wait()
    assert await job == (expected, 0)
    for name in ("prefill-0", "prefill-1"):
        to = engines.sessions[name]
        await to.until(lambda to=to: to.heartbeat.counters.failed_fetches)
