"""`baton up`: runs a deployment on this host, and prints its topology and how to call it."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from ...core.config import ClusterConfig, GatewayConfig, NodeConfig, UpConfig
from ...core.engine_config import EngineConfig
from ...core.errors import StartupFailed
from ...core.process.logs import print_line
from ...engine.kv.block_pool import NUM_RESERVED_BLOCKS
from ...gateway.process.startup_message import READY, TRY
from ..host.certs import ca_of
from ..host.gpu_choice import choose_here
from . import child_group
from .child import GATEWAY
from .deployment import Deployment


def start(
    up: UpConfig,
    engine: EngineConfig,
    node: NodeConfig,
    gateway: GatewayConfig,
    cluster: ClusterConfig,
) -> Coroutine[Any, Any, int]:
    """Print which GPUs are used and why. Returns a coroutine that starts everything, prints the
    topology, and stops everything on SIGINT or SIGTERM. Raises StartupFailed."""
    if engine.nnodes > 1:
        raise StartupFailed(
            "--nnodes is for launch_prefill and launch_decode: `baton up` starts this host's parts"
        )
    choice = choose_here(up, engine, node)
    print_line(choice.line)
    deployment = Deployment(choice.up, choice.engine, node, gateway, _print_line, cluster)
    return child_group.run(deployment, deployment, _print_topology)


def _print_line(name: str, line: str) -> None:
    if not line.startswith((READY, TRY)):  # shown once all is ready
        print_line(f"{name:>10} | {line}")


async def _print_topology(deployment: Deployment) -> None:
    async with deployment.client() as client:
        info = await client.model_info()
    print_line(f"\n{info.model}, context {info.max_model_len}")
    for node in info.nodes:
        num_blocks = node.num_blocks - NUM_RESERVED_BLOCKS
        tokens = num_blocks * node.block_size
        print_line(f"  {node.role:8} {node.name:12} {num_blocks} KV blocks = {tokens} tokens")
    for child in deployment.gateways:
        if len(child.addresses) > 2:
            print_line(f"  {GATEWAY:8} {child.name:12} {child.addresses[0]} alone")
    ca_file = ca_of(deployment.up.certs)
    print_line("")
    for line in deployment.startup_lines:
        print_line(
            line if ca_file is None else line.replace("curl ", f"curl --cacert {ca_file} ", 1)
        )
    print_line("Ctrl-C stops everything")
