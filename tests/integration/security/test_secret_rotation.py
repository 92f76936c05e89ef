"""The cluster secret is changed, process by process, under load: no request fails."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fault_scenes.fault_cluster import Cluster, cluster, write_model
from node_driver import SECRET
from steady_load import SteadyLoad

from baton.client import AsyncClient

NEW = "another secret of the tests"
STEPS = (  # BATON_CLUSTER_SECRET, BATON_CLUSTER_SECRET_ALSO
    (SECRET, NEW),
    (NEW, SECRET),
    (NEW, ""),
)
GATEWAYS = ("gateway-0", "gateway-2")
NODES = (("prefill-0", "decode-0"), ("prefill-2", "decode-2"))


@dataclass
class Clients:
    """Clients of one gateway at a time, as behind a load balancer."""

    system: Cluster
    gateway: str = GATEWAYS[0]
    num_running: dict[str, int] = field(default_factory=lambda: dict.fromkeys(GATEWAYS, 0))

    async def ask(self, prompt: str) -> tuple[int, ...]:
        gateway = self.gateway
        self.num_running[gateway] += 1
        try:
            async with AsyncClient(self.system.processes[gateway].address) as client:
                call = client.generate(prompt, max_tokens=40, temperature=0.0, ignore_eos=True)
                return (await call.finish()).token_ids
        finally:
            self.num_running[gateway] -= 1

    async def leave(self, gateway: str) -> None:
        """Direct all clients to the other gateway; wait for the pending responses."""
        (self.gateway,) = {*GATEWAYS} - {gateway}
        async with asyncio.timeout(20):
            while self.num_running[gateway]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def until_linked(system: Cluster) -> None:
    """Wait until every gateway is linked to every engine, and every puller to every source."""
    names = {name for pair in NODES for name in pair}
    async with asyncio.timeout(40):
        for gateway in GATEWAYS:
            while True:
                async with AsyncClient(system.processes[gateway].address) as client:
                    with suppress(Exception):  # it may be starting
                        nodes = (await client.model_info()).nodes
                        sources = {n.incarnation for n in nodes if n.role == "prefill"}
                        pullers = [n for n in nodes if n.role == "decode"]
                        if sorted(n.name for n in nodes) == sorted(names) and all(
                            sources <= set(n.links) for n in pullers
                        ):
                            break
                await asyncio.sleep(0.05)


async def restart(system: Cluster, *names: str) -> None:
    for name in names:
        system.processes[name].process.send_signal(signal.SIGTERM)
    for name in names:
        assert await asyncio.to_thread(system.processes[name].wait) == 0
        system.start(name)
    for name in names:
        assert await asyncio.to_thread(lambda name=name: system.processes[name].address)
    await until_linked(system)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_secret_is_changed_under_load_without_an_error(
    tmp_path: Path,
) -> None:
    nodes = [name for pair in NODES for name in pair]
    with cluster(write_model(tmp_path), *GATEWAYS, *nodes) as system:
        await until_linked(system)
        clients = Clients(system)
        load = SteadyLoad(clients.ask)
        async with load.running():
            for secret, also in STEPS:
                system.environment = {
                    "BATON_CLUSTER_SECRET": secret,
                    "BATON_CLUSTER_SECRET_ALSO": also,
                }
                before = load.num_right
                for pair in NODES:
                    await restart(system, *pair)
                for gateway in GATEWAYS:
                    await clients.leave(gateway)
                    await restart(system, gateway)
                assert load.num_right > before
        for process in system.processes.values():
            assert not [line for line in process.printed if "does not hold the key" in line]
