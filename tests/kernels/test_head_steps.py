"""A draft head in a GPU's steps, without a GPU: whole engines with interpreted kernels. Events are
simulated, and graphs, which run their step again at each replay.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes.combinations.decode_columns import columns_of
from fakes.communicator import ThreadGroup
from fakes.speculation.head_engines import HeadEngine, Recorder, eagle3, mtp, requests
from kernels.test_steps_by_ranks import Event, Graph

from kernels import test_steps_by_ranks

pytest.importorskip("triton")

from baton.core.engine_config import EngineConfig
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.batch import SequenceSlice, StepBatch
from baton.engine.execution.gpu import gpu_steps
from baton.engine.execution.gpu.cuda_graphs import ProductTimes, StepGraphs
from baton.engine.execution.gpu.gpu_steps import GpuSteps
from baton.engine.execution.runner import ModelRunner
from baton.engine.execution.step_builder import BuiltSteps, StepBuilder
from baton.engine.kv.kv_memory import CpuKvMemory, KvLayout
from baton.kernels.attention import decode_shares
from baton.kernels.sampling.sample_spec import SampleSpec

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the real thing")

BLOCKS, MOST, MAX_NUM_SEQS = 60, 3, 3

no_device = test_steps_by_ranks.no_device  # ranks may be threads


class CompletedEvent(Event):
    def query(self) -> bool:
        return True


ONE_IS_SLOW = pytest.mark.parametrize(
    "config", [eagle3, pytest.param(mtp, marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture(scope="module", params=[eagle3, mtp])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("head")
    drafting = json.dumps(request.param(folder) | {"num_speculative_tokens": MOST})
    return EngineConfig(
        model=str(folder),
        device="cpu",
        num_kv_blocks=BLOCKS,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=100,
        max_num_batched_tokens=32,
        mixed_graph_tokens=0,
        speculative_config=drafting,
    )


def by_gpu_steps(builder: StepBuilder, layout: KvLayout, num_blocks: int) -> BuiltSteps:
    """Replaces StepBuilder.on_cpu."""
    builder._choose_max_num_seqs(num_blocks)
    builder.prefill_attention = "triton"
    kv = CpuKvMemory(layout, num_blocks)
    return BuiltSteps(kv, builder.gpu_steps(kv.tensor), None)


@pytest.fixture
def on_gpu(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelRunner]:
    """A runner with a GPU's steps, built as on a GPU."""
    empty = torch.empty

    def unpinned(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*shape, **options).zero_()

    def capture(graphs: StepGraphs, size: int, step: Any, library: str) -> None:
        graphs._graphs[size] = Graph(size, step)  # type: ignore[assignment]

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "Event", CompletedEvent)
    monkeypatch.setattr(StepGraphs, "capture", capture)
    monkeypatch.setattr(gpu_steps, "measure_products", lambda *args: ProductTimes({}, {}))
    monkeypatch.setattr(gpu_steps, "_MAX_PROMPT_TOKENS", 24)
    monkeypatch.setattr(decode_shares, "_PROGRAMS_WANTED", 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepBuilder, "on_cpu", by_gpu_steps)
        runner = ModelRunner(config)
    steps: Any = runner._steps
    steps.capture_graphs()
    steps.head.capture_graphs()
    yield runner
    runner.close()


def token_ids(outputs: dict[str, list[Any]]) -> dict[str, list[int]]:
    return {key: [token.token_id for token in tokens] for key, tokens in outputs.items()}


@ONE_IS_SLOW
def test_tokens_and_drafts_are_those_of_a_cpu(config: EngineConfig, on_gpu: ModelRunner) -> None:
    """Tokens and drafts equal a CPU's for prompts in chunks and whole, decodes in graphs and beside
    prompts, greedy, sampled and filtered."""
    on_cpu, requested = ModelRunner(config), requests(3, 6)
    wanted, found = Recorder(on_cpu, MOST), Recorder(on_gpu, MOST)
    limits = {"max_num_seqs": MAX_NUM_SEQS, "max_model_len": 100}
    outputs = HeadEngine(on_gpu, found, BLOCKS, **limits).run(requested)
    expected = HeadEngine(on_cpu, wanted, BLOCKS, **limits).run(requested)
    on_cpu.close()
    assert token_ids(outputs) == token_ids(expected)
    assert found.share_of(wanted) == 1.0 and sum(map(bool, found.found.values())) > 4


