"""A deployment on one host whose parts end: `baton up` starts nodes again.

How often it does is tested in tests/unit/test_cli_up.py, without nodes.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest

from baton.cli.deployment import Deployment
from baton.core.config import EngineConfig, GatewayConfig, NodeConfig, UpConfig


@pytest.fixture
async def deployment() -> AsyncIterator[Deployment]:
    engine = EngineConfig(model="demo", device="cpu", cpu_kv_bytes=32 << 20)
    gateway = GatewayConfig(grpc_port=0, http_port=0, model="demo")
    up = UpConfig(num_decode_nodes=2)
    async with Deployment(up, engine, NodeConfig(), gateway, lambda name, line: None) as deployment:
        yield deployment


def kill(deployment: Deployment, name: str) -> int:
    (child,) = [child for child in deployment.children if child.name == name]
    child.process.send_signal(signal.SIGKILL)
    return child.process.pid


async def test_a_node_that_ends_is_started_again(deployment: Deployment) -> None:
    """And what it streamed goes on at the other."""
    keeping = asyncio.create_task(deployment.keep())
    async with asyncio.timeout(60), deployment.client() as client:
        generation = client.generate("def f(", max_tokens=400, temperature=0.0, ignore_eos=True)
        await anext(generation)
        killed = {kill(deployment, name) for name in ("decode-0", "prefill-0")}
        result = await generation.finish()
        assert result.completion_tokens == 400
        await deployment.wait_linked()
        assert killed.isdisjoint(child.process.pid for child in deployment.children)
        again = await client.generate(
            "def f(", max_tokens=400, temperature=0.0, ignore_eos=True
        ).finish()
        assert again.text == result.text
        kill(deployment, "gateway")
        assert await keeping == "gateway"
