"""A cluster over two network namespaces, which act as two hosts without shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from engines.generation import outputs_of
from fakes.node.namespaces import Wire, second_host
from node_driver import NodeProcess, launch_program, wait_idle, write_tiny_model

from baton.cli.host.certs import make_certificates
from baton.client import AsyncClient, Client
from baton.cluster.redis_server import RedisServer
from baton.core.engine_config import EngineConfig
from baton.core.errors import Unavailable
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.runner import ModelRunner
from baton.engine.local import LocalEngine

GATEWAY_S = 1.5  # until a gateway detects a lost engine
PEERS_S = 2.0  # until engines detect lost peers
ENGINE_S = 7.0  # until an engine detects a lost gateway: a paused one leaves much unread
SUBNET = "10.231.77"
HERE, THERE = f"{SUBNET}.1", f"{SUBNET}.2"
VOCAB_SIZE = 253


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    with second_host(SUBNET) as wire:
        yield wire


@dataclass
class Cluster:
    """A prefill node and a gateway on this host, a decode node on the other."""

    prefill: NodeProcess
    decode: NodeProcess
    gateway: NodeProcess


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(folder, VOCAB_SIZE)


@contextlib.contextmanager
def running(
    wire: Wire, model_dir: Path, *, sizes: tuple[int, int], certs: Path | None = None
) -> Iterator[Cluster]:
    """`sizes`: ranks of the prefill and of the decode engine; `certs`: mutual TLS."""
    own = ("--model", str(model_dir))
    node = (*own, "--load-format", "dummy", "--num-kv-blocks", "300", "--insecure-bind")

    def secured(role: str) -> tuple[str, ...]:
        if certs is None:
            return ()
        files = {"ca": "ca.crt", "cert": f"{role}.crt", "key": f"{role}.key"}
        return tuple(f"--cluster-{flag}={certs / name}" for flag, name in files.items())

    started: list[NodeProcess] = []
    with RedisServer.start() as redis:
        try:
            for name, host, size, inside in (
                ("prefill", HERE, sizes[0], ""),
                ("decode", THERE, sizes[1], wire.name),
            ):
                flags = (*node, "--host", host, "--tp", str(size), *secured(name))
                started.append(launch_program(name, redis.url, *flags, inside=inside))
            ports = ("--grpc-port", "0", "--http-port", "0", "--skip-tokenizer-init")
            ports += secured("gateway")
            started.append(launch_program("gateway", redis.url, *own, *ports))
            yield Cluster(*started)
            for process in reversed(started):
                assert process.end(signal.SIGTERM) == 0
        finally:
            for process in started:
                if process.process.poll() is None:
                    process.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def plain(wire: Wire, model_dir: Path) -> Iterator[Cluster]:
    with running(wire, model_dir, sizes=(1, 1)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> LocalEngine:
    config = EngineConfig(
        model=str(model_dir), load_format="dummy", device="cpu", num_kv_blocks=300
    )
    return LocalEngine(config, ModelRunner(config))


async def test_tokens_are_those_of_one_process(plain: Cluster, reference: LocalEngine) -> None:
    await check_tokens(plain, reference)


@pytest.mark.slow
async def test_tokens_of_two_ranks_are_those_of_one_process(
    wire: Wire, model_dir: Path, reference: LocalEngine
) -> None:
    with running(wire, model_dir, sizes=(2, 1)) as cluster:
        await check_tokens(cluster, reference)


async def check_tokens(cluster: Cluster, reference: LocalEngine) -> None:
    assert cluster.prefill.address.startswith(HERE)
    assert cluster.decode.address.startswith(THERE)
    await wait_idle(cluster.prefill.address, cluster.decode.address)
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
            assert found == outputs_of(reference, [request])[request.key]
    opened = [line for line in cluster.decode.printed if "reads from source" in line]
    assert len(opened) == 1
    assert "over tcp at" in opened[0]
    await wait_idle(cluster.prefill.address, cluster.decode.address)


# --- network faults -------------------------------------------------------------------------------


async def until_linked(cluster: Cluster) -> None:
    """Wait until the two engines are linked with each other, and the gateway with both."""
    async with asyncio.timeout(20), AsyncClient(cluster.gateway.address) as client:
        while True:
            with contextlib.suppress(Unavailable):
                nodes = (await client.model_info()).nodes
                if len(nodes) == 2 and any(node.links for node in nodes):
                    return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "has_tls",
    [pytest.param(False, id="plain"), pytest.param(True, id="tls", marks=pytest.mark.slow)],
)
async def test_a_partition_is_noticed_on_both_sides_and_heals(
    wire: Wire, model_dir: Path, tmp_path: Path, plain: Cluster, has_tls: bool
) -> None:
    with contextlib.ExitStack() as stack:
        cluster, certs = plain, tmp_path / "certs"
        if has_tls:
            make_certificates(certs)
            cluster = stack.enter_context(running(wire, model_dir, sizes=(1, 1), certs=certs))
        await until_linked(cluster)
        async with AsyncClient(cluster.gateway.address) as client:
            request = {"prompt_token_ids": [5, 6, 7], "ignore_eos": True, "temperature": 0.0}
            expected = (await client.generate(max_tokens=8, **request).finish()).token_ids
            stream = client.generate(max_tokens=1900, timeout_s=20.0, **request)
            await anext(aiter(stream))
            with wire.cut():
                began_s = time.monotonic()

                waits = {
                    "gateway": (cluster.gateway, "no heartbeat for 1.2 s", GATEWAY_S),
                    "source": (cluster.prefill, "the link with puller", PEERS_S),
                    "puller": (cluster.decode, "the link with source", PEERS_S),
                    "engine": (cluster.decode, "the link with gateway", ENGINE_S),
                }
                while waits:
                    passed_s = time.monotonic() - began_s
                    for name, (process, what, within_s) in list(waits.items()):
                        assert passed_s < within_s, f"{name} has not noticed"
                        if any(what in line for line in process.printed):
                            print(f"{name} noticed within {passed_s:.2f} s")
                            del waits[name]
                    await asyncio.sleep(0.01)
            stream.cancel()
            await until_linked(cluster)
            result = await client.generate(max_tokens=8, **request).finish()
            assert result.token_ids == expected
        if not has_tls:
            await wait_idle(cluster.prefill.address, cluster.decode.address)