@ONE_IS_SLOW
def test_a_step_is_counted_behind_the_heads_part(
    on_gpu: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step counts as complete only after the head's part, since its KV includes the head's: until
    then pullers may not read the blocks."""
    launched: list[str] = []

    class Count:
        def mark(self) -> int:
            launched.append("counted")
            return launched.count("counted")

    head, steps = on_gpu._drafter, on_gpu._steps
    assert head is not None and isinstance(steps, GpuSteps)
    monkeypatch.setattr(head, "follow", lambda *args: launched.append("head"))
    steps.count_in(Count())  # type: ignore[arg-type]
    spec = SampleSpec(SamplingParams(temperature=0.0), key=1)
    chunk = SequenceSlice([5] * 3, 0, [2], None, next_token_id=6)
    for number, piece in enumerate(
        [chunk, SequenceSlice([6, 7], 3, [2], spec), SequenceSlice([8], 5, [2], spec)], 1
    ):
        assert on_gpu.launch([piece]).number == number
    assert launched == ["head", "counted"] * 3


@ONE_IS_SLOW
def test_two_ranks_draft_what_one_does(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts equal one rank's if each rank has a part of the head, and a part of the vocabulary,
    which is gathered."""
    monkeypatch.setattr(decode_shares, "_PROGRAMS_WANTED", 16)
    alone, spec = ModelRunner(config), SampleSpec(SamplingParams(temperature=0.0), key=1)
    draw = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 64, (n,), generator=draw).tolist() for n in (20, 7)]
    batch = [
        SequenceSlice(prompt, 0, [2 + 3 * index, 3 + 3 * index], spec)
        for index, prompt in enumerate(prompts)
    ]

    def drafts(runner: ModelRunner) -> list[list[int]]:
        drafting = []
        for piece, token in zip(batch, runner.launch(batch).collect(), strict=True):
            assert token is not None
            ids, start = [token.token_id], len(piece.token_ids)
            drafting.append(
                piece._replace(token_ids=ids, start=start, draft_samples=(spec,) * MOST)
            )
        return runner.draft(drafting)

    def of_rank(communicator: Any) -> list[list[int]]:
        return drafts(ModelRunner(replace(config, tensor_parallel_size=2), None, communicator))

    monkeypatch.setattr(StepBuilder, "on_cpu", by_gpu_steps)
    with ThreadPoolExecutor(2) as threads:
        found = [*threads.map(of_rank, ThreadGroup(2).ranks())]
    assert found == [drafts(alone)] * 2 and all(len(each) == MOST for each in found[0])


def test_decodes_in_columns_leave_the_head_what_slices_do(on_gpu: ModelRunner) -> None:
    spec, draw = SampleSpec(SamplingParams(temperature=0.0), key=1), torch.Generator()
    prompts = [torch.randint(3, 64, (n,), generator=draw.manual_seed(n)).tolist() for n in (20, 7)]
    batch = [
        SequenceSlice(prompt, 0, [2 + 3 * index, 3 + 3 * index], spec)
        for index, prompt in enumerate(prompts)
    ]

    def behind(pieces: list[SequenceSlice], step: Sequence[SequenceSlice]) -> list[SequenceSlice]:
        found = []
        for piece, token in zip(pieces, on_gpu.launch(step).collect(), strict=True):
            assert token is not None
            start = piece.start + len(piece.token_ids)
            found.append(piece._replace(token_ids=[token.token_id], start=start))
        return found

    drafts = []
    for as_columns in (False, True):
        decodes = behind(batch, batch)
        step = StepBatch(columns_of(decodes, 16), ()) if as_columns else decodes
        drafting = [one._replace(draft_samples=(spec,) * MOST) for one in behind(decodes, step)]
        drafts.append((drafting, on_gpu.draft(drafting)))
    assert drafts[0] == drafts[1] and all(len(each) == MOST for each in drafts[0][1])
