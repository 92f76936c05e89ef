"""`baton up`: a deployment on this host, its topology, how to call it, and Ctrl-C."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

from ...core.config import ClusterConfig, EngineConfig, GatewayConfig, NodeConfig, UpConfig
from ...core.process.stop_signals import StopSignals
from ..host.certs import ca_of
from ..host.gpu_choice import choose_here
from .deployment import Deployment


def start(
    up: UpConfig,
    engine: EngineConfig,
    node: NodeConfig,
    gateway: GatewayConfig,
    cluster: ClusterConfig,
) -> Coroutine[Any, Any, int]:
    """Say which GPUs are used and why; what to run then. Raises StartupFailed."""
    choice = choose_here(up, engine, node)
    print(choice.line, flush=True)
    return run(choice.up, choice.engine, node, gateway, cluster)


async def run(
    up: UpConfig,
    engine: EngineConfig,
    node: NodeConfig,
    gateway: GatewayConfig,
    cluster: ClusterConfig,
) -> int:
    """Start everything, say what runs where, and stop it all on SIGINT or SIGTERM."""
    signals = StopSignals()
    deployment = Deployment(up, engine, node, gateway, _print_line, cluster)
    starting = asyncio.create_task(deployment.__aenter__())
    stopping = asyncio.create_task(signals.stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
        return 130
    await starting
    try:
        await _print_topology(deployment)
        ended = asyncio.create_task(deployment.keep())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            print(f"error: {ended.result()} ended", file=sys.stderr)
            return 1
        ended.cancel()
        await asyncio.wait({ended})
        print("stopping: requests in flight may end; Ctrl-C again cuts them off", flush=True)
        return 0
    finally:
        hurrying = asyncio.create_task(_hurry(signals, deployment))
        await deployment.stop()
        hurrying.cancel()


async def _hurry(signals: StopSignals, deployment: Deployment) -> None:
    await signals.hurry.wait()
    deployment.hurry()


def _print_line(name: str, line: str) -> None:
    print(f"{name:>10} | {line}", flush=True)


async def _print_topology(deployment: Deployment) -> None:
    async with deployment.client() as client:
        info = await client.model_info()
    print(f"\n{info.model}, context {info.max_model_len}")
    for node in info.nodes:
        tokens = node.num_blocks * node.block_size
        print(f"  {node.role:8} {node.name:12} {node.num_blocks} KV blocks = {tokens} tokens")
    ca_file = ca_of(deployment.up.certs)
    print()
    for line in deployment.greeting:
        print(line if ca_file is None else line.replace("curl ", f"curl --cacert {ca_file} ", 1))
    print("Ctrl-C stops everything", flush=True)
