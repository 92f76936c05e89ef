"""A GPU's steps on several ranks, without a GPU: ranks are threads, Triton is interpreted.

Events are simulated, and graphs, which run their step again at each replay.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from fakes.communicator import ThreadGroup, ThreadStages, stage_links
from fakes.ranks.tcp_columns import tcp_stages

pytest.importorskip("triton")

from triton.runtime import interpreter

from baton.core.engine_config import EngineConfig
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.batch import SequenceSlice
from baton.engine.execution.gpu.gpu_steps import GpuSteps
from baton.engine.execution.runner import ModelRunner
from baton.engine.execution.runner_protocols import LaunchedStep
from baton.kernels.sampling.sample_spec import SampleSpec

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the real thing"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),  # a rank with padding only
]

WISHES = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.8),
    SamplingParams(temperature=0.0, logit_bias=((3, 2.0),), logprobs=3),
    SamplingParams(temperature=1.0, logprobs=2),
]
PROMPT_LENS = (10, 5, 17, 9, 3)


class Event:
    def __init__(self, *, enable_timing: bool = False) -> None:
        self.has_time = enable_timing

    def record(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        assert self.has_time and end.has_time
        return 0.0

    def synchronize(self) -> None: ...


class Graph:
    """The graph of a step of `size` tokens."""

    def __init__(self, size: int, step: Callable[[], torch.Tensor]) -> None:
        self.size, self._step = size, step

    def replay(self) -> None:
        self.output = self._step()


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    one_at_a_time, run = threading.RLock(), interpreter.GridExecutor.__call__
    rewrite = interpreter.InterpretedFunction.rewrite

    def run_alone(self: Any, *args: Any, **options: Any) -> None:
        with one_at_a_time:
            run(self, *args, **options)

    def rewrite_alone(self: Any) -> Any:
        with one_at_a_time:  # Python 3.11 cannot parse in several threads at once
            return rewrite(self)

    empty = torch.empty

    def unpinned(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*shape, **options).zero_()

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run_alone)
    monkeypatch.setattr(interpreter.InterpretedFunction, "rewrite", rewrite_alone)
    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)


class Ranks:
    """The GPU steps of each rank of one engine; `by_tcp`: of an engine on several hosts."""

    def __init__(
        self, config: EngineConfig, size: int, num_stages: int = 1, *, by_tcp: bool = False
    ) -> None:
        self._size = size
        self._threads = ThreadPoolExecutor(size * num_stages)
        config = dataclasses.replace(
            config, tensor_parallel_size=size, pipeline_parallel_size=num_stages
        )
        columns = [stage_links(num_stages) for _ in range(size)]
        ranks = []
        for stage in range(num_stages):
            for rank, links in zip(ThreadGroup(size).ranks(), columns, strict=True):
                rank.stages = ThreadStages(stage, links)
                ranks.append(rank)
        if by_tcp:
            for rank, stages in zip(
                ranks, tcp_stages(num_stages, size, is_on_gpu=True), strict=True
            ):
                rank.stages = stages
        self.steps = list(self._threads.map(partial(_steps, config), ranks))

    def launch(self, batch: list[SequenceSlice]) -> list[LaunchedStep]:
        """Launch on all ranks; returns the steps of the last stage, which samples."""
        launched = list(self._threads.map(lambda steps: steps.launch(batch), self.steps))
        for each in launched[: -self._size]:
            assert each.collect() == [None] * len(batch) and not each.prompt_logprobs()
        return launched[-self._size :]

    def launch_ahead(self, batches: list[list[SequenceSlice]]) -> list[LaunchedStep]:
        """Launch all batches on each rank, without waiting; returns the last rank's steps."""

        def launch_all(steps: GpuSteps) -> list[LaunchedStep]:
            return [steps.launch(batch) for batch in batches]

        return list(self._threads.map(launch_all, self.steps))[-1]

    def close(self) -> None:
        self._threads.shutdown()
        for steps in self.steps:
            steps.model.communicator.stages.close()


