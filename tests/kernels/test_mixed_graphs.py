"""Decodes and prompt tokens in one CUDA graph, without a GPU: with padding in between, over the
arrays of graphs. Events are simulated, and graphs, which run their step again.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from kernels.test_steps_by_ranks import Event, Graph

pytest.importorskip("triton")

from fakes.combinations.decode_columns import columns_of

from baton.core.engine_config import EngineConfig
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.batch import SampledToken, SequenceSlice, StepBatch
from baton.engine.execution.gpu import gpu_steps
from baton.engine.execution.gpu.cuda_graphs import ProductTimes
from baton.engine.execution.gpu.gpu_steps import GpuSteps
from baton.engine.execution.runner import ModelRunner
from baton.kernels.attention.attention import MAX_GRAPH_TOKENS
from baton.kernels.attention.attention_gpu import make_gpu_attention
from baton.kernels.attention.attention_triton import TritonGraphPrefill
from baton.kernels.sampling.sample_spec import SampleSpec

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the real thing")

MAX_NUM_SEQS, MAX_LEN = 24, 128
PLAIN = SampleSpec(SamplingParams(temperature=0.0), key=1)


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    empty = torch.empty

    def unpinned(*shape: int, pin_memory: bool = False, **options: object) -> torch.Tensor:
        return empty(*shape, **options).zero_()  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    write_checkpoint(tmp_path, seed=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    return ModelRunner(EngineConfig(model=str(tmp_path), device="cpu", num_kv_blocks=300))


def steps_of(runner: ModelRunner, *, has_graphs: bool, max_drafts: int = 0) -> GpuSteps:
    heads = runner.heads.num_heads
    attention = make_gpu_attention(
        runner.kv.tensor,
        heads,
        MAX_NUM_SEQS,
        MAX_LEN,
        torch.float32,
        prefill="triton",
        rows_each=1 + max_drafts,
    )
    mixed_tokens = 64 if has_graphs else 0
    steps = GpuSteps(runner.model, attention, 16, MAX_NUM_SEQS, mixed_tokens, max_drafts)
    for room, graphs in steps.prefill_graphs.items():
        for size in graphs.sizes:
            inputs, padding = graphs.inputs(size), [steps._padding(size)]
            batch = StepBatch.of(padding)
            attention.plan(batch.metadata(inputs[2], graph_decodes=min(room, size)))
            graph = Graph(size, partial(steps._forward, inputs))
            graphs._graphs[size] = graph  # type: ignore[assignment]
    return steps


@pytest.mark.parametrize(
    ("num_decodes", "prompts"), [(22, (3, 9)), pytest.param(17, (40,), marks=pytest.mark.slow)]
)
def test_the_tokens_are_those_of_a_step_without_padding(
    runner: ModelRunner, num_decodes: int, prompts: tuple[int, ...]
) -> None:
    rng = random.Random(2)
    contexts = [rng.randrange(1, 60) for _ in range(num_decodes + len(prompts))]
    lens = [*[1] * num_decodes, *prompts]
    ids = [
        [rng.randrange(3, 200) for _ in range(c + n)] for c, n in zip(contexts, lens, strict=True)
    ]

    def piece(index: int, first: int, last: int) -> SequenceSlice:
        table = range(2 + 8 * index, 10 + 8 * index)
        return SequenceSlice(ids[index][first:last], first, table, PLAIN)

    for index, context in enumerate(contexts):
        runner.launch([piece(index, 0, context)]).collect()
    pieces = [piece(i, c, c + n) for i, (c, n) in enumerate(zip(contexts, lens, strict=True))]
    pieces[-1] = pieces[-1]._replace(sample=None)  # not the prompt's last chunk
    padded = steps_of(runner, has_graphs=True)
    assert padded._find_prefill_graph(StepBatch.of(pieces)) is not None
    found = padded.launch(pieces).collect()
    expected = runner.launch(pieces).collect()
    assert found[-1] is None
    for one, other in zip(found[:-1], expected[:-1], strict=True):
        assert isinstance(one, SampledToken) and isinstance(other, SampledToken)
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


SPECS = [
    PLAIN,
    SampleSpec(SamplingParams(temperature=0.9), key=7),
    SampleSpec(SamplingParams(temperature=0.9, top_k=20, top_p=0.8), key=8),
    SampleSpec(SamplingParams(temperature=0.0, logit_bias=((3, 2.0),), logprobs=3), key=9),
]


@pytest.mark.parametrize("way", ["graph", "graph beside a prompt", "no graph"])
def test_decodes_in_columns_have_the_tokens_of_slices(runner: ModelRunner, way: str) -> None:
    rng = random.Random(5)
    contexts = [rng.randrange(1, 60) for _ in range(6)]
    ids = [[rng.randrange(3, 200) for _ in range(64)] for _ in contexts]
    tables = [range(2 + 8 * index, 10 + 8 * index) for index in range(len(contexts))]
    for context, tokens, table in zip(contexts, ids, tables, strict=True):
        runner.launch([SequenceSlice(tokens[:context], 0, table, PLAIN)]).collect()
    pieces = [
        SequenceSlice(tokens[context : context + 1], context, table, SPECS[index % len(SPECS)])
        for index, (context, tokens, table) in enumerate(zip(contexts, ids, tables, strict=True))
    ]
    prompts = [SequenceSlice(ids[0][:9], 0, range(60, 62), PLAIN)] if "prompt" in way else []
    steps = steps_of(runner, has_graphs=way != "no graph")
    if way == "graph":
        for size in steps.graphs.sizes:
            replayed = Graph(size, partial(steps._decode, steps.graphs.inputs(size)))
            steps.graphs._graphs[size] = replayed  # type: ignore[assignment]
    expected = steps.launch([*pieces, *prompts]).collect()
    for num_others in (0, 2):
        columns = columns_of(pieces[num_others:], 16)
        batch = StepBatch(columns, [*pieces[:num_others], *prompts])
        found = steps.launch(batch).collect()
        n = len(columns)
        assert [*found[n : n + num_others], *found[:n], *found[len(pieces) :]] == expected
        known = [token.token_id for token in expected if token is not None]
    behind = [one._replace(start=one.start + 1, follows=row) for row, one in enumerate(pieces)]
    with_tokens = [
        one._replace(token_ids=[token], follows=None)
        for one, token in zip(behind, known, strict=False)
    ]
    expected = steps.launch(with_tokens).collect()
    assert steps.launch(pieces).collect() is not None  # the next step needs its tokens
    assert steps.launch(StepBatch(columns_of(behind, 16), ())).collect() == expected


@pytest.mark.parametrize("way", ["graph", "graph beside a prompt", "no graph"])
def test_drafts_have_the_tokens_of_a_step_of_a_cpu(runner: ModelRunner, way: str) -> None:
    """Sequences with different numbers of drafts get the CPU's tokens in one graph."""
    rng = random.Random(4)
    nums_drafts = (0, 3, 1, 2, 0)
    contexts = [rng.randrange(1, 60) for _ in nums_drafts]
    ids = [[rng.randrange(3, 200) for _ in range(64)] for _ in contexts]

    def piece(index: int, first: int, last: int) -> SequenceSlice:
        table = range(2 + 8 * index, 10 + 8 * index)
        return SequenceSlice(ids[index][first:last], first, table, SPECS[index % len(SPECS)])

    for index, context in enumerate(contexts):
        runner.launch([piece(index, 0, context)]).collect()
    pieces = []
    for index, (context, num_drafts) in enumerate(zip(contexts, nums_drafts, strict=True)):
        samples = [rng.choice(SPECS) for _ in range(num_drafts)]
        one = piece(index, context, context + 1 + num_drafts)
        pieces.append(one._replace(draft_samples=samples))
    if way == "graph beside a prompt":
        pieces.append(SequenceSlice(ids[0][:9], 0, range(60, 62), PLAIN))
    steps = steps_of(runner, has_graphs=True, max_drafts=3)
    assert (steps._find_prefill_graph(StepBatch.of(pieces)) is not None) == (
        len(pieces) > len(contexts)
    )
    if way == "graph":
        for size in steps.graphs.sizes:
            replayed = Graph(size, partial(steps._decode, steps.graphs.inputs(size)))
            steps.graphs._graphs[size] = replayed  # type: ignore[assignment]
    found = steps.launch(pieces).collect()
    expected = runner.launch(pieces).collect()
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one is not None and other is not None
        rows, wanted = ([*each.at_drafts, each] for each in (one, other))
        assert len(rows) == (1 if index >= len(contexts) else 1 + nums_drafts[index])
        assert [row.token_id for row in rows] == [row.token_id for row in wanted]
        for row, other_row in zip(rows, wanted, strict=True):
            assert row.logprob == pytest.approx(other_row.logprob, abs=1e-4)
            assert [of for of, _ in row.top] == [of for of, _ in other_row.top]


