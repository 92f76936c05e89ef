"""A draft model over fake runners: each draft reads back and checks the sequence's KV."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
from effort import number
from engines.integrity import check_integrity
from fakes.clock import FakeClock
from fakes.runner import expected_tokens
from fakes.speculation.drafting_runner import DraftingRunner

from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.execution.batch import SequenceSlice
from baton.engine.kv.block_pool import NUM_RESERVED_BLOCKS
from baton.engine.kv.generations import Generations
from baton.engine.kv.limits import EngineLimits
from baton.engine.scheduling.admission import OutputLengthEstimator
from baton.engine.scheduling.outputs import StepOutput
from baton.engine.speculation.draft_model import DraftModelProposer

BLOCK_SIZE, VOCAB_SIZE, EOS = 4, 50, 7
MAX_MODEL_LEN = 120
NUM_REQUESTS = number(24, 64)  # requests that are handed over


class Optimist(OutputLengthEstimator):
    """Estimates outputs as one token, so that memory runs out and sequences are preempted."""

    def estimate(self, num_generated: int, max_tokens: int) -> int:
        return 1


def make_engine(
    capacity: int, *, runs_ahead: bool, rate: float, has_cache: bool = False, **limits: int
) -> Engine:
    num_blocks, clock = capacity + NUM_RESERVED_BLOCKS, FakeClock()
    runner = DraftingRunner(
        num_blocks,
        BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
        runs_ahead=runs_ahead,
        num_looks=2,
        rate=rate,
        on_completed=lambda number: clock.advance(5e-3),
    )
    runner.draft_steps.on_execute = lambda batch: clock.advance(3e-4)
    return Engine(
        EngineParts(
            runner,
            EngineLimits(num_blocks, BLOCK_SIZE, max_model_len=MAX_MODEL_LEN, **limits),
            Generations(num_blocks),
            fingerprint="fake",
            eos_token_ids={EOS},
            enable_prefix_caching=has_cache,
            estimator=Optimist(),
            clock=clock,
            proposer=DraftModelProposer(runner, 4),
        )
    )


class Scene:
    """Requests, and the tokens that engines have output for them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}

    def new_request(self, most: int = 30) -> Request:
        draw = self.random
        sampling = SamplingParams(
            max_tokens=draw.randint(1, most),
            temperature=draw.choice([0.0, 1.0]),
            seed=draw.randint(0, 3),
            ignore_eos=draw.random() < 0.5,
            speculative=draw.random() < 0.9,
            frequency_penalty=draw.choice([0.0, 0.0, 0.5]),
            logprobs=draw.choice([None, 1]),
        )
        prompt = tuple(draw.choices(range(3), k=draw.randint(1, 25)))
        if self.requests and draw.random() < 0.4:  # the next turn of a chat
            key = draw.choice([*self.requests])
            known = (*self.requests[key].prompt_token_ids, *self.tokens[key])
            prompt = (*known[:20], *prompt)[:25]
        forks = tuple(f"{len(self.requests)}-{i}" for i in range(draw.choice([0, 0, 2])))
        request = Request(f"r{len(self.requests)}", 0, prompt, sampling, fork_ids=forks)
        for one in (request, *request.forks):
            self.requests[one.key] = one
            self.tokens[one.key] = []
        return request

    def take(self, output: StepOutput) -> None:
        assert not output.failed
        for token in output.tokens:
            assert token.index == len(self.tokens[token.key])
            self.tokens[token.key].append(token.token_id)

    def check(self, *engines: Engine) -> None:
        for key, tokens in self.tokens.items():
            request = self.requests[key]
            assert tokens == expected_tokens(
                request.prompt_token_ids,
                len(tokens),
                params=request.sampling,
                vocab_size=VOCAB_SIZE,
                sample_index=request.sample_index,
            )
        for engine in engines:
            check_integrity(engine)
            assert engine.pool.counts.held == 0
            assert engine.stats.ledger()["requests"] == {}


