"""Beam searches through the whole engine control plane: the beams of the definition, however they
are scheduled, preempted, handed over or cancelled, and nothing left behind.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

import pytest
from effort import examples
from engines.integrity import check_integrity
from fakes.beams import Found, search
from fakes.runner import FakeRunner, next_logprobs
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import BatonError, EngineFailed, InvalidRequest, PromptTooLarge
from baton.core.request.request import FinishReason, Request
from baton.core.request.sampling_params import SamplingParams
from baton.core.request.token_ids import block_hashes, root_hash
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.execution.batch import SampledToken
from baton.engine.kv.block_pool import NUM_RESERVED_BLOCKS
from baton.engine.kv.generations import Generations
from baton.engine.kv.limits import EngineLimits
from baton.engine.scheduling.admission import OutputLengthEstimator
from baton.engine.scheduling.outputs import FinishedBeam

BLOCK_SIZE = 4
VOCAB_SIZE = 30
EOS = 7


class Optimist(OutputLengthEstimator):
    """Estimates that requests end at once, so that memory runs out and sequences are preempted."""

    def estimate(self, num_generated: int, max_tokens: int) -> int:
        return 1


def new_engine(capacity: int = 200, *, optimistic: bool = False, **options: object) -> Engine:
    num_blocks = capacity + NUM_RESERVED_BLOCKS
    is_caching = bool(options.pop("enable_prefix_caching", True))
    runs_ahead = bool(options.pop("runs_ahead", False))
    limits = EngineLimits(
        num_blocks, BLOCK_SIZE, **({"max_model_len": 100, "max_num_batched_tokens": 16} | options)
    )
    return Engine(
        EngineParts(
            FakeRunner(
                num_blocks,
                BLOCK_SIZE,
                vocab_size=VOCAB_SIZE,
                runs_ahead=runs_ahead,
                num_stages=limits.num_stages,
            ),
            limits,
            Generations(num_blocks),
            fingerprint="fake",
            eos_token_ids={EOS},
            enable_prefix_caching=is_caching,
            estimator=Optimist() if optimistic else None,
        )
    )


def beam_request(
    name: str, prompt: Sequence[int], *, n: int = 1, sample_index: int = 0, **sampling: object
) -> Request:
    params = SamplingParams(
        **({"temperature": 0.0, "use_beam_search": True, "best_of": 3, "max_tokens": 8} | sampling)
    )
    forks = tuple(f"{name}-{index}" for index in range(1, n))
    return Request(name, 0, tuple(prompt), params, fork_ids=forks, sample_index=sample_index)


def expected(request: Request) -> Found:
    sampling, prompt = request.sampling, list(request.prompt_token_ids)
    stop_ids = frozenset(sampling.stop_token_ids)
    return search(
        lambda tokens: next_logprobs([*prompt, *tokens], VOCAB_SIZE),
        sampling.best_of,
        min(sampling.max_tokens, 100 - len(prompt)),
        stop_ids if sampling.ignore_eos else stop_ids | {EOS},
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
        num_groups=sampling.num_beam_groups,
        diversity_penalty=sampling.diversity_penalty,
    )


def keys_of(request: Request) -> list[str]:
    return [request.key, *(fork.key for fork in request.forks)]


class Outcome:
    """Beams, tokens and errors that engines output, by request key."""

    def __init__(self) -> None:
        self.beams: dict[str, FinishedBeam] = {}
        self.tokens: dict[str, list[int]] = {}
        self.failed: dict[str, BatonError] = {}

    def step(self, engine: Engine) -> None:
        output = engine.step()
        check_integrity(engine)
        for beam in output.beams:
            assert beam.key not in self.beams
            self.beams[beam.key] = beam
        for token in output.tokens:
            self.tokens.setdefault(token.key, []).append(token.token_id)
        self.failed |= dict(output.failed)

    def run(self, engine: Engine) -> Outcome:
        for _ in range(5000):
            if not engine.has_work:
                return self
            self.step(engine)
        raise AssertionError("no end")

    def check(self, request: Request) -> None:
        best = expected(request)
        for index, key in enumerate(keys_of(request), request.sample_index):
            tokens = best[index][1]
            assert self.beams[key].token_ids == tokens
            is_stop = tokens[-1] == EOS or tokens[-1] in request.sampling.stop_token_ids
            reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
            assert self.beams[key].finish_reason is reason


def assert_idle(engine: Engine) -> None:
    check_integrity(engine)
    counts = engine.pool.counts
    assert counts.held == 0 and counts.free + counts.cached == engine.pool.capacity
    assert engine.stats.ledger()["requests"] == {}
    assert not engine.pool.open_fences
    assert not engine.beams.by_key and engine._scheduler.queues.groups == []


def runner_of(engine: Engine) -> FakeRunner:
    runner = engine._runner
    assert isinstance(runner, FakeRunner)
    return runner


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("is_caching", [False, True])
def test_the_best_beams_are_those_of_the_definition(runs_ahead: bool, is_caching: bool) -> None:
    engine = new_engine(runs_ahead=runs_ahead, enable_prefix_caching=is_caching)
    requests = [
        beam_request("a", range(11), n=3),
        beam_request("b", range(5, 13), n=2, best_of=4, length_penalty=0.0),
        beam_request("c", [9], best_of=6, early_stopping="never", ignore_eos=True, max_tokens=12),
        beam_request("d", range(3), n=4, best_of=4, num_beam_groups=2, diversity_penalty=0.7),
        beam_request("e", range(6), n=2, best_of=2, max_tokens=1, early_stopping="true"),
        beam_request("f", range(95), n=2, best_of=2, max_tokens=20),
    ]
    for request in requests:
        engine.add(request)
    outcome = Outcome().run(engine)
    assert outcome.failed == {} and outcome.tokens == {}
    for request in requests:
        outcome.check(request)
    assert_idle(engine)


def test_others_in_the_batch_are_as_without_beams() -> None:
    plain = Request("p", 0, tuple(range(9)), SamplingParams(temperature=0.0, max_tokens=20))
    alone, beside = new_engine(runs_ahead=True), new_engine(runs_ahead=True)
    beside.add(beam_request("a", range(11), n=3))
    for engine in (alone, beside):
        engine.add(plain)
    assert Outcome().run(alone).tokens == Outcome().run(beside).tokens


def test_a_retry_of_one_finds_its_own_hypothesis() -> None:
    engine = new_engine()
    whole = beam_request("a", range(11), n=3)
    alone = dataclasses.replace(whole, request_id="b", fork_ids=(), sample_index=2)
    engine.add(alone)
    Outcome().run(engine).check(alone)
    assert_idle(engine)


def test_a_reordering_copies_at_most_one_block_a_beam() -> None:
    engine = new_engine()
    request = beam_request("a", range(11), best_of=4, max_tokens=30, ignore_eos=True)
    engine.add(request)
    outcome, runner = Outcome(), runner_of(engine)
    while engine.has_work:
        before = runner.num_copied
        outcome.step(engine)
        assert runner.num_copied - before <= 3
    outcome.check(request)
    assert runner.num_copied


@pytest.mark.parametrize("is_caching", [False, True])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_crowded_out_beams_come_back_with_the_same_result(
    is_caching: bool, runs_ahead: bool
) -> None:
    engine = new_engine(
        24,
        optimistic=True,
        runs_ahead=runs_ahead,
        enable_prefix_caching=is_caching,
        max_num_batched_tokens=8,
    )
    requests = [
        beam_request(name, range(start, start + 9), n=2, max_tokens=25, ignore_eos=True)
        for start, name in enumerate("abcd")
    ]
    for request in requests:
        engine.add(request)
    outcome = Outcome().run(engine)
    assert outcome.failed == {}
    for request in requests:
        outcome.check(request)
    assert engine.stats.totals().num_preemptions > 0
    assert_idle(engine)


@pytest.mark.parametrize("is_aborted", [False, True])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_beams_that_lent_blocks_leave_no_room_for_wait_for_them(
    runs_ahead: bool, is_aborted: bool
) -> None:
    """A search without room beside lent blocks waits until they are returned: all other blocks are
    its own, so recomputing it at once would be in vain."""
    engine = new_engine(12, runs_ahead=runs_ahead)
    prompt, once = (3,) * 17, SamplingParams(temperature=0.0, max_tokens=1)
    engine.add(Request("lent", 0, prompt, once))
    Outcome().run(engine)
    lent = engine.prefixes.lend(block_hashes(root_hash("fake"), prompt, BLOCK_SIZE))
    assert lent is not None
    request, behind = beam_request("a", range(27), max_tokens=4), Request("b", 0, (1, 2, 3), once)
    engine.add(request)
    engine.add(behind)
    outcome = Outcome().run(engine)
    assert engine.stats.totals().num_preemptions == 1
    assert not outcome.beams and not outcome.failed
    if is_aborted:
        engine.abort(request.key)
    else:
        engine.prefixes.give_back(lent[0])
    outcome.run(engine)
    assert list(outcome.tokens) == [behind.key]
    if is_aborted:
        engine.prefixes.give_back(lent[0])
    else:
        outcome.check(request)
    assert_idle(engine)


def test_what_the_pool_cannot_hold_is_refused_or_fails() -> None:
    engine = new_engine(8, max_num_seqs=4)
    with pytest.raises(InvalidRequest, match="best_of 5"):
        engine.add(beam_request("a", range(4), best_of=5))
    with pytest.raises(PromptTooLarge):
        engine.add(beam_request("b", range(24), best_of=4))
    engine.add(beam_request("c", range(4), n=2, best_of=4, max_tokens=60, ignore_eos=True))
    outcome = Outcome().run(engine)
    assert {type(error) for error in outcome.failed.values()} == {PromptTooLarge}
    assert set(outcome.failed) == {"c/0", "c-1/0"}
    assert_idle(engine)


def test_a_search_needs_places_for_all_its_beams() -> None:
    engine = new_engine(max_num_seqs=4)
    plain = [
        Request(f"p{i}", 0, (i, 2), SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
        for i in range(3)
    ]
    request = beam_request("a", range(6), best_of=4)
    for each in (*plain, request):
        engine.add(each)
    outcome = Outcome().run(engine)
    outcome.check(request)
    assert engine.stats.totals().num_preemptions == 0


def test_it_goes_on_until_nobody_wants_a_hypothesis() -> None:
    engine, outcome = new_engine(), Outcome()
    request = beam_request("a", range(11), n=3, ignore_eos=True)
    engine.add(request)
    for _ in range(3):
        outcome.step(engine)
    engine.abort("a/0")
    outcome.run(engine)
    assert set(outcome.beams) == {"a-1/0", "a-2/0"}
    best = expected(request)
    assert outcome.beams["a-2/0"].token_ids == best[2][1]
    assert_idle(engine)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_beams_whose_logits_are_not_numbers_fail_once(
    runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN logits of all beams in one step fail each request of the search once."""
    engine, outcome = new_engine(runs_ahead=runs_ahead), Outcome()
    request, other = beam_request("a", range(11), n=2), beam_request("b", range(6))
    engine.add(request)
    while len(engine.by_key) < request.sampling.best_of:
        outcome.step(engine)
    runner = runner_of(engine)
    with monkeypatch.context() as patch:
        compute = runner._compute
        patch.setattr(runner, "_compute", lambda batch: [*map(_not_a_number, compute(batch))])
        while not outcome.failed:
            outcome.step(engine)
    assert set(outcome.failed) == {"a/0", "a-1/0"}
    assert {type(error) for error in outcome.failed.values()} == {EngineFailed}
    engine.add(other)
    outcome.run(engine).check(other)
    assert_idle(engine)