def _steps(config: EngineConfig, communicator: Any) -> GpuSteps:
    runner = ModelRunner(config, None, communicator)
    steps = GpuSteps(runner.model, runner._steps.attention, config.kv_block_size, 16)
    for size in steps.graphs.sizes:
        graph: Any = Graph(size, partial(steps._decode, steps.graphs.inputs(size)))
        steps.graphs._graphs[size] = graph
    return steps


# Vocabulary size, ranks per stage, stages, transport of several hosts. The last of four ranks has
# padding only.
SIZES = [(253, 2, 1, ""), (9, 4, 1, ""), (253, 2, 2, ""), (9, 1, 3, "tcp")]
SLOW_SIZES = [(320, 4, 1, ""), (9, 8, 1, ""), (253, 1, 3, ""), (253, 2, 2, "tcp")]


@pytest.fixture(
    params=[*SIZES, *(pytest.param(size, marks=pytest.mark.slow) for size in SLOW_SIZES)], ids=str
)
def engines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[ModelRunner, Ranks]]:
    """An engine with one rank on the CPU, and one with several."""
    vocab_size, size, num_stages, way = request.param
    write_checkpoint(
        tmp_path,
        seed=1,
        has_varied_vectors=True,
        num_attention_heads=8,
        head_dim=16,
        vocab_size=vocab_size,
        num_hidden_layers=3,
    )
    config = EngineConfig(model=str(tmp_path), device="cpu", num_kv_blocks=60)
    ranks = Ranks(config, size, num_stages, by_tcp=way == "tcp")
    yield ModelRunner(config), ranks
    ranks.close()


def test_tokens_and_scores_are_those_of_one_rank(engines: tuple[ModelRunner, Ranks]) -> None:
    """Prompts, then decodes, give one rank's results: greedy, sampled, filtered, biased, scored,
    with further samples."""
    alone, ranks = engines
    vocab_size, rng = alone.model_config.vocab_size, random.Random(3)
    sequences = [[rng.randrange(vocab_size) for _ in range(length)] for length in PROMPT_LENS]
    starts = [0] * len(sequences)
    for step in range(4):
        batch = []
        for index, (ids, wish) in enumerate(zip(sequences, WISHES, strict=True)):
            forks = (7, 8) if index == 1 and step in (0, 2) else ()
            spec = SampleSpec(wish, key=rng.getrandbits(64), fork_keys=forks)
            table = list(range(2 + 4 * index, 6 + 4 * index))
            batch.append(SequenceSlice(ids[starts[index] :], starts[index], table, spec))
        if step == 0:
            targets = batch[0].token_ids[1:]
            batch[0] = batch[0]._replace(prompt_targets=targets, num_prompt_top=2)
        expected, launched = alone.launch(batch), ranks.launch(batch)
        wanted, (found, *others) = expected.collect(), [each.collect() for each in launched]
        assert all(other == found for other in others)
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert one is not None and other is not None
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]
            assert [fork.token_id for fork in one.forks] == [fork.token_id for fork in other.forks]
            starts[index] = len(sequences[index])
            sequences[index].append(one.token_id)
        scores = [each.prompt_logprobs() for each in (launched[0], expected)]
        assert [list(each) for each in scores] == [[0] if step == 0 else []] * 2
        for mine, known in zip(*(each.get(0, ()) for each in scores), strict=True):
            assert mine.logprob == pytest.approx(known.logprob, abs=1e-4)


def test_plain_decodes_gather_no_logits(
    engines: tuple[ModelRunner, Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ranks = engines
    spec = SampleSpec(WISHES[1], key=5)
    monkeypatch.setattr("fakes.communicator.ThreadCommunicator.all_gather", None)
    (first, *others) = [
        each.collect() for each in ranks.launch([SequenceSlice([3, 4, 5], 0, [2], spec)])
    ]
    assert first[0] is not None and all(other == first for other in others)
    for each in ranks.launch([SequenceSlice([first[0].token_id], 3, [2], spec)]):
        assert each.collect()[0] is not None