def mixed_run(seed: int, *, runs_ahead: bool, has_cache: bool) -> Engine:
    """Run requests that arrive while others run, some of them aborted with drafts in flight."""
    scene = Scene(seed)
    draw = scene.random
    engine = make_engine(
        draw.choice([14, 30, 200]),
        runs_ahead=runs_ahead,
        rate=draw.choice([0.0, 0.5, 0.8, 1.0]),
        has_cache=has_cache,
        max_num_seqs=draw.randint(1, 8),
        max_num_batched_tokens=draw.choice([8, 16, 64]),
    )

    def meanwhile() -> bool:
        if draw.random() < 0.2 and scene.requests:
            engine.abort(draw.choice([*scene.requests]))
        return draw.random() < 0.3

    waiting = 10
    for _ in range(10_000):
        if waiting and draw.random() < 0.4:
            engine.add(scene.new_request())
            waiting -= 1
        elif not engine.has_work and not waiting:
            break
        scene.take(engine.step(meanwhile if draw.random() < 0.2 else None))
        check_integrity(engine)
    scene.check(engine)
    return engine


@pytest.mark.parametrize("has_cache", [False, True])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_outputs_are_those_without_speculation(runs_ahead: bool, has_cache: bool) -> None:
    preempted = accepted = late = 0
    for seed in range(number(8, 15)):
        engine = mixed_run(seed, runs_ahead=runs_ahead, has_cache=has_cache)
        totals = engine.stats.totals()
        preempted += totals.num_preemptions
        accepted += sum(totals.speculation.accepted)
        late += engine._runner.draft_steps.num_late_rows  # type: ignore[attr-defined]
    assert preempted and accepted > 100 and late


def hand_over(scene: Scene, source: Engine, puller: Engine, request: Request) -> None:
    """Hand a request over by its full blocks, including the draft model's part of each."""
    puller.reserve(request)
    reservation = puller.next_reservation()
    assert reservation is not None
    first, last = reservation.num_cached_blocks, reservation.num_known_blocks
    refs = source.block_refs(request.key, first, last)
    for theirs, ours in zip(refs.block_ids, reservation.block_ids[first:last], strict=True):
        content = source._runner.read_block(int(theirs))  # type: ignore[attr-defined]
        puller._runner.write_block(ours, content)  # type: ignore[attr-defined]
    puller.lacks_drafts(reservation, source.first_undrafted(request.key))
    puller.start(reservation, scene.tokens[request.key][-1])
    source.abort(request.key)


def played(
    *, runs_ahead: bool, handed_over: bool, rate: float, num_requests: int
) -> tuple[int, int, int]:
    """The numbers of draft tokens, accepted draft tokens and decode steps of seeded requests."""
    scene = Scene(5)
    source, puller = (
        make_engine(400, runs_ahead=runs_ahead, rate=rate, max_num_seqs=8) for _ in range(2)
    )
    prompts = random.Random(6)
    for index in range(num_requests):
        sampling = SamplingParams(max_tokens=60, temperature=index % 2, seed=index, ignore_eos=True)
        prompt = tuple(prompts.choices(range(VOCAB_SIZE), k=prompts.randint(1, 40)))
        request = Request(f"r{index}", 0, prompt, sampling)
        scene.requests[request.key] = request
        scene.tokens[request.key] = []
        (source if handed_over else puller).add(request, hold=handed_over)
        if index % 8 < 7 and index < num_requests - 1:
            continue
        while source.has_work:
            scene.take(source.step())
        for key in [*scene.requests][-8:] if handed_over else []:
            if scene.requests[key].key in source.by_key:
                hand_over(scene, source, puller, scene.requests[key])
        while puller.has_work:
            scene.take(puller.step())
    scene.check(source, puller)
    assert not source.stats.totals().speculation.num_draft_tokens, "held ones have one token"
    found = puller.stats.totals()
    counts = found.speculation
    return counts.num_draft_tokens, sum(counts.accepted), found.num_decode_tokens


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("rate", [0.6, 0.9])
def test_acceptance_behind_a_hand_off_is_that_of_one_engine(rate: float, runs_ahead: bool) -> None:
    one, other = (
        played(runs_ahead=runs_ahead, handed_over=each, rate=rate, num_requests=NUM_REQUESTS)
        for each in (False, True)
    )
    assert one[2] == other[2] == NUM_REQUESTS * 59
    assert other[1] / other[0] == pytest.approx(one[1] / one[0], rel=0.02)
    assert one[1] > 15 * NUM_REQUESTS