def test_a_held_search_fails_for_all_whom_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, outcome = new_engine(), Outcome()
    runner = runner_of(engine)
    compute = runner._compute
    monkeypatch.setattr(runner, "_compute", lambda batch: [*map(_not_a_number, compute(batch))])
    engine.add(beam_request("a", range(11), n=2), hold=True)
    outcome.run(engine)
    assert set(outcome.failed) == {"a/0", "a-1/0"}
    assert_idle(engine)


def _not_a_number(sampled: SampledToken | None) -> SampledToken | None:
    return sampled and sampled._replace(logprob=math.nan)


def handed_over(source: Engine, puller: Engine, request: Request) -> None:
    """A minimal hand-off: the blocks, and the candidates with which the search begins."""
    source.add(request, hold=True)
    first = None
    while first is None:
        output = source.step()
        assert not output.tokens
        for chunk in output.chunks:
            first = chunk.sampled or first
    puller.reserve(request)
    reservation = puller.next_reservation()
    assert reservation is not None
    blocks = (reservation.num_cached_blocks, reservation.num_known_blocks)
    refs = source.block_refs(request.key, *blocks)
    for theirs, ours in zip(refs.block_ids, reservation.block_ids[slice(*blocks)], strict=True):
        runner_of(puller).write_block(ours, runner_of(source).read_block(int(theirs)))
    source.abort(request.key)
    puller.beams.start(reservation, first)


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("length", [8, 11])
@pytest.mark.parametrize("max_tokens", [1, 9])
def test_one_hand_off_carries_all_beams(runs_ahead: bool, length: int, max_tokens: int) -> None:
    source, puller = new_engine(runs_ahead=runs_ahead), new_engine(runs_ahead=runs_ahead)
    request = beam_request("a", range(length), n=3, best_of=4, max_tokens=max_tokens)
    handed_over(source, puller, request)
    Outcome().run(puller).check(request)
    Outcome().run(source)
    assert_idle(source)
    assert_idle(puller)


