"""An engine whose stages are on two hosts, between two network namespaces: its tokens, its
hand-offs, and its end with any rank, after which requests continue on other engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from engines.generation import outputs_of
from fakes.node.namespaces import Wire, second_host
from node_driver import NodeProcess, launch_program, write_tiny_model
from preloaded.starts import children_of

from baton.cli.host.certs import make_certificates
from baton.client import AsyncClient
from baton.cluster.redis_server import RedisServer
from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.runner import ModelRunner
from baton.engine.local import LocalEngine

NOTICED_S = 1.5
VOCAB_SIZE = 253
BLOCKS = 300


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    with second_host(f"10.232.{os.getpid() % 250}") as wire:
        yield wire


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), VOCAB_SIZE)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> LocalEngine:
    config = EngineConfig(
        model=str(model_dir), load_format="dummy", device="cpu", num_kv_blocks=BLOCKS
    )
    return LocalEngine(config, ModelRunner(config))


CPU = ("--device", "cpu")
DUMMY = ("--load-format", "dummy", "--num-kv-blocks", str(BLOCKS))


@dataclass
class Cluster:
    """`spread`: the engines' nodes by role, and the processes on their second hosts; the other
    nodes are on the first host."""

    nodes: dict[str, NodeProcess]
    hosts: dict[str, NodeProcess]
    gateway: NodeProcess

    def printed(self, name: str, text: str) -> Callable[[], bool]:
        """Whether the node prints the line, from this moment on."""
        lines = (self.nodes | self.hosts)[name].printed
        seen = len(lines)
        return lambda: any(text in line for line in lines[seen:])


@contextlib.contextmanager
def running(
    wire: Wire,
    model_dir: Path,
    *,
    spread: tuple[str, ...],
    single: tuple[str, ...],
    size: int = 1,
    certs: Path | None = None,
    devices: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] = (CPU, CPU, CPU),
    more: tuple[str, ...] = DUMMY,
) -> Iterator[Cluster]:
    """Engines of these roles: over both hosts, with `size` ranks on each, and in one process.
    `devices`: flags of either host's part and of the one process; `more`: flags of all nodes."""

    def secured(role: str) -> tuple[str, ...]:
        if certs is None:
            return ()
        files = {"ca": "ca.crt", "cert": f"{role}.crt", "key": f"{role}.key"}
        return tuple(f"--cluster-{flag}={certs / name}" for flag, name in files.items())

    flags = ("--model", str(model_dir), "--insecure-bind", *more)
    of_first, of_second, of_single = devices
    hosts: dict[str, NodeProcess] = {}
    nodes: dict[str, NodeProcess] = {}
    gateways: list[NodeProcess] = []
    with RedisServer.start() as redis:
        try:
            for index, role in enumerate(spread):
                common = (*flags, *secured(role), "--pp", "2", "--nnodes", "2", "--tp", str(size))
                common += ("--master-addr", wire.here, "--master-port", str(29_600 + index))
                other = (*common, *of_second, "--node-rank", "1")
                hosts[role] = launch_program(role, redis.url, *other, inside=wire.name)
                own = (*common, *of_first, "--host", wire.here, "--name", f"{role}-spread")
                nodes[f"{role}-spread"] = launch_program(role, redis.url, *own)
            for role in single:
                own = (*flags, *secured(role), *of_single, "--host", wire.here)
                own += ("--name", f"{role}-single")
                nodes[f"{role}-single"] = launch_program(role, redis.url, *own)
            ports = ("--grpc-port", "0", "--http-port", "0", "--skip-tokenizer-init")
            ports += ("--model", str(model_dir), *secured("gateway"))
            gateways.append(launch_program("gateway", redis.url, *ports))
            yield Cluster(nodes, hosts, gateways[0])
            for process in (*gateways, *nodes.values(), *hosts.values()):
                assert process.end(signal.SIGTERM) == 0
        finally:
            for process in (*gateways, *nodes.values(), *hosts.values()):
                if process.process.poll() is None:
                    process.end(signal.SIGKILL)


