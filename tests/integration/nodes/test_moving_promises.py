"""Promises move between engines under requests, by the gateway with the lease; then that gateway
dies, another assumes a lease that it lost, a third joins, Redis stops, and the last decode engine
dies.

Two gateways run in this process, so that a test can set their decisions; all else is real.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from deployments import marked_processes
from effort import number
from fault_scenes.fault_cluster import Cluster, cluster, write_model
from node_driver import CLUSTER, OUR_MARK, SECRET
from patience import SOON_S

from baton.client import AsyncClient, Result
from baton.core.config import ClusterConfig, GatewayConfig
from baton.gateway.engines.linked_engine import LinkedEngine
from baton.gateway.process.server import Gateway, serve
from baton.gateway.promises import promise_decider, promises
from baton.gateway.promises.promise_leader import LEASE_S, PERIOD_S

TARGET_MS = 20.0
TAKEN_OVER_S = LEASE_S + 2 * PERIOD_S + SOON_S
NUM_STREAMS, NUM_TOKENS = 6, 40


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model_dir = write_model(tmp_path_factory.mktemp("model"))
    flags = {"node": ("--tbt-target-ms", str(TARGET_MS))}
    with cluster(model_dir, "prefill-0", "decode-0", **flags) as running:
        yield running
    assert not marked_processes(OUR_MARK)


@dataclass
class Scene:
    """`wanted`: how many engines should make no promise."""

    system: Cluster
    gateways: list[Gateway] = field(default_factory=list)
    wanted: int = 0
    results: list[tuple[float, Result]] = field(default_factory=list)  # with the time of sending
    num_sent: Iterator[int] = field(default_factory=itertools.count)

    async def add_gateway(self) -> Gateway:
        config = GatewayConfig(grpc_port=0, http_port=0, model=str(self.system.model_dir))
        found = await serve(config, ClusterConfig(self.system.redis.url, CLUSTER, SECRET))
        self.gateways.append(found)
        await asyncio.wait_for(found.startup_lines(), 20)
        return found

    def engine(self, name: str, gateway: int = 0) -> LinkedEngine | None:
        table = self.gateways[gateway]._table
        return next((e for e in table.engines.values() if e.name == name), None)

    def promises(self, name: str, gateway: int = 0) -> bool | None:
        """Whether the engine promises, by its last heartbeat."""
        engine = self.engine(name, gateway)
        if engine is None:
            return None
        return not engine.load.is_promise_withdrawn

    def target_s(self, name: str) -> float | None:
        """The TBT target of its decodes, even if the promise is withdrawn."""
        engine = self.engine(name)
        assert engine is not None
        return engine.load.tbt_target_s

    def epoch(self) -> int:
        engine = self.engine("prefill-0")
        assert engine is not None
        return engine.load.promise_epoch

    def leaders(self) -> list[int]:
        return [
            index
            for index, gateway in enumerate(self.gateways)
            if gateway._leader is not None and gateway._leader._lease.epoch is not None
        ]

    async def move(self, wanted: int, within_s: float = SOON_S) -> None:
        self.wanted = wanted
        await until(lambda: self.promises("prefill-0") is (wanted == 0), within_s)

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Streams in succession, none of which may fail; equal prompts give equal tokens."""
        is_over = asyncio.Event()

        async def stream(client: AsyncClient) -> None:
            while not is_over.is_set():
                index = next(self.num_sent) % 4
                prompt = tuple(range(10 * index + 3, 10 * index + 103))
                sent_s = time.monotonic()
                handle = client.generate(
                    prompt_token_ids=prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
                )
                self.results.append((sent_s, await handle.finish()))

        async with AsyncClient(f"127.0.0.1:{self.gateways[0].port}") as client:
            streams = [asyncio.create_task(stream(client)) for _ in range(NUM_STREAMS)]
            try:
                yield
            finally:
                is_over.set()
                await asyncio.gather(*streams)

    def plans(self, since_s: float) -> Counter[tuple[str, str | None]]:
        """The plans of requests that were sent since then and have finished."""
        sent = (result for sent_s, result in self.results if sent_s >= since_s)
        return Counter((one.prefill_node, one.decode_node) for one in sent)

    async def next_plans(self) -> set[tuple[str, str | None]]:
        """The plans of requests sent from this moment on, at least as many as there are streams."""
        now_s = time.monotonic()
        await until(lambda: self.plans(now_s).total() >= NUM_STREAMS, 20.0)
        return set(self.plans(now_s))


