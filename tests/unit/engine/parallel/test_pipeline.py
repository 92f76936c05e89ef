"""Several stages give the results of one process, for all request features; their ranks are
threads.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoints import write_byte_tokenizer, write_checkpoint
from effort import number
from engines.generation import outputs_of
from engines.integrity import check_integrity
from fakes.adapters import merge, write_adapter
from fakes.ranks.played_ranks import PlayedProcess, play_ranks

from baton.core.engine_config import EngineConfig
from baton.core.errors import EngineFailed, StartupFailed
from baton.core.request.constraint import Constraint, ConstraintKind
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.kv.host_copies import CopyCost
from baton.engine.local import LocalEngine
from baton.engine.parallel.rank_channel import MessageKind
from baton.engine.scheduling.admission import OutputLengthEstimator
from baton.engine.scheduling.costs.step_cost_estimator import StepCostEstimator
from baton.engine.scheduling.outputs import StepOutput

NUM_LAYERS = 5
NUM_TOKENS = number(16, 20)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """Chunks are shorter than the prompts, and there are too few blocks for all requests."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, head_dim=16, num_hidden_layers=NUM_LAYERS)
    write_byte_tokenizer(folder)
    return EngineConfig(
        model=str(folder),
        device="cpu",
        num_kv_blocks=20,
        max_model_len=160,
        max_num_batched_tokens=48,
    )


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[PlayedProcess]:
    return play_ranks(monkeypatch)


def load(config: EngineConfig, **changes: object) -> LocalEngine:
    return LocalEngine.load(dataclasses.replace(config, **changes), lambda line: None)  # type: ignore[arg-type]


def requests() -> list[Request]:
    """Requests with a shared prefix, one for each way to sample."""
    prefix = tuple(range(3, 53))
    number = Constraint(ConstraintKind.REGEX, "[0-9]{3}-[a-f]{2,9}")
    ways = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9),
        SamplingParams(temperature=0.9, top_p=0.8, top_k=50, min_p=0.01),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4),
        SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2, logit_bias=((7, 2.0),)),
        SamplingParams(temperature=1.0, constraint=number),
        SamplingParams(temperature=0.0, use_beam_search=True, best_of=3),
    ]
    made = [
        Request(
            f"{index:032x}",
            0,
            (*prefix, 60 + index, 9),
            dataclasses.replace(way, max_tokens=NUM_TOKENS, seed=index),
        )
        for index, way in enumerate(ways)
    ]
    drawn = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=5)
    forks = ("a" * 32, "b" * 32)
    return [*made, Request("c" * 32, 0, (*prefix[:30], 4), drawn, fork_ids=forks)]


class Outcome:
    """All outputs of an engine, first with uncached and then with cached prompts."""

    def __init__(self, engine: LocalEngine) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.tops: dict[str, list[object]] = {}
        self.logprobs: list[float] = []
        for attempt in (0, 1):
            for request in requests():
                engine.engine.add(dataclasses.replace(request, attempt=attempt))
            while engine.engine.has_work:
                self._take(engine.engine.step())
        check_integrity(engine.engine)
        self.totals = engine.engine.stats.totals()

    def _take(self, output: StepOutput) -> None:
        assert not output.failed
        for token in output.tokens:
            self.tokens.setdefault(token.key, []).append(token.token_id)
            self.tops.setdefault(token.key, []).append([i for i, _ in token.top])
            self.logprobs.append(token.logprob)
        for beam in output.beams:
            self.tokens[beam.key] = [*beam.token_ids]
        for found in output.prompt_logprobs:
            tops = [[i for i, _ in each.top] for each in found.logprobs]
            self.tops.setdefault(f"{found.key} prompt", []).extend(tops)
            self.logprobs += [each.logprob for each in found.logprobs]


@pytest.fixture(scope="module")
def expected(config: EngineConfig) -> Iterator[Outcome]:
    engine = load(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutputLengthEstimator, "estimate", lambda *_: 1)
        yield Outcome(engine)
    engine.close()


SHAPES = [(3, 1), (2, 2)]
ALL_SHAPES = [(stages, size) for stages in range(1, 5) for size in (1, 2)]


@pytest.mark.parametrize(
    ("num_stages", "size"),
    [pytest.param(*s, marks=() if s in SHAPES else pytest.mark.slow) for s in ALL_SHAPES],
)
def test_everything_is_as_in_one_process(
    config: EngineConfig,
    expected: Outcome,
    ranks: list[PlayedProcess],
    monkeypatch: pytest.MonkeyPatch,
    num_stages: int,
    size: int,
) -> None:
    monkeypatch.setattr(OutputLengthEstimator, "estimate", lambda *_: 1)
    engine = load(config, pipeline_parallel_size=num_stages, tensor_parallel_size=size)
    try:
        found = Outcome(engine)
        runners = [engine.runner, *(rank.runner for rank in ranks)]
        assert len(runners) == num_stages * size
        layers = [runner.kv.layout.num_layers for runner in runners]
        assert sum(layers[::size]) == NUM_LAYERS
    finally:
        engine.close()
    assert found.tokens == expected.tokens
    assert found.tops == expected.tops
    assert sorted(found.logprobs) == pytest.approx(sorted(expected.logprobs), abs=1e-4)
    for totals in (found.totals, expected.totals):
        assert totals.num_preemptions > 0
        assert totals.prefix_hit_tokens > 0