def test_other_steps_have_no_such_graph(runner: ModelRunner) -> None:
    steps = steps_of(runner, has_graphs=True)
    decodes = [SequenceSlice([5], 3, [2], PLAIN)] * 17

    def fits(*more: SequenceSlice) -> bool:
        return steps._find_prefill_graph(StepBatch.of([*decodes, *more])) is not None

    assert fits(SequenceSlice([5] * 64, 0, range(2, 6), None))
    assert not fits(), "decodes alone"
    assert not fits(SequenceSlice([5] * 65, 0, range(2, 7), None)), "more tokens than captured"
    assert not fits(*[SequenceSlice([5] * 2, 0, [2], None)] * 16), "as many as with padding"
    assert list(steps_of(runner, has_graphs=False).prefill_graphs) == [0]


def test_prompts_alone_that_are_long_take_the_graphs_for_both(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = steps_of(runner, has_graphs=True)

    def room(start: int, num_tokens: int) -> int | None:
        table = range(2, 3 + (start + num_tokens) // 16)
        piece = SequenceSlice([5] * num_tokens, start, table, None)
        found = steps._find_prefill_graph(StepBatch.of([piece]))
        return None if found is None else found[0]

    assert room(0, 60) == 0
    assert room(940, 60) == 0
    monkeypatch.setattr(gpu_steps, "_MAX_PROMPT_PAIRS", 60_000 - 1)
    assert room(940, 60) == MAX_NUM_SEQS
    monkeypatch.setattr(gpu_steps, "_MAX_PROMPT_TOKENS", 50)
    assert room(0, 60) == MAX_NUM_SEQS
    assert room(0, 65) is None


def test_the_largest_graph_of_a_kind_stays_where_more_rows_are_faster(runner: ModelRunner) -> None:
    steps = steps_of(runner, has_graphs=True)
    steps.make_graphs(ProductTimes({88: 2.0, 128: 1.0, 512: 2.0, 576: 1.0}, {}))
    largest = {room: graphs.sizes[-1] for room, graphs in steps.prefill_graphs.items()}
    assert largest == {0: 512, MAX_NUM_SEQS: MAX_NUM_SEQS + 64}
    for graphs in steps.prefill_graphs.values():
        assert [graphs.inputs(size).shape[1] for size in graphs.sizes] == graphs.sizes


def test_a_step_that_fills_a_graph_is_padded_by_no_kind(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that fills its graph needs no padding, with few decodes and with the most: their
    largest graphs differ."""
    monkeypatch.setattr(gpu_steps, "_FEW_DECODES", 8)
    steps = steps_of(runner, has_graphs=True)
    few, many = (steps.prefill_graphs[room].sizes for room in (8, MAX_NUM_SEQS))
    assert few[-1] == 72 and many[-1] == 88
    assert set(steps.mixed_rows) <= set(many)
    assert {size for size in steps.mixed_rows if size <= few[-1]} <= set(few)
    assert steps_of(runner, has_graphs=False).mixed_rows == ()


@pytest.mark.parametrize("max_model_len", [16, 100])
def test_padding_alone_has_a_place_in_its_arrays(runner: ModelRunner, max_model_len: int) -> None:
    """A capture's arrays hold a single slice of all tokens, even if it is longer than any
    request."""
    part = TritonGraphPrefill(runner.kv.tensor, 2, torch.float32, MAX_NUM_SEQS, max_model_len)
    num_tokens = MAX_NUM_SEQS + MAX_GRAPH_TOKENS
    part.plan([num_tokens], [num_tokens], [[0] * -(-num_tokens // 16)], first_row=0)