def copy_prefix(source: Engine, puller: Engine, request: Request) -> None:
    hashes = source.block_hashes(request, 40)
    lent, prefix = source.prefixes.lend(hashes), puller.prefixes.borrow(hashes)
    assert lent is not None and prefix is not None
    fence, refs = lent
    for theirs, ours in zip(refs.block_ids, prefix.block_ids, strict=True):
        content = source._runner.read_block(int(theirs))  # type: ignore[attr-defined]
        puller._runner.write_block(ours, content)  # type: ignore[attr-defined]
    puller.prefixes.keep(prefix, source.prefixes.first_undrafted(refs))
    source.prefixes.give_back(fence)


@pytest.mark.parametrize("is_first_drafted", [False, True])
def test_a_chats_turn_goes_on_elsewhere(is_first_drafted: bool) -> None:
    """The next turn of a chat fetches its prefix from the engine that decoded it, computes the rest
    and is decoded on a third engine: all drafts are right, even if the first turn had none."""
    scene = Scene(3)
    first, second, third = (
        make_engine(200, runs_ahead=False, rate=1.0, has_cache=True) for _ in range(3)
    )
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    turns = [Request("a", 0, (1, 2, 3), replace(sampling, speculative=is_first_drafted))]
    for engine, key in ((first, "a/0"), (second, "b/0")):
        scene.requests[key], scene.tokens[key] = turns[-1], []
        engine.add(turns[-1], hold=engine is second)
        while engine.has_work:
            scene.take(engine.step())
        if engine is first:
            prompt = (1, 2, 3, *scene.tokens["a/0"], 4, 5)
            turns.append(Request("b", 0, prompt, sampling))
            copy_prefix(first, second, turns[-1])
    assert second.stats.totals().prefix_hit_tokens == 40
    hand_over(scene, second, third, turns[-1])
    while third.has_work:
        scene.take(third.step())
    scene.check(first, second, third)
    counts = third.stats.totals().speculation
    assert sum(counts.accepted) == counts.num_draft_tokens > 20


def test_what_was_made_up_for_is_there_for_the_next_turn() -> None:
    engine, scene = make_engine(200, runs_ahead=False, rate=1.0, has_cache=True), Scene(4)
    longest: list[int] = []  # the draft model's largest batch of tokens, by turn

    def watch(batch: Sequence[SequenceSlice]) -> None:
        longest[-1] = max(longest[-1], *(len(one.token_ids) for one in batch))

    steps = engine._runner.draft_steps  # type: ignore[attr-defined]
    steps.on_execute, prompt = watch, (1, 2, 3)
    for turn, is_drafted in enumerate((False, True, True)):
        longest.append(0)
        sampling = SamplingParams(30, temperature=0.0, ignore_eos=True, speculative=is_drafted)
        request = Request(f"r{turn}", 0, prompt, sampling)
        scene.requests[request.key], scene.tokens[request.key] = request, []
        engine.add(request)
        while engine.has_work:
            scene.take(engine.step())
        prompt = (*prompt, *scene.tokens[request.key])
    scene.check(engine)
    assert longest[1] > BLOCK_SIZE >= longest[2]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_perfect_draft_model_takes_few_steps(runs_ahead: bool) -> None:
    engine = make_engine(200, runs_ahead=runs_ahead, rate=1.0)
    scene = Scene(1)
    sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    request = scene.requests["a/0"] = Request("a", 0, (1, 2, 3), sampling)
    scene.tokens["a/0"] = []
    engine.add(request)
    num_steps = 0
    while engine.has_work:
        scene.take(engine.step())
        num_steps += 1
    scene.check(engine)
    counts = engine.stats.totals().speculation
    assert sum(counts.accepted) == counts.num_draft_tokens
    assert num_steps < 45


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_an_engine_that_ends_with_drafts_in_flight_leaves_nothing(runs_ahead: bool) -> None:
    """An engine that ends with drafts in flight leaves nothing behind; another engine continues its
    requests from the tokens that were output."""
    scene = Scene(2)
    engine, other = (make_engine(200, runs_ahead=runs_ahead, rate=0.8) for _ in range(2))
    for _ in range(6):
        engine.add(scene.new_request(most=40))
    while engine.stats.totals().speculation.num_draft_tokens < 30:
        scene.take(engine.step())
    for key, request in scene.requests.items():
        is_over = key not in engine.by_key
        engine.abort(key)
        if not is_over:
            outputs = scene.tokens[key]
            known = tuple(outputs)
            other.add(replace(request, output_token_ids=array("I", known), fork_ids=()))
    while engine.has_work:
        assert not engine.step().tokens
    while other.has_work:
        scene.take(other.step())
    scene.check(engine, other)