async def until(has_come: Callable[[], bool], within_s: float = 40.0) -> None:
    async with asyncio.timeout(within_s):
        while not has_come():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def expected(reference: LocalEngine, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    requests = [Request(secrets.token_hex(16), 0, tuple(prompt), params) for prompt in prompts]
    found = outputs_of(reference, requests)
    return [found[request.key] for request in requests]


def prompt_of(length: int) -> list[int]:
    return [(7 * i * i + length) % VOCAB_SIZE for i in range(length)]


async def generate(cluster: Cluster, prompt: list[int], max_tokens: int) -> list[int]:
    async with AsyncClient(cluster.gateway.address) as client:
        stream = client.generate(
            prompt_token_ids=prompt, max_tokens=max_tokens, ignore_eos=True, temperature=0.0
        )
        return list((await stream.finish()).token_ids)


async def all_serve(cluster: Cluster, within_s: float = 60.0) -> None:
    """Wait until all engines serve, and each decode engine is linked to each prefill engine."""
    num_prefill = sum(name.startswith("prefill") for name in cluster.nodes)
    async with asyncio.timeout(within_s), AsyncClient(cluster.gateway.address) as client:
        while True:
            with contextlib.suppress(Exception):
                nodes = (await client.model_info()).nodes
                decodes = [node for node in nodes if node.role == "decode"]
                if len(nodes) == len(cluster.nodes) and all(
                    len(node.links) == num_prefill for node in decodes
                ):
                    return
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def spread(wire: Wire, model_dir: Path) -> Iterator[Cluster]:
    """For each role one engine on two hosts, and one in one process."""
    roles = ("prefill", "decode")
    with running(wire, model_dir, spread=roles, single=roles) as cluster:
        yield cluster


async def test_tokens_are_those_of_one_process(spread: Cluster, reference: LocalEngine) -> None:
    await all_serve(spread)
    prompts = [prompt_of(length) for length in (1, 33, 700, 90, 5, 250)]
    found = await asyncio.gather(*(generate(spread, prompt, 12) for prompt in prompts))
    assert found == expected(reference, prompts, 12)


def end_rank(cluster: Cluster, wire: Wire) -> contextlib.AbstractContextManager[None]:
    (rank,) = children_of(cluster.hosts["decode"].process.pid)
    os.kill(rank, signal.SIGKILL)
    return contextlib.nullcontext()


def stop_rank(cluster: Cluster, wire: Wire) -> contextlib.AbstractContextManager[None]:
    (rank,) = children_of(cluster.hosts["decode"].process.pid)
    os.kill(rank, signal.SIGSTOP)
    return contextlib.nullcontext()


def cut_wire(cluster: Cluster, wire: Wire) -> contextlib.AbstractContextManager[None]:
    return wire.cut()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param(end_rank, "ended", marks=pytest.mark.slow),
        pytest.param(stop_rank, "has sent nothing for 1.2 s", marks=pytest.mark.slow),
        (cut_wire, "has sent nothing for 1.2 s"),
    ],
)
async def test_a_lost_host_ends_the_engine_and_requests_go_on_elsewhere(
    spread: Cluster,
    wire: Wire,
    reference: LocalEngine,
    fault: Callable[[Cluster, Wire], contextlib.AbstractContextManager[None]],
    reason: str,
) -> None:
    await all_serve(spread)
    prompts = [prompt_of(20 + index) for index in range(4)]
    running = [asyncio.create_task(generate(spread, prompt, 900)) for prompt in prompts]
    await asyncio.sleep(0.5)  # on both decode engines
    assert not any(task.done() for task in running)
    is_lost = spread.printed("decode-spread", f"engine lost: rank 1 on {wire.there} {reason}")
    began_s = time.monotonic()
    with fault(spread, wire):
        await until(is_lost)
        assert time.monotonic() - began_s < NOTICED_S
        found = await asyncio.gather(*running)
    await all_serve(spread)  # the engine is whole again
    wanted = expected(reference, prompts, 900)
    assert found == wanted
    assert await generate(spread, prompts[0], 12) == wanted[0][:12]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spread", "single", "size"),
    [
        (("prefill", "decode"), (), 1),
        (("prefill",), ("decode",), 2),
        (("decode",), ("prefill",), 2),
    ],
)
async def test_with_tls_and_ranks_tokens_are_those_of_one_process(
    wire: Wire,
    model_dir: Path,
    reference: LocalEngine,
    tmp_path: Path,
    spread: tuple[str, ...],
    single: tuple[str, ...],
    size: int,
) -> None:
    certs = tmp_path / "certs"
    make_certificates(certs)
    with running(wire, model_dir, spread=spread, single=single, size=size, certs=certs) as cluster:
        await all_serve(cluster)
        prompts = [prompt_of(length) for length in (1, 33, 700, 90)]
        found = await asyncio.gather(*(generate(cluster, prompt, 12) for prompt in prompts))
        assert found == expected(reference, prompts, 12)
