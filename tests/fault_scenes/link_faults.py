"""Message faults: messages on real channels are duplicated, reordered or lost.

gateway-9, "front" ═╦════ Tangle ═► decode-9, "far"     engines announce their tangles' addresses
                    ╠════ Tangle ═► prefill-9, "near"   and are announced as on other hosts
decode-9 ═══════════╝
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from deployments import free_port
from fault_scenes.faults import Scene, Stream, until
from fault_scenes.introductions import Introductions
from fault_scenes.tangle import DOUBLE, LOSE, SWAP, Tangle
from node_driver import wait_idle

from baton.client import AsyncClient

SEED = 27
LEASE_S = 1.0
PATIENCE_S = 2.0  # of a request's client: a wait for a lost message ends then
WAYS = [(name, way) for name in ("gateway", "puller") for way in ("on", "back")]


@dataclass
class Tangled:
    """A gateway and two nodes that reach each other only through tangles."""

    client: AsyncClient
    nodes: tuple[str, ...]  # addresses without a tangle
    tangles: tuple[Tangle, ...]

    def befall(self, *ways: tuple[str, str], **mishaps: float) -> None:
        """From this moment on apply the mishaps to messages of these directions only."""
        for tangle in self.tangles:
            tangle.mishaps = dict.fromkeys(ways, mishaps)

    @property
    def counts(self) -> Counter[tuple[str, str, str]]:
        return sum((tangle.counts for tangle in self.tangles), Counter())


async def shuffle_messages(scene: Scene) -> None:
    """F27: duplicated responses change nothing; with other mishaps tokens are right or an error
    occurs."""
    async with _tangled(scene) as world:
        await until(lambda: _is_linked(world))
        world.befall(*WAYS[1:], double=1.0)
        for stream in await _ask(scene, world, 6):
            assert stream.result.attempts == 1
        world.befall(*WAYS, double=0.06, swap=0.06, lose=0.03)
        shuffled = await _ask(scene, world, 20, may_fail=True)
        world.befall()
        await wait_idle(*world.nodes, timeout_s=PATIENCE_S + LEASE_S)
        for stream in await _ask(scene, world, 3):
            assert stream.result.attempts == 1
        await wait_idle(*world.nodes)
    errors = Counter(stream.error.code for stream in shuffled if stream.error is not None)
    retried = sum(s.result.attempts > 1 for s in shuffled if s.error is None)
    print(f"F27: of {len(shuffled)} streams {retried} tried again, errors {dict(errors)}")
    print("     " + ", ".join(f"{' '.join(what)} {n}" for what, n in sorted(world.counts.items())))
    assert {kind for *_, kind in world.counts} == {DOUBLE, SWAP, LOSE}
    assert {tuple(way) for *way, _ in world.counts} == set(WAYS)
    assert sum(errors.values()) < 0.8 * len(shuffled)


async def _is_linked(world: Tangled) -> bool:
    """Whether the gateway knows that its decode node can pull from its prefill node."""
    return any(node.links for node in (await world.client.model_info()).nodes)


async def _ask(scene: Scene, world: Tangled, count: int, *, may_fail: bool = False) -> list[Stream]:
    """Send requests of some chunks each at once; returns when they are over."""
    streams = [
        scene.ask(70 + 5 * i, 12, client=world.client, timeout_s=PATIENCE_S, may_fail=may_fail)
        for i in range(count)
    ]
    for stream in streams:
        await stream.end()
    return streams


@asynccontextmanager
async def _tangled(scene: Scene) -> AsyncIterator[Tangled]:
    """Start the three processes, each in a cluster of its own, and announce them with tangles
    between."""
    launch = scene.cluster.launch
    async with AsyncExitStack() as stack:
        known = Introductions(scene.cluster.redis.url, stack)
        tangles = [await stack.enter_async_context(Tangle(SEED)) for _ in range(2)]
        reached = []
        for tangle in tangles:
            tangle.target = f"127.0.0.1:{(port := free_port())}"
            reached.append(("--engine-port", f"{port}", "--advertise-engine", tangle.address))
        processes = (
            launch("prefill-9", *known.flags("near"), *reached[0], "--lease-s", f"{LEASE_S}"),
            launch("decode-9", *known.flags("far"), *reached[1]),
            launch("gateway-9", *known.flags("front")),
        )
        try:
            source, puller = [await known.newcomer(name) for name in ("near", "far")]
            await known.show_elsewhere(puller, "near", "front")
            await known.show_elsewhere(source, "far", "front")
            address = await asyncio.to_thread(lambda: processes[-1].address)
            client = await stack.enter_async_context(AsyncClient(address))
            yield Tangled(client, (source.address, puller.address), tuple(tangles))
        finally:
            for process in processes:
                process.process.send_signal(signal.SIGINT)
            for process in processes:
                await asyncio.to_thread(process.wait)
