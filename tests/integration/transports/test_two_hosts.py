"""A cluster over two network namespaces: to it two hosts without shared memory."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from node_driver import NodeProcess, launch_program, ledgers, wait_idle, write_tiny_model

from baton.client import Client
from baton.cluster.redis_server import RedisServer
from baton.core.config import EngineConfig
from baton.core.request.request import Request, SamplingParams
from baton.engine.execution.runner import ModelRunner
from baton.engine.local import LocalEngine

HERE, THERE = "10.231.77.1", "10.231.77.2"
VOCAB_SIZE = 253


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def other_host() -> Iterator[str]:
    """The name of a namespace at the other end of a wire to ours."""
    name = f"baton-{os.getpid()}"
    near, far = f"bt{os.getpid() % 10**6}a", f"bt{os.getpid() % 10**6}b"
    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"NOT TESTED: no network namespaces for this user: {error}")
    try:
        ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        ip("addr", "add", f"{HERE}/30", "dev", near)
        ip("link", "set", near, "up")
        for device in (far, "lo"):
            ip("-n", name, "link", "set", device, "up")
        ip("-n", name, "addr", "add", f"{THERE}/30", "dev", far)
        yield name
    finally:
        ip("netns", "del", name)  # and with it both ends of the wire


@dataclass
class Cluster:
    """A prefill node here, a decode node there, a gateway here."""

    prefill: NodeProcess
    decode: NodeProcess
    gateway: NodeProcess


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(folder, VOCAB_SIZE)


@contextlib.contextmanager
def running(other_host: str, model_dir: Path, *, sizes: tuple[int, int]) -> Iterator[Cluster]:
    """`sizes`: ranks of the prefill and of the decode engine."""
    own = ("--model", str(model_dir))
    node = (*own, "--load-format", "dummy", "--num-kv-blocks", "300", "--insecure-bind")
    started: list[NodeProcess] = []
    with RedisServer.start() as redis:
        try:
            for name, host, size, inside in (
                ("prefill", HERE, sizes[0], ""),
                ("decode", THERE, sizes[1], other_host),
            ):
                flags = (*node, "--host", host, "--tp", str(size))
                started.append(launch_program(name, redis.url, *flags, inside=inside))
            ports = ("--grpc-port", "0", "--http-port", "0", "--skip-tokenizer-init")
            started.append(launch_program("gateway", redis.url, *own, *ports))
            yield Cluster(*started)
            for process in reversed(started):
                assert process.end(signal.SIGTERM) == 0
        finally:
            for process in started:
                if process.process.poll() is None:
                    process.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> LocalEngine:
    config = EngineConfig(
        model=str(model_dir), load_format="dummy", device="cpu", num_kv_blocks=300
    )
    return LocalEngine(config, ModelRunner(config))


@pytest.mark.parametrize("sizes", [(1, 1), pytest.param((2, 1), marks=pytest.mark.slow)], ids=str)
async def test_tokens_are_those_of_one_process(
    other_host: str, model_dir: Path, reference: LocalEngine, sizes: tuple[int, int]
) -> None:
    with running(other_host, model_dir, sizes=sizes) as cluster:
        assert cluster.prefill.address.startswith(HERE)
        assert cluster.decode.address.startswith(THERE)
        await wait_idle(cluster.prefill.address, cluster.decode.address)
        for node, way in ((cluster.prefill, "direct"), (cluster.decode, "link")):
            (ledger,) = await ledgers(node.address)
            assert [*ledger["gateway_ways"].values()] == [way]
        with Client(cluster.gateway.address) as client:
            for length, params in (
                (1, {"temperature": 0.0}),
                (700, {"temperature": 0.0}),
                (90, {"temperature": 0.8, "seed": 5}),
            ):
                prompt = [(7 * i * i + length) % VOCAB_SIZE for i in range(length)]
                generation = client.generate(
                    prompt_token_ids=prompt, max_tokens=12, ignore_eos=True, **params
                )
                found = list(generation.result.token_ids)
                request = Request(
                    secrets.token_hex(16),
                    0,
                    tuple(prompt),
                    SamplingParams(max_tokens=12, ignore_eos=True, **params),
                )
                assert found == reference.generate([request])[request.key]
        opened = [line for line in cluster.decode.said if "reads from source" in line]
        assert len(opened) == 1
        assert "over tcp at" in opened[0]
        spoken = [line for line in cluster.decode.said if "speaks with source" in line]
        assert len(spoken) == 1
        assert "over the link: it is on another host" in spoken[0]
        await wait_idle(cluster.prefill.address, cluster.decode.address)
