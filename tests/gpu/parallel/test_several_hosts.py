"""Engines whose stages are on two hosts, here two nodes' parts on the loopback, with a GPU each:
the tokens of one GPU, hand-offs from and to both stages, and the death of a rank.

The same tests run on CPUs (marked slow), to check the tests themselves.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from engines.generation import outputs_of
from fakes.node.namespaces import Wire
from integration.hosts.test_several_hosts import (
    Cluster,
    all_serve,
    end_rank,
    prompt_of,
    running,
    until,
)

from baton.cli.host.certs import make_certificates
from baton.client import AsyncClient
from baton.client.messages import Result
from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.local import LocalEngine

NUM_GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.timeout(500)

LOOPBACK = Wire("", "", "", "127.0.0.1", "127.0.0.1")
START_S = 240.0  # for engines on GPUs that compile and capture graphs
# Steps with up to 512 prompt tokens run in graphs, larger ones do not.
COMMON = (
    *("--dtype", "float32", "--max-num-seqs", "24", "--max-num-batched-tokens", "2048"),
    *("--mixed-graph-tokens", "256"),
)
# Pools sized by the memory that the largest step leaves, which differs between stages; or fixed.
BY_MEMORY, AS_TOLD = ("--gpu-memory-utilization", "0.1"), ("--num-kv-blocks", "300")
LENS = (1, 15, 33, 100, 255, 410, 450)
MAX_TOKENS = 24
WAYS: list[dict[str, float]] = [{"temperature": 0.0}, {"temperature": 0.9, "top_k": 20}]


@dataclass(frozen=True)
class Case:
    """Which engines are on two hosts and which on one, with the number of ranks on each host."""

    spread: tuple[str, ...]
    single: tuple[str, ...]
    size: int = 1
    transport: str = "auto"
    has_tls: bool = False
    pool: tuple[str, ...] = AS_TOLD


CASES = [
    Case(("prefill",), ("decode",), pool=BY_MEMORY),
    Case(("decode",), ("prefill",), transport="tcp"),
    Case(("prefill", "decode"), (), has_tls=True),
    Case(("prefill",), ("decode",), size=2),
]


def on_each_device(cases: list[Case]) -> list[object]:
    def parameter(device: str, case: Case) -> object:
        marks = [
            pytest.mark.slow if device == "cpu" else pytest.mark.gpu,
            pytest.mark.skipif(device != "cpu" and NUM_GPUS < 2, reason="needs two CUDA devices"),
        ]
        return pytest.param(device, case, marks=marks)

    return [parameter(device, case) for case in cases for device in ("cuda", "cpu")]


def devices_of(device: str, size: int) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    if device == "cpu":
        return (("--device", "cpu"),) * 3
    gpus = [str(gpu % NUM_GPUS) for gpu in range(2 * size)]  # two hosts may share GPUs
    return ("--gpus", ",".join(gpus[:size])), ("--gpus", ",".join(gpus[size:])), ("--gpus", gpus[0])


def expected(model_dir: Path, device: str, prompts: list[list[int]]) -> list[list[list[int]]]:
    """The tokens of one process, on the first GPU."""
    config = EngineConfig(
        model=str(model_dir), device=device, dtype="float32", num_kv_blocks=400, max_num_seqs=24
    )
    engine = LocalEngine.load(config, print)
    found = []
    for way in WAYS:
        requests = [
            Request(
                secrets.token_hex(16),
                0,
                tuple(prompt),
                SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, seed=index, **way),
            )
            for index, prompt in enumerate(prompts)
        ]
        tokens = outputs_of(engine, requests)
        found.append([tokens[request.key] for request in requests])
    engine.close()
    return found


async def generated(cluster: Cluster, prompts: list[list[int]]) -> list[list[Result]]:
    async with AsyncClient(cluster.gateway.address) as client:

        async def finish(index: int, way: dict[str, float]) -> Result:
            params = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": index, **way}
            return await client.generate(prompt_token_ids=prompts[index], **params).finish()

        return [
            await asyncio.gather(*(finish(index, way) for index in range(len(prompts))))
            for way in WAYS
        ]


def tokens_of(results: list[list[Result]]) -> list[list[list[int]]]:
    return [[list(result.token_ids) for result in each] for each in results]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, num_hidden_layers=5, has_varied_vectors=True)
    return tmp_path


@pytest.mark.parametrize(("device", "case"), on_each_device(CASES))
async def test_tokens_are_those_of_one_gpu(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory, device: str, case: Case
) -> None:
    prompts = [prompt_of(length) for length in LENS]
    known = expected(model_dir, device, prompts)
    certs = None
    if case.has_tls:
        certs = tmp_path_factory.mktemp("certs") / "certs"
        make_certificates(certs)
    with running(
        LOOPBACK,
        model_dir,
        spread=case.spread,
        single=case.single,
        size=case.size,
        certs=certs,
        devices=devices_of(device, case.size),
        more=(*COMMON, *case.pool, "--kv-transport", case.transport),
    ) as cluster:
        await all_serve(cluster, START_S)
        results = await generated(cluster, prompts)
        again = await generated(cluster, prompts)  # prefixes are cached
    assert tokens_of(results) == known
    assert tokens_of(again) == known
    by = {result.transport for each in results for result in each}
    print(f"hand-offs over {by}")
    if device == "cuda" or case.transport == "tcp":
        assert by == {"cuda_ipc" if case.transport == "auto" else "tcp"}


@pytest.mark.parametrize(("device", "case"), on_each_device([Case(("prefill", "decode"), ())]))
async def test_a_rank_that_ends_ends_its_engine_and_all_begins_anew(
    model_dir: Path, device: str, case: Case
) -> None:
    prompts = [prompt_of(length) for length in LENS]
    known = expected(model_dir, device, prompts)
    with running(
        LOOPBACK,
        model_dir,
        spread=case.spread,
        single=case.single,
        devices=devices_of(device, case.size),
        more=(*COMMON, *case.pool),
    ) as cluster:
        await all_serve(cluster, START_S)
        is_lost = cluster.printed("decode-spread", "engine lost: rank 1 on 127.0.0.1 ended")
        end_rank(cluster, LOOPBACK)
        await until(is_lost)
        await all_serve(cluster, START_S)
        assert tokens_of(await generated(cluster, prompts)) == known