def test_an_abort_leaves_a_reserved_search_its_blocks() -> None:
    """A pull may still write to them, until the reservation is dropped."""
    engine, request = new_engine(), beam_request("a", range(11), n=2)
    engine.reserve(request)
    reservation = engine.next_reservation()
    assert reservation is not None
    for key in keys_of(request):
        engine.abort(key)
    assert engine.pool.counts.held == len(reservation.block_ids)
    engine.drop(reservation)
    assert_idle(engine)


@examples(40, 300)
@given(data=st.data())
def test_whatever_is_cancelled_leaves_nothing(data: st.DataObject) -> None:
    """In small pools with aborts at any time, other searches are right and nothing is left."""
    draw = data.draw
    engine = new_engine(
        draw(st.integers(14, 40)),
        optimistic=draw(st.booleans()),
        runs_ahead=draw(st.booleans()),
        num_stages=draw(st.sampled_from([1, 1, 3])),
        enable_prefix_caching=draw(st.booleans()),
        max_num_seqs=draw(st.integers(4, 12)),
        max_num_batched_tokens=draw(st.integers(2, 16)),
    )
    rng = random.Random(draw(st.integers(0, 10**6)))
    requests = [
        beam_request(
            f"r{i}",
            range(i, i + rng.randrange(1, 14)),
            n=rng.randrange(1, 4),
            best_of=rng.choice((3, 4)),
            max_tokens=rng.randrange(1, 16),
            ignore_eos=rng.random() < 0.5,
        )
        for i in range(4)
    ]
    outcome, cancelled = Outcome(), set[str]()
    coming = [*requests]
    for _ in range(60):
        if coming and rng.random() < 0.3:
            engine.add(coming.pop())
        if rng.random() < 0.1:
            key = rng.choice([key for request in requests for key in keys_of(request)])
            if requests.index(next(r for r in requests if key in keys_of(r))) >= len(coming):
                engine.abort(key)
                cancelled.add(key)
        if engine.has_work:
            outcome.step(engine)
    for request in coming:
        engine.add(request)
    outcome.run(engine)
    for request in requests:
        best = expected(request)
        for index, key in enumerate(keys_of(request)):
            if key in outcome.beams:
                assert outcome.beams[key].token_ids == best[index][1]
            elif key in outcome.failed:
                assert isinstance(outcome.failed[key], PromptTooLarge)
            else:
                assert key in cancelled
    assert_idle(engine)