def test_blocks_come_back_from_host_memory_on_every_stage(
    config: EngineConfig,
    expected: Outcome,
    ranks: list[PlayedProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OutputLengthEstimator, "estimate", lambda *_: 1)
    monkeypatch.setattr(CopyCost, "pays", lambda *_: True)
    # Steps have the same sizes however long they take, as these decide which request is preempted.
    monkeypatch.setattr(StepCostEstimator, "estimate", lambda _: None)
    engine = load(config, pipeline_parallel_size=3, swap_space=0.02)
    try:
        found = Outcome(engine)
        assert engine.runner.host_copier is not None
        runners = [engine.runner, *(rank.runner for rank in ranks)]
        assert engine.runner.engine_block_bytes == sum(each.kv.block_bytes for each in runners)
    finally:
        engine.close()
    assert found.tokens == expected.tokens
    assert found.totals.host_hit_tokens > 0


def test_a_failure_of_any_stage_is_reported_by_its_rank(
    config: EngineConfig, ranks: list[PlayedProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(config, pipeline_parallel_size=3)

    def fail(*_: object) -> None:
        raise EngineFailed("the device is lost")

    monkeypatch.setattr(ranks[1].runner, "launch", fail)
    engine.engine.add(requests()[0])
    with pytest.raises(EngineFailed, match="rank 2: the device is lost"):
        while True:
            engine.engine.step()
    engine.close()


def test_a_stage_that_hangs_is_named_in_time(
    config: EngineConfig, ranks: list[PlayedProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hanging stage is named, not the next one, which only waits for it."""
    engine = load(config, pipeline_parallel_size=3, rank_timeout_s=0.5)
    launch = ranks[0].runner.launch

    def hang(batch: object) -> object:
        time.sleep(1.5)
        return launch(batch)  # type: ignore[arg-type]

    monkeypatch.setattr(ranks[0].runner, "launch", hang)
    engine.engine.add(requests()[0])
    began_s = time.monotonic()
    with pytest.raises(EngineFailed, match="rank 1 has not answered"):
        while True:
            engine.engine.step()
    assert time.monotonic() - began_s < 1.5
    time.sleep(1.0)
    engine.close()


def test_a_stage_may_wait_for_a_slow_one(
    config: EngineConfig, ranks: list[PlayedProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage may wait for two slow stages in front of it for longer than its own time limit."""
    engine = load(config, pipeline_parallel_size=4, rank_timeout_s=0.5)
    for rank in ranks[:2]:
        launch = rank.runner.launch

        def slow(batch: object, launch: Callable[..., object] = launch) -> object:
            time.sleep(0.35)
            return launch(batch)

        monkeypatch.setattr(rank.runner, "launch", slow)
    outputs_of(engine, [dataclasses.replace(requests()[0], sampling=SamplingParams(max_tokens=2))])
    engine.close()


def test_a_rank_that_is_cut_off_ends_the_engine(
    config: EngineConfig, ranks: list[PlayedProcess]
) -> None:
    engine = load(config, pipeline_parallel_size=2)
    engine.engine.add(requests()[0])
    engine.engine.step()
    began_s = time.monotonic()
    ranks[0].channel.close()
    with pytest.raises(EngineFailed, match="rank 1 ended"):
        while True:
            engine.engine.step()
    assert time.monotonic() - began_s < 1.5
    engine.close()


def test_too_many_stages_are_refused(config: EngineConfig, ranks: list[PlayedProcess]) -> None:
    with pytest.raises(StartupFailed, match="--pipeline-parallel-size 6: the model has 5 layers"):
        load(config, pipeline_parallel_size=6)


def test_speculation_is_refused_by_name() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 2}'
    with pytest.raises(StartupFailed, match="--speculative-config is not for engines with --pipe"):
        EngineConfig(pipeline_parallel_size=2, speculative_config=text)


def test_a_stage_has_its_layers_of_a_lora_adapter(
    config: EngineConfig, ranks: list[PlayedProcess], tmp_path: Path
) -> None:
    base = Path(config.model)
    adapter = write_adapter(tmp_path / "one", base, seed=1)
    merged = merge(tmp_path / "merged", base, adapter)
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    plain = Request("a" * 32, 0, tuple(range(3, 23)), sampling)
    expected = []
    for path in (base, merged):
        alone = load(dataclasses.replace(config, model=str(path)))
        expected.append(outputs_of(alone, [plain])[plain.key])
        alone.close()
    assert expected[0] != expected[1]
    engine = load(config, pipeline_parallel_size=3, enable_lora=True, max_lora_rank=8)
    one = engine.load_adapter("one", str(adapter))
    other = dataclasses.replace(plain, request_id="b" * 32, adapter=one)
    found = outputs_of(engine, [plain, other])
    assert [found[plain.key], found[other.key]] == expected
    engine.close()


def test_a_result_that_makes_no_sense_ends_the_engine(
    config: EngineConfig, ranks: list[PlayedProcess]
) -> None:
    engine = load(config, pipeline_parallel_size=2)
    ranks[0].channel.send(MessageKind.RESULT, b"no result")
    with pytest.raises(EngineFailed):
        while True:
            engine.engine.add(requests()[0])
            engine.engine.step()
    engine.close()
