"""A cluster on two GPUs with faults: kill -9, pauses, small pools, a long mix; also with other
transports and with sides of unequal size.

The first GPU prefills, the second decodes, in float32, so that one process on a GPU is the
reference. The cluster keeps its ports: a killed node restarts at the same address.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from deployments import free_port
from fault_scenes import mixed_run
from fault_scenes.fault_cluster import Cluster, cluster, write_model
from fault_scenes.faults import Scene, Stream
from fault_scenes.mixed_run import Outcome

from baton.core.engine_config import EngineConfig
from baton.core.request.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(400),
]

NUM_REQUESTS = 2000
LEASE_S = 0.5  # shorter than the gateway's limit for a silent engine
COMMON = (
    *("--dtype", "float32", "--max-num-seqs", "64"),
    *("--max-num-batched-tokens", "256", "--lease-s", str(LEASE_S)),
)
NODES = ("gateway-0", "prefill-0", "decode-0")


class GpuReference:
    """A reference for `Scene` on a GPU, which reports near-ties."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        config = EngineConfig(
            model=str(model_dir),
            load_format="dummy",
            device="cuda:0",
            dtype="float32",
            num_kv_blocks=4000,
            max_num_seqs=64,
            enable_prefix_caching=False,
        )
        self.inner = mixed_run.Reference(config)
        self._near_ties: dict[int, list[str]] = {}  # by stream

    def tokens(self, streams: list[Stream]) -> list[list[int]]:
        """The streams' own tokens, after they were compared."""
        for stream in streams:
            outcome = Outcome()
            self.inner.compare([stream], outcome)
            self._near_ties[id(stream)] = outcome.near_ties
        return [list(stream.tokens) for stream in streams]

    def num_near_ties(self, stream: Stream, _: list[int]) -> int:
        """The near-ties found in the comparison."""
        near_ties = self._near_ties.pop(id(stream))
        if near_ties:
            print(f"near-ties: {near_ties}")
        return len(near_ties)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> GpuReference:
    return GpuReference(write_model(tmp_path_factory.mktemp("model")))


def gpu_cluster(
    reference: GpuReference, **flags: tuple[str, ...]
) -> AbstractContextManager[Cluster]:
    prefill = ("--gpus", "0", "--port", str(free_port()), *flags.get("prefill", ()))
    decode = ("--gpus", "1", "--port", str(free_port()), *flags.get("decode", ()))
    return cluster(
        reference.model_dir,
        *NODES,
        gateway_0=("--recovery-wait-s", "60"),
        prefill_0=prefill,
        decode_0=decode,
        node=COMMON,
    )


@pytest.fixture(scope="module")
def system(reference: GpuReference) -> Iterator[Cluster]:
    """Small pools: the decode node runs out of blocks, the prefill node out of credit."""
    sizes = ("--num-kv-blocks", "200")
    with gpu_cluster(reference, prefill=sizes, decode=sizes) as running:
        yield running


def used_bytes(gpu: int) -> int:
    free_bytes, total_bytes = torch.cuda.mem_get_info(gpu)
    return total_bytes - free_bytes


@pytest.mark.parametrize("part", ["engine", "node"])
@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_kill_9_under_load(
    system: Cluster, reference: GpuReference, name: str, part: str
) -> None:
    """A node killed with mappings open and copies in progress restarts on its ports, with its
    memory freed."""
    gpu = 0 if name.startswith("prefill") else 1
    async with Scene(system, reference) as scene:
        before, address = used_bytes(gpu), system.processes[name].address
        streams = [scene.ask(600, 40) for _ in range(24)]
        await streams[0].reached(2)
        scene.kill(name, part)
        await scene.check()
        assert system.processes[name].address == address
        print(f"{name}, {part}: {max(max(s.result.times.gaps_s) for s in streams):.2f} s")
        until_s = time.monotonic() + 20
        while used_bytes(gpu) > before + (200 << 20):
            assert time.monotonic() < until_s, f"{used_bytes(gpu) - before} bytes are still taken"
            await asyncio.sleep(0.1)


async def test_a_lease_that_runs_out_during_pulls(system: Cluster, reference: GpuReference) -> None:
    """Streams stay right if the puller pauses for longer than a lease and the source reuses the
    blocks."""
    async with Scene(system, reference) as scene:
        streams = [scene.ask(600, 30) for _ in range(24)]
        await streams[0].reached(1)
        with scene.stopped("decode-0", "engine"):
            await asyncio.sleep(1.6 * LEASE_S)
        await scene.check()
        attempts = [stream.result.attempts for stream in streams]
        print(f"attempts: {attempts}")


async def test_more_than_the_pools_hold(system: Cluster, reference: GpuReference) -> None:
    async with Scene(system, reference) as scene:
        for _ in range(60):
            scene.ask(900, 60)
        await scene.check()


async def test_a_mix_of_requests_while_each_node_is_killed(
    system: Cluster, reference: GpuReference
) -> None:
    requested = mixed_run.draw(NUM_REQUESTS, seed=1, max_prompt_tokens=600)
    kills = {600: "decode-0", 1300: "prefill-0"}
    began_s = time.monotonic()
    async with Scene(system, reference) as scene:
        outcome = await mixed_run.run(system, scene, requested, kills)
        took_s = time.monotonic() - began_s
        await scene.heal()
        await scene.wait_idle()
        await mixed_run.assert_fsck_is_clean(system)
        reference.inner.compare(scene.streams, outcome)
    print(mixed_run.describe(outcome, seconds=round(took_s, 1)))
    assert outcome.ended["finished"] + outcome.ended["cancelled"] == NUM_REQUESTS


@pytest.mark.parametrize("transport", ["nccl", "cuda_staged"])
async def test_other_transports_are_named_and_right(
    reference: GpuReference, transport: str
) -> None:
    with gpu_cluster(reference, decode=("--kv-transport", transport)) as running:
        async with Scene(running, reference) as scene:
            streams = [scene.ask(200 + 50 * i, 20) for i in range(8)]
            await scene.check()
            assert {stream.result.transport for stream in streams} == {transport}
        printed = "\n".join(running.processes["decode-0"].printed)
        assert f"over {transport} at" in printed


@pytest.mark.parametrize(("prefill_gpus", "decode_gpus"), [("0", "0,1"), ("0,1", "1")])
async def test_sides_of_unequal_size(
    reference: GpuReference, prefill_gpus: str, decode_gpus: str
) -> None:
    """Hand-offs work if one side has two ranks, one of which shares its GPU with the other side,
    which nccl does not support."""

    def side(gpus: str) -> tuple[str, ...]:
        num_ranks = str(len(gpus.split(",")))
        return ("--gpus", gpus, "--tp", num_ranks, "--num-kv-blocks", "400")

    sides = {"prefill": side(prefill_gpus), "decode": side(decode_gpus)}
    with gpu_cluster(reference, **sides) as running:
        async with Scene(running, reference) as scene:
            streams = [scene.ask(200 + 50 * i, 20) for i in range(8)]
            await scene.check()
            assert {stream.result.transport for stream in streams} == {"cuda_ipc"}


def test_one_process_repeats_itself(reference: GpuReference) -> None:
    """The reference is deterministic, or the comparisons above would mean nothing."""
    sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    requested = [
        mixed_run.PlannedRequest(tuple(range(3, 3 + n)), sampling, None) for n in (5, 100, 300)
    ]
    first, second = (
        [reference.inner.generate(one.prompt, one.sampling) for one in requested] for _ in range(2)
    )
    assert first == second and all(len(tokens) == 20 for tokens in first)