async def until(condition: Callable[[], bool], within_s: float = SOON_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 (of other processes)
            await asyncio.sleep(0.02)


@pytest.fixture
async def scene(system: Cluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    found = Scene(system)
    monkeypatch.setattr(promises, "HOLD_S", 0.0)
    monkeypatch.setattr(
        promise_decider.PromiseDecider,
        "_num_pure",
        lambda self, engines, movable, num_others: found.wanted if num_others else 0,
    )
    await found.add_gateway()
    await found.move(0, TAKEN_OVER_S)
    yield found
    for gateway in found.gateways:
        await gateway.stop(grace_s=0.0)


async def test_promises_move_under_requests_and_none_fails(scene: Scene) -> None:
    async with scene.load():
        for _ in range(number(1, 3)):
            await scene.move(1)
            await until(lambda: scene.target_s("prefill-0") is None, 20.0)
            assert await scene.next_plans() <= {("prefill-0", "decode-0"), ("decode-0", "decode-0")}
            await scene.move(0)
            await scene.next_plans()
    engine = scene.engine("prefill-0")
    assert engine is not None and engine.welcome.tbt_target_s == TARGET_MS / 1000
    assert scene.promises("decode-0"), "which promises all the while"


@pytest.mark.slow
async def test_another_gateway_takes_over_with_a_higher_epoch(scene: Scene) -> None:
    """The old leader pauses, then still assumes its lease; its order with the old epoch is
    refused."""
    await scene.add_gateway()
    async with scene.load():
        await scene.move(1, TAKEN_OVER_S)
        (first,) = scene.leaders()
        leader, epoch = scene.gateways[first]._leader, scene.epoch()
        assert leader is not None
        lease, believed = leader._lease, Believed(None)
        leader._lease = believed
        scene.wanted = 0
        await until(lambda: scene.epoch() > epoch, TAKEN_OVER_S)
        await until(lambda: scene.promises("prefill-0") is True)
        believed.epoch = epoch
        await until(lambda: scene.leaders() == [0, 1])
        engine, newer = scene.engine("prefill-0", first), scene.epoch()
        assert engine is not None
        engine.outbox.set_promise(epoch, leader._name, None)
        await asyncio.sleep(0.5)
        assert scene.promises("prefill-0") and scene.epoch() == newer
        leader._lease = lease


@dataclass
class Believed:
    """A lease that returns the given epoch."""

    epoch: int | None

    async def take(self, least_epoch: int) -> int | None:
        return self.epoch

    async def close(self) -> None:
        pass


@pytest.mark.slow
async def test_promises_stay_while_redis_is_away(scene: Scene) -> None:
    async with scene.load():
        await scene.move(1, TAKEN_OVER_S)
        epoch = scene.epoch()
        scene.system.redis.process.kill()
        scene.system.redis.process.wait()
        await until(lambda: not scene.leaders(), TAKEN_OVER_S)
        scene.wanted = 0
        await asyncio.sleep(1.0)
        assert scene.promises("prefill-0") is False, "they stay"
        scene.system.redis.start_again()
        await until(lambda: scene.promises("prefill-0") is True, TAKEN_OVER_S)
        assert scene.epoch() >= epoch, "though Redis came back empty"


@pytest.mark.slow
async def test_the_only_decode_engine_dies_while_the_other_promises_nothing(scene: Scene) -> None:
    async with scene.load():
        await scene.move(1, TAKEN_OVER_S)
        scene.system.kill("decode-0")
        await until(lambda: scene.promises("prefill-0") is True, TAKEN_OVER_S)
        moved_s = time.monotonic()
        await until(lambda: ("prefill-0", "prefill-0") in scene.plans(moved_s), TAKEN_OVER_S)
        scene.system.restart_dead()
        await until(lambda: scene.promises("decode-0") is True, 30.0)
        await until(lambda: scene.promises("prefill-0") is False, TAKEN_OVER_S)
