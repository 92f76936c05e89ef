"""`baton up`: a deployment on this host, its topology, and Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import sys

from ..client import AsyncClient
from ..core.config import ClusterConfig, EngineConfig, GatewayConfig, NodeConfig, UpConfig
from .deployment import Deployment


async def run(
    up: UpConfig,
    engine: EngineConfig,
    node: NodeConfig,
    gateway: GatewayConfig,
    cluster: ClusterConfig,
) -> int:
    """Start everything, say what runs where, and stop it all on SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    deployment = Deployment(up, engine, node, gateway, _print_line, cluster)
    starting = asyncio.create_task(deployment.__aenter__())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
        return 130
    await starting
    try:
        await _print_topology(deployment)
        ended = asyncio.create_task(deployment.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done() and not stop.is_set():
            print(f"error: {ended.result()} ended", file=sys.stderr)
            return 1
        ended.cancel()
        print("stopping")
        return 0
    finally:
        await deployment.stop()


def _print_line(name: str, line: str) -> None:
    print(f"{name:>10} | {line}", flush=True)


async def _print_topology(deployment: Deployment) -> None:
    async with AsyncClient(deployment.address) as client:
        info = await client.model_info()
    print(f"\ngateway {deployment.address} serves {info.model}, context {info.max_model_len}")
    for node in info.nodes:
        tokens = node.num_blocks * node.block_size
        print(f"  {node.role:8} {node.name:12} {node.num_blocks} KV blocks = {tokens} tokens")
    print("\nCtrl-C stops everything", flush=True)
