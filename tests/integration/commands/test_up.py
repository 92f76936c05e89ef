"""A deployment on one host whose processes die or hang: `baton up` restarts them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio
from deployments import MARK, marked_processes

from baton.cli.deployment.deployment import Deployment
from baton.core.config import GatewayConfig, NodeConfig, UpConfig
from baton.core.engine_config import EngineConfig
from baton.core.errors import BatonError, StartupFailed


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment() -> AsyncIterator[Deployment]:
    """The deployment shared by all tests here; all but the last leave it working."""
    engine = EngineConfig(model="demo", device="cpu", cpu_kv_bytes=32 << 20)
    gateway = GatewayConfig(grpc_port=0, http_port=0, model="demo", recovery_wait_s=30)
    up = UpConfig(mode="disaggregated", num_decode_nodes=2)
    async with Deployment(up, engine, NodeConfig(), gateway, lambda name, line: None) as deployment:
        yield deployment


def kill(deployment: Deployment, name: str) -> int:
    (child,) = [child for child in deployment.children if child.name == name]
    child.process.send_signal(signal.SIGKILL)
    return child.process.pid


async def says_hello(deployment: Deployment) -> bool:
    """Retry the request until it succeeds."""
    async with deployment.client() as client:
        while True:
            with contextlib.suppress(BatonError):
                return bool((await client.generate("hello", max_tokens=4).finish()).text)
            await asyncio.sleep(0.05)


async def cancelled(task: asyncio.Task[str]) -> None:
    task.cancel()
    await asyncio.wait({task})


def pids_of(deployment: Deployment, name: str) -> list[int]:
    return [child.process.pid for child in deployment.children if child.name == name]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_node_that_ends_is_started_again(deployment: Deployment) -> None:
    """A node restarts after its end, and its streams continue on the other node."""
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
    await cancelled(keeping)


@pytest.mark.asyncio(loop_scope="module")
async def test_redis_and_the_gateway_are_started_again_too(deployment: Deployment) -> None:
    """After Redis lost all data, a new node and its cached prefixes are found; links stay up
    meanwhile."""
    keeping = asyncio.create_task(deployment.keep())
    redis = deployment._redis
    assert redis is not None
    async with asyncio.timeout(60):
        os.kill(redis.process.pid, signal.SIGKILL)
        pid = kill(deployment, "prefill-0")
        assert await says_hello(deployment)  # possibly by the old engine
        while pids_of(deployment, "prefill-0") in ([], [pid]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await deployment.wait_linked()
        async with deployment.client() as client:
            prompt = "def read(path):\n    return open(path).read()\n" * 8
            while True:
                result = await client.generate(prompt, max_tokens=2, temperature=0.0).finish()
                if result.cached_tokens:
                    break

        (gateway,) = (child for child in deployment.children if child.name == "gateway")
        gateway.process.send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        assert await gateway.process.wait() == -signal.SIGKILL
        assert time.monotonic() - began_s < 2.5
        address = deployment.address
        assert await says_hello(deployment)
        assert deployment.address == address
    await cancelled(keeping)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_a_node_that_lived_long_may_end_once_more(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node with a long uptime may fail once more; without processes in test_cli_restarts.py. The
    last test, since it leaves a node dead."""
    deployment.max_ends = 1
    monkeypatch.setattr("baton.cli.deployment.child_group._WELL_S", 0.0)
    keeping = asyncio.create_task(deployment.keep())
    async with asyncio.timeout(60):
        for _ in range(2):
            pid = kill(deployment, "decode-1")
            while pids_of(deployment, "decode-1") in ([], [pid]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await deployment.wait_linked()
    assert not keeping.done()
    async with asyncio.timeout(10):
        deployment.max_ends = 0
        kill(deployment, "decode-1")
        assert await keeping == "decode-1", "and one that keeps ending ends all"


@pytest.mark.slow
async def test_two_gateways_share_the_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two gateways share the ports. Environment variables set flags of `baton up` only: a gateway
    that read them would start more gateways."""
    monkeypatch.setenv("BATON_NUM_GATEWAYS", "2")
    engine = EngineConfig(model="demo", device="cpu", cpu_kv_bytes=32 << 20)
    gateway = GatewayConfig(grpc_port=0, http_port=0, model="demo", num_gateways=2)
    deployment = Deployment(
        UpConfig(mode="disaggregated"), engine, NodeConfig(), gateway, lambda name, line: None
    )
    async with asyncio.timeout(60), deployment, aiohttp.ClientSession() as http:
        assert [child.name for child in deployment.gateways] == ["gateway-0", "gateway-1"]
        own, shared, addresses = zip(*(c.addresses for c in deployment.gateways), strict=True)
        assert len({*shared}) == len({*addresses}) == 1 and len({*own, *shared}) == 3
        assert addresses[0] == deployment.address
        assert deployment.startup_lines[0].startswith(f"Ready: {shared[0]} ")
        assert deployment.startup_lines[0].endswith(f"dashboard {own[0]}/dashboard")
        keeping = asyncio.create_task(deployment.keep())
        body = {"model": "demo", "prompt": "hello", "max_tokens": 4}
        for url in (*own, shared[0]):
            async with http.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200
        kill(deployment, "gateway-1")
        assert await says_hello(deployment)
        await until_answers(http, f"{own[1]}/ready")
        await cancelled(keeping)


async def until_answers(http: aiohttp.ClientSession, url: str) -> None:
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            async with http.get(url) as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_taken_port_is_two_lines() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        gateway = GatewayConfig(grpc_port=0, http_port=taken.getsockname()[1])
        engine = EngineConfig(device="cpu", cpu_kv_bytes=32 << 20)
        deployment = Deployment(
            UpConfig(mode="disaggregated"), engine, NodeConfig(), gateway, lambda name, line: None
        )
        with pytest.raises(StartupFailed) as caught:
            await deployment.__aenter__()
    assert caught.value.message.startswith("the gateway cannot listen on 127.0.0.1:")
    assert "--http-port" in caught.value.hint
    assert not deployment.children


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", ["up --grpc-port 0 --http-port 0", "chat"])
@pytest.mark.parametrize("delay_s", [0.3, 0.4, 0.6, 1.0, 2.0, 3.0])
def test_a_signal_at_any_moment_of_the_start_leaves_nothing(
    command: str, delay_s: float, number: signal.Signals
) -> None:
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="b-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "baton", *command.split(), "--cpu-kv-bytes", str(32 << 20)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {MARK: mark, "XDG_RUNTIME_DIR": folder, "PYTHONSAFEPATH": "1"},
        )
        time.sleep(delay_s)  # a random moment
        process.send_signal(number)
        printed, _ = process.communicate(timeout=30)
        assert b"Traceback" not in printed, printed.decode()
        assert not marked_processes(mark)
        assert not os.listdir(folder)
