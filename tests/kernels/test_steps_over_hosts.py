"""A GPU's steps on several hosts, several in flight, without a GPU: what stages receive and send
lies in front of and behind their graphs, whose memory the next replay overwrites."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from kernels.test_steps_by_ranks import Ranks

from kernels import test_steps_by_ranks

pytest.importorskip("triton")

from baton.core.engine_config import EngineConfig
from baton.core.request.request import SamplingParams
from baton.engine.execution.batch import SequenceSlice
from baton.engine.execution.gpu_steps import GpuSteps
from baton.engine.execution.runner import ModelRunner
from baton.engine.hosts.tcp_stages import TcpStages
from baton.kernels.sampling.sample_spec import SampleSpec

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the real thing")

no_device = test_steps_by_ranks.no_device  # threads are ranks

BLOCK_SIZE, NUM_STAGES = 16, 3
GREEDY = SampleSpec(SamplingParams(temperature=0.0), key=1)


class FixedGraph:
    """Of a step, with its output where the replay before has left its own. It has no `stages`."""

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
    """All small graphs, of decodes and of prompts."""
    graphs: list[FixedGraph] = []
    for kind in (steps.graphs, steps.prefill_graphs[0]):
        for size in [size for size in kind.sizes if size <= 64]:
            inputs = kind.inputs(size)
            step = partial(steps._decode, inputs)
            if kind is not steps.graphs:
                step = partial(steps._graphed.forward, *inputs, steps._attention)
            stages = steps.model.communicator.stages
            assert isinstance(stages, TcpStages)
            graphs.append(FixedGraph(size, step, stages))
            kind._graphs[size] = graphs[-1]  # type: ignore[assignment]
    return graphs


def test_steps_in_flight_do_not_meet(tmp_path: Path) -> None:
    """Prompts with graphs and without, decodes: the first stage is done with all of them before the
    others have begun, or all are at it at once."""
    write_checkpoint(tmp_path, seed=1, has_varied_vectors=True, vocab_size=40, num_hidden_layers=3)
    config = EngineConfig(model=str(tmp_path), device="cpu", num_kv_blocks=200)
    alone, ranks = ModelRunner(config), Ranks(config, 1, NUM_STAGES, by_tcp=True)
    rng = random.Random(3)
    lens = [5, 70, 30, 9, 100, 20]  # the longer ones have no graph
    prompts = [[rng.randrange(3, 40) for _ in range(length)] for length in lens]
    tables = [list(range(2 + 8 * index, 10 + 8 * index)) for index in range(len(lens))]

    def steps(starts: list[int]) -> list[list[SequenceSlice]]:
        """One for each sequence."""
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
