"""A GPU's steps on several hosts, with several in flight, without a GPU: stages receive and send
outside their graphs, whose memory the next replay overwrites.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from fakes.ranks.tcp_columns import tcp_stages
from kernels.test_steps_by_ranks import Graph, Ranks

from kernels import test_steps_by_ranks

pytest.importorskip("triton")

from baton.core.engine_config import EngineConfig
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution import step_builder
from baton.engine.execution.batch import SequenceSlice
from baton.engine.execution.gpu import gpu_steps
from baton.engine.execution.gpu.cuda_graphs import ProductTimes, StepGraphs
from baton.engine.execution.gpu.gpu_steps import GpuSteps
from baton.engine.execution.runner import ModelRunner
from baton.engine.execution.step_builder import BuiltSteps, StepBuilder
from baton.engine.hosts.tcp_stages import TcpStages
from baton.engine.kv.kv_memory import CpuKvMemory, KvLayout
from baton.engine.parallel.torch_communicator import StageOfOne
from baton.kernels.sampling.sample_spec import SampleSpec

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the real thing")

no_device = test_steps_by_ranks.no_device  # ranks are threads

BLOCK_SIZE, NUM_STAGES = 16, 3
GREEDY = SampleSpec(SamplingParams(temperature=0.0), key=1)


class FixedGraph:
    """The graph of a step whose output overwrites that of the previous replay. It has no
    `stages`."""

    def __init__(self, size: int, step: Callable[[], torch.Tensor], stages: TcpStages) -> None:
        self.size, self._step, self._stages = size, step, stages
        self.output: Any = None
        self.num_replays = 0

    def replay(self) -> None:
        stages = self._stages
        ends, stages._before, stages._behind = (stages._before, stages._behind), None, None
        found = self._step()
        stages._before, stages._behind = ends
        self.output = found.clone() if self.output is None else self.output.copy_(found)
        self.num_replays += 1


def capture(steps: GpuSteps) -> list[FixedGraph]:
    """Capture all small graphs, of decodes and of prompts."""
    graphs: list[FixedGraph] = []
    for kind in (steps.graphs, steps.prefill_graphs[0]):
        for size in [size for size in kind.sizes if size <= 64]:
            inputs = kind.inputs(size)
            step = partial(steps._decode if kind is steps.graphs else steps._forward, inputs)
            stages = steps.model.communicator.stages
            assert isinstance(stages, TcpStages)
            graphs.append(FixedGraph(size, step, stages))
            kind._graphs[size] = graphs[-1]  # type: ignore[assignment]
    return graphs


def test_steps_in_flight_do_not_meet(tmp_path: Path) -> None:
    """Steps of prompts, with and without graphs, and of decodes do not overwrite each other's data,
    whether the first stage finishes all steps before the others begin or all stages run
    concurrently."""
    write_checkpoint(tmp_path, seed=1, has_varied_vectors=True, vocab_size=40, num_hidden_layers=3)
    config = EngineConfig(model=str(tmp_path), device="cpu", num_kv_blocks=200)
    alone, ranks = ModelRunner(config), Ranks(config, 1, NUM_STAGES, by_tcp=True)
    rng = random.Random(3)
    lens = [5, 70, 30, 9, 100, 20]  # the longer ones have no graph
    prompts = [[rng.randrange(3, 40) for _ in range(length)] for length in lens]
    tables = [list(range(2 + 8 * index, 10 + 8 * index)) for index in range(len(lens))]

    def steps(starts: list[int]) -> list[list[SequenceSlice]]:
        """One step for each sequence."""
        return [
            [SequenceSlice(ids[start:], start, table, GREEDY)]
            for ids, start, table in zip(prompts, starts, tables, strict=True)
        ]

    graphs = [capture(each) for each in ranks.steps]
    starts = [0] * len(lens)
    for _ in range(4):
        batches = steps(starts)
        expected = [alone.launch(batch).collect() for batch in batches]
        found = [step.collect() for step in ranks.launch_ahead(batches)]
        starts = [len(prompt) for prompt in prompts]
        for prompt, (one,), (other,) in zip(prompts, found, expected, strict=True):
            assert one is not None and other is not None and one.token_id == other.token_id
            prompt.append(one.token_id)
    for each in graphs:
        assert sum(graph.num_replays for graph in each) == 4 + 3 * len(lens)
    ranks.close()


def test_stages_start_at_their_own_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start on a GPU works across hosts: the largest step, the least number of blocks of any
    stage, one choice of graphs for all, captures. The tokens are those of one process."""
    write_checkpoint(tmp_path, seed=1, has_varied_vectors=True, vocab_size=40, num_hidden_layers=3)
    config = EngineConfig(
        model=str(tmp_path), device="cpu", num_kv_blocks=60, max_num_seqs=3, mixed_graph_tokens=0
    )
    alone = ModelRunner(config)
    as_on_a_gpu(monkeypatch)
    shared: list[torch.Tensor] = []

    def measure(products: Any, rows: Any, like: Any, share: Callable[..., None]) -> ProductTimes:
        shared.append(torch.rand(2, 3))
        share(shared[-1])
        return ProductTimes({}, {})

    monkeypatch.setattr(gpu_steps, "measure_products", measure)
    config = dataclasses.replace(config, pipeline_parallel_size=NUM_STAGES)

    def start(stages: TcpStages) -> ModelRunner:
        communicator = StageOfOne(lambda handle: [handle])
        communicator.stages = stages
        return ModelRunner(config, None, communicator)

    with ThreadPoolExecutor(NUM_STAGES) as threads:
        started = list(threads.map(start, tcp_stages(NUM_STAGES, is_on_gpu=True)))
        assert [each.kv.num_blocks for each in started] == [60 - NUM_STAGES] * NUM_STAGES
        assert len(shared) == NUM_STAGES and all(torch.equal(x, shared[0]) for x in shared)
        for ids, start_at in (([3, 4, 5, 6], 0), ([7], 4), ([8], 5)):
            batch = [SequenceSlice(ids, start_at, [2], GREEDY)]
            launched = list(threads.map(lambda each, batch=batch: each.launch(batch), started))
            ((found,), (expected,)) = launched[-1].collect(), alone.launch(batch).collect()
            assert found is not None and expected is not None
            assert found.token_id == expected.token_id
        for each in started:
            each.close()


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """From this moment on runners start as on a GPU, later stages with fewer blocks."""

    def start(self: StepBuilder, layout: KvLayout, num_blocks: int) -> BuiltSteps:
        return self.on_gpu(layout)

    def choose(*args: Any) -> int:
        *_, run_largest_step = args
        run_largest_step()
        return 60 - next(nums_fewer)

    def capture(graphs: StepGraphs, size: int, step: Any, library: str) -> None:
        step()
        graphs._graphs[size] = Graph(size, step)  # type: ignore[assignment]

    nums_fewer = itertools.count(1)
    monkeypatch.setattr(StepBuilder, "on_cpu", start)
    monkeypatch.setattr(step_builder, "choose_num_gpu_blocks", choose)
    monkeypatch.setattr(
        step_builder, "CudaKvMemory", lambda layout, n, device: CpuKvMemory(layout, n)
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    monkeypatch.setattr(StepGraphs, "capture", capture)
