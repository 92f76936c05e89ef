"""The whole engine control plane over a fake runner: in all cases the tokens are the oracle's."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import pytest
from effort import examples
from engines.integrity import check_integrity
from fakes.clock import TickingClock
from fakes.gateway.step_costs import linear_cost
from fakes.runner import FakeRunner, expected_tokens
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.errors import (
    ContextLengthExceeded,
    EngineFailed,
    HandoffFailed,
    InvalidRequest,
    PromiseRefused,
    PromptTooLarge,
)
from baton.core.request.request import FinishReason, Request
from baton.core.request.sampling_params import SamplingParams
from baton.core.request.token_ids import block_hashes, root_hash
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.execution.batch import SequenceSlice
from baton.engine.kv.block_pool import NUM_RESERVED_BLOCKS, Reservation
from baton.engine.kv.generations import Generations
from baton.engine.kv.limits import EngineLimits
from baton.engine.scheduling.admission import OutputLengthEstimator
from baton.engine.scheduling.outputs import EngineLoad, StepOutput

BLOCK_SIZE = 4
VOCAB_SIZE = 50
EOS = 7
FINGERPRINT = "fake"


class Optimist(OutputLengthEstimator):
    """Estimates that requests end at once, so that memory runs out and sequences are preempted."""

    def estimate(self, num_generated: int, max_tokens: int) -> int:
        return 1


def new_engine(capacity: int = 60, *, optimistic: bool = False, **options: object) -> Engine:
    """An engine of `capacity` blocks of 4 tokens over a fake runner, with options of
    EngineLimits."""
    num_blocks = capacity + NUM_RESERVED_BLOCKS
    is_caching = bool(options.pop("enable_prefix_caching", True))
    runs_ahead = bool(options.pop("runs_ahead", False))
    limits = EngineLimits(
        num_blocks, BLOCK_SIZE, **({"max_model_len": 200, "max_num_batched_tokens": 16} | options)
    )
    return Engine(
        EngineParts(
            FakeRunner(
                num_blocks,
                BLOCK_SIZE,
                vocab_size=VOCAB_SIZE,
                runs_ahead=runs_ahead,
                num_looks=3,
                num_stages=limits.num_stages,
            ),
            limits,
            Generations(num_blocks),
            fingerprint=FINGERPRINT,
            eos_token_ids={EOS},
            enable_prefix_caching=is_caching,
            estimator=Optimist() if optimistic else None,
            clock=TickingClock(),
        )
    )


def new_request(name: str, prompt: Sequence[int], **sampling: object) -> Request:
    params = SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | sampling))
    return Request(name, 0, tuple(prompt), params)


def expected_outputs(request: Request, max_model_len: int = 200) -> tuple[list[int], FinishReason]:
    """All output tokens of a request by definition: the oracle's, up to the first end condition."""
    params = request.sampling
    room = min(params.max_tokens, max_model_len - len(request.prompt_token_ids))
    tokens = expected_tokens(request.prompt_token_ids, room, params=params, vocab_size=VOCAB_SIZE)
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    for i, token_id in enumerate(tokens):
        if token_id in stops:
            return tokens[: i + 1], FinishReason.STOP
    return tokens, FinishReason.LENGTH


class Recorder:
    """Collects what engines output, and checks that each token index comes once and in order."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.reasons: dict[str, FinishReason] = {}

    def take(self, output: StepOutput) -> StepOutput:
        assert not output.failed
        for token in output.tokens:
            assert token.key not in self.reasons, "a token behind the end"
            assert token.index == len(self.tokens[token.key])
            self.tokens[token.key].append(token.token_id)
            if token.finish_reason is not None:
                self.reasons[token.key] = token.finish_reason
        return output


def run(engine: Engine, recorder: Recorder | None = None) -> Recorder:
    recorder = recorder or Recorder()
    for _ in range(5000):
        if not engine.has_work:
            return recorder
        recorder.take(engine.step())
    raise AssertionError("no end")


def assert_idle(engine: Engine) -> None:
    check_integrity(engine)
    counts = engine.pool.counts
    assert counts.held == 0 and counts.free + counts.cached == engine.pool.capacity
    assert engine.stats.ledger()["requests"] == {}
    assert not engine.pool.open_fences


def copy_blocks(source: Engine, key: str, puller: Engine, reservation: Reservation) -> None:
    """A minimal hand-off: copies each block of known tokens that the puller has not cached."""
    missing = slice(reservation.num_cached_blocks, reservation.num_known_blocks)
    refs = source.block_refs(key, missing.start, missing.stop)
    for theirs, ours in zip(refs.block_ids, reservation.block_ids[missing], strict=True):
        runner_of(puller).write_block(ours, runner_of(source).read_block(int(theirs)))


def runner_of(engine: Engine) -> FakeRunner:
    runner = engine._runner
    assert isinstance(runner, FakeRunner)
    return runner


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_asking_for_a_prompts_logprobs_changes_no_token(runs_ahead: bool) -> None:
    engine = new_engine(runs_ahead=runs_ahead)
    request = new_request("a", range(20), max_tokens=6, prompt_logprobs=0)
    engine.add(request)
    assert run(engine).tokens[request.key] == expected_outputs(request)[0]


# -- all requests in all orders -------------------------------------------------------------------


prompts = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=20),  # many shared prefixes
    st.integers(1, 30).map(lambda n: list(range(n))),
)
samplings = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 24),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 3),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), (3, 11)]),
    }
)


class EngineMachine(RuleBasedStateMachine):
    """A source engine and a puller, both also serving requests of their own, with all actions in
    any order.

    Hand-offs: `offered` are held requests whose prompt is computed, `reserved` those with a
    reservation.
    """

    @initialize(
        capacity=st.integers(14, 40),
        budget=st.integers(1, 40),
        max_num_seqs=st.integers(1, 6),
        is_caching=st.booleans(),
        is_optimistic=st.booleans(),
        runs_ahead=st.booleans(),
        num_stages=st.sampled_from([1, 1, 2, 4]),
        max_held_blocks=st.sampled_from([None, 4, 12]),
    )
    def start(
        self,
        capacity: int,
        budget: int,
        max_num_seqs: int,
        is_caching: bool,
        is_optimistic: bool,
        runs_ahead: bool,
        num_stages: int,
        max_held_blocks: int | None,
    ) -> None:
        self.source, self.puller = self.engines = [
            new_engine(
                capacity,
                optimistic=is_optimistic,
                runs_ahead=runs_ahead,
                num_stages=num_stages,
                max_num_batched_tokens=budget,
                max_num_seqs=max_num_seqs,
                max_held_blocks=max_held_blocks,
                enable_prefix_caching=is_caching,
            )
            for _ in range(2)
        ]
        self.recorder = Recorder()
        self.started: dict[int, list[str]] = defaultdict(list)  # request keys by engine
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.offered: list[str] = []
        self.reserved: list[Reservation] = []

    def new(self, prompt: list[int], sampling: dict[str, object]) -> Request:
        index = len(self.requests)
        request = new_request(f"r{index}", prompt, **sampling)
        request = dataclasses.replace(request, caller_id=index % 3)
        self.requests[request.key] = request
        return request

    @rule(index=st.integers(0, 1), prompt=prompts, sampling=samplings)
    def add(self, index: int, prompt: list[int], sampling: dict[str, object]) -> None:
        self.engines[index].add(self.new(prompt, sampling))

    @rule(prompt=prompts, sampling=samplings)
    def add_held(self, prompt: list[int], sampling: dict[str, object]) -> None:
        self.source.add(self.new(prompt, sampling), hold=True)

    @rule(index=st.integers(0, 1), num_steps=st.integers(1, 4))
    def step(self, index: int, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step_once(self.engines[index])

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 1), prompt=prompts, sampling=samplings, data=st.data())
    def things_come_during_a_step(
        self,
        index: int,
        prompt: list[int],
        sampling: dict[str, object],
        data: st.DataObject,
    ) -> None:
        things: list[Callable[[], object]] = [
            lambda: self.add(index, prompt, sampling),
            lambda: self.abort(data),
            lambda: self.offered and self.reserve(),
        ]
        coming = iter(data.draw(st.permutations(things)))

        def meanwhile() -> bool:
            thing = next(coming, None)
            if thing is not None:
                thing()
                self.no_block_is_lost()
            return thing is not None

        self.step_once(self.engines[index], meanwhile)

    def step_once(self, engine: Engine, meanwhile: Callable[[], bool] | None = None) -> bool:
        has_work = engine.has_work
        output = self.recorder.take(engine.step(meanwhile))
        assert has_work or output == StepOutput(), "a step that has_work did not announce"
        self.started[id(engine)] += output.started
        self.offered += [chunk.key for chunk in output.chunks if chunk.is_last]
        return bool(output.tokens or output.chunks or output.started)

    @precondition(lambda self: self.offered)
    @rule()
    def reserve(self) -> None:
        """Queue one offered request for blocks, and take the next reservation with its blocks."""
        if key := next((key for key in self.offered if key not in self.puller.by_key), None):
            self.puller.reserve(self.requests[key])
        reservation = self.puller.next_reservation()
        if reservation is not None:
            self.offered.remove(reservation.key)
            self.reserved.append(reservation)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), is_dropped=st.booleans())
    def attach(self, data: st.DataObject, is_dropped: bool) -> None:
        index = data.draw(st.integers(0, len(self.reserved) - 1))
        reservation = self.reserved.pop(index)
        if is_dropped:
            self.puller.drop(reservation)
            self.aborted.add(reservation.key)
        else:
            copy_blocks(self.source, reservation.key, self.puller, reservation)
            self.puller.start(reservation, self.recorder.tokens[reservation.key][-1])
        self.source.abort(reservation.key)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.requests)))
        for engine in self.engines:
            engine.abort(key)
        self.aborted.add(key)
        self.offered = [k for k in self.offered if k != key]
        for reservation in [r for r in self.reserved if r.key == key]:
            self.reserved.remove(reservation)
            held = self.puller.pool.counts.held
            self.puller.abort(key)
            assert self.puller.pool.counts.held == held, "a pull may write to it"
            self.puller.drop(reservation)

    @invariant()
    def no_block_is_lost(self) -> None:
        for engine in getattr(self, "engines", ()):
            check_integrity(engine)
            load = engine.stats.load()
            assert load.waiting_tokens == sum(load.waiting_by_caller.values())
            assert (load.waiting_tokens > 0) >= (load.num_waiting > 0)
            assert 0 <= load.room_blocks <= engine.limits.capacity

    def teardown(self) -> None:
        """All requests end by steps and hand-offs alone."""
        if not hasattr(self, "engines"):
            return
        while self.drain():
            pass
        for key, request in self.requests.items():
            tokens, reason = expected_outputs(request)
            if key in self.recorder.reasons or key not in self.aborted:
                assert self.recorder.tokens[key] == tokens
                assert self.recorder.reasons[key] == reason
            else:
                assert tokens[: len(self.recorder.tokens[key])] == self.recorder.tokens[key]
        for engine in self.engines:
            started = self.started[id(engine)]
            assert len(set(started)) == len(started)
            assert_idle(engine)

    def drain(self) -> bool:
        """Run one round; returns whether there was progress. A stalled engine reports no work."""
        has_moved = False
        for engine in self.engines:
            if engine.has_work:
                has_moved = self.step_once(engine) or has_moved
        if self.offered:
            num_offered = len(self.offered)
            self.reserve()
            has_moved = has_moved or len(self.offered) < num_offered
        for reservation in self.reserved:
            copy_blocks(self.source, reservation.key, self.puller, reservation)
            self.puller.start(reservation, self.recorder.tokens[reservation.key][-1])
            self.source.abort(reservation.key)
            has_moved = True
        self.reserved = []
        return has_moved or any(engine.has_work for engine in self.engines)


EngineMachine.TestCase.settings = examples(25, 80, stateful_step_count=30)
test_engine_machine = EngineMachine.TestCase


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_engine_machine_for_long() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        EngineMachine, settings=settings(max_examples=1500, stateful_step_count=60, deadline=None)
    )


def test_what_comes_during_the_last_step_is_launched_behind_it() -> None:
    engine = new_engine(runs_ahead=True)
    engine.add(new_request("a", [1, 2, 3], max_tokens=1), hold=True)
    engine.step()
    later = [new_request("b", [4, 5], max_tokens=1)]

    def meanwhile() -> bool:
        if not later:
            return False
        engine.add(later.pop())
        return True

    output = engine.step(meanwhile)
    assert [token.key for token in output.tokens] == ["a/0"]
    assert [*output.started] == ["b/0"]  # already launched on the device
    assert [token.key for token in engine.step().tokens] == ["b/0"]


@pytest.mark.parametrize("budget", [1, 3, 16, 64])
@pytest.mark.parametrize("is_caching", [True, False])
def test_preemption_changes_no_token(budget: int, is_caching: bool) -> None:
    engine = new_engine(
        12, optimistic=True, max_num_batched_tokens=budget, enable_prefix_caching=is_caching
    )
    requests = [new_request(f"r{i}", [i] * (5 + i), max_tokens=25) for i in range(5)]
    for request in requests:
        engine.add(request)
    recorder = run(engine)
    for request in requests:
        assert recorder.tokens[request.key] == expected_outputs(request)[0]
    assert engine.stats.ledger()["num_preemptions"] != 0 or budget == 1
    assert_idle(engine)


def test_a_good_estimate_needs_no_preemption() -> None:
    engine = new_engine(12)
    for i in range(5):
        engine.add(new_request(f"r{i}", [i] * (5 + i), max_tokens=25))
    run(engine)
    assert engine.stats.ledger()["num_preemptions"] == 0


def test_history_lets_more_requests_in() -> None:
    """Both requests may take all memory; the second waits until past outputs were short."""
    prompt = next([p] for p in range(1000) if first_tokens([p], 3)[2] == EOS)
    for num_seen, num_running in [(0, 1), (1, 2)]:
        engine = new_engine(12)
        for i in range(num_seen):
            engine.add(new_request(f"seen{i}", prompt, max_tokens=40, ignore_eos=False))
            run(engine)
        for name in "ab":
            engine.add(new_request(name, [3, 4], max_tokens=40))
        engine.step()
        assert engine.stats.load().num_running == num_running


def test_a_block_is_cached_only_when_its_last_slot_is_written() -> None:
    """The first token would fill the fourth block, but its KV is not yet computed."""
    engine = new_engine(max_num_batched_tokens=64)
    engine.add(new_request("a", [1] * 15), hold=True)
    token_id = engine.step().tokens[0].token_id
    engine.add(new_request("b", [*[1] * 15, token_id, 5], max_tokens=1))
    engine.step()
    assert runner_of(engine).batch_sizes == [[15], [17 - 12]]
    engine.abort("a/0")
    assert_idle(engine)


# -- ends of requests -----------------------------------------------------------------------------


def first_tokens(prompt: list[int], n: int) -> list[int]:
    return expected_tokens(prompt, n, vocab_size=VOCAB_SIZE)


def test_max_tokens_counts_the_outputs_of_earlier_attempts() -> None:
    prompt, tokens = [1, 2, 3], first_tokens([1, 2, 3], 6)
    resumed = dataclasses.replace(
        new_request("r", prompt, max_tokens=6), output_token_ids=tuple(tokens[:4])
    )
    engine = new_engine()
    engine.add(resumed)
    outputs = [t for _ in range(2) for t in engine.step().tokens]
    assert [(t.index, t.token_id) for t in outputs] == [(4, tokens[4]), (5, tokens[5])]
    assert [t.finish_reason for t in outputs] == [None, FinishReason.LENGTH]
    assert outputs[0].logprob == -float(tokens[4])
    assert not engine.has_work


def test_the_end_of_the_context_ends_the_request() -> None:
    engine = new_engine(max_model_len=10)
    engine.add(new_request("r", [1] * 6, max_tokens=100))
    recorder = run(engine)
    assert len(recorder.tokens["r/0"]) == 4
    assert recorder.reasons["r/0"] is FinishReason.LENGTH


def test_eos_and_stop_ids_are_output_and_end_the_request() -> None:
    prompt = next([p] for p in range(1000) if first_tokens([p], 3)[2] == EOS)
    tokens = first_tokens(prompt, 8)
    for sampling, num_outputs in [
        ({"ignore_eos": False}, 3),
        ({"ignore_eos": True}, 8),
        ({"ignore_eos": True, "stop_token_ids": (EOS,)}, 3),
        ({"ignore_eos": False, "stop_token_ids": (tokens[1],)}, 2),
    ]:
        engine = new_engine()
        engine.add(new_request("r", prompt, max_tokens=8, **sampling))
        recorder = run(engine)
        assert recorder.tokens["r/0"] == tokens[:num_outputs]
        is_stop = recorder.reasons["r/0"] is FinishReason.STOP
        assert is_stop == (num_outputs < 8)
        assert_idle(engine)


# -- refusals and failures ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error"),
    [
        ([], 5, InvalidRequest),
        ([1] * 4, 0, InvalidRequest),
        ([1] * 64, 5, ContextLengthExceeded),
        ([1] * 40, 5, PromptTooLarge),
    ],
)
def test_what_can_never_run_is_refused(
    prompt: list[int], max_tokens: int, error: type[InvalidRequest]
) -> None:
    engine = new_engine(10, max_model_len=64)
    request = new_request("r", prompt, max_tokens=max_tokens)
    with pytest.raises(error) as caught:
        engine.add(request)
    assert type(caught.value) is error
    with pytest.raises(error):
        engine.reserve(request)
    assert_idle(engine)


def test_a_key_is_taken_once() -> None:
    engine = new_engine()
    engine.add(new_request("r", [1]))
    with pytest.raises(InvalidRequest):
        engine.add(new_request("r", [2]))


def test_the_largest_prompt_runs_and_outgrowing_the_pool_fails_alone() -> None:
    engine = new_engine(10, optimistic=True)
    engine.add(new_request("big", [1] * 39, max_tokens=5))
    engine.add(new_request("small", [2] * 4, max_tokens=5))
    outputs = []
    while engine.has_work:
        outputs.append(engine.step())
    failed = [failure for output in outputs for failure in output.failed]
    assert [(key, type(error)) for key, error in failed] == [("big/0", PromptTooLarge)]
    tokens = [t.token_id for output in outputs for t in output.tokens if t.key == "small/0"]
    assert tokens == first_tokens([2] * 4, 5)
    assert_idle(engine)


def test_a_broken_device_goes_through() -> None:
    engine = new_engine()

    def break_down(batch: Sequence[SequenceSlice]) -> None:
        raise EngineFailed("device lost")

    runner_of(engine).on_execute = break_down
    engine.add(new_request("r", [1]))
    with pytest.raises(EngineFailed):
        engine.step()


# -- abort in flight ------------------------------------------------------------------------------


@pytest.mark.parametrize("hold", [False, True])
def test_blocks_of_a_request_aborted_in_flight_are_fenced(hold: bool) -> None:
    engine = new_engine(6)
    seen: list[dict[str, object]] = []

    def abort(batch: Sequence[SequenceSlice]) -> None:
        engine.abort("r/0")
        check_integrity(engine)
        seen.append(engine.stats.ledger())
        assert engine.pool.counts.held == 3
        handed_out = engine.pool.allocate(3) or []
        assert not set(handed_out) & set(batch[0].block_table)
        engine.pool.release(handed_out)

    runner_of(engine).on_execute = abort
    engine.add(new_request("r", [1] * 10), hold=hold)
    output = engine.step()
    assert output == StepOutput(started={"r/0": 0})
    assert seen[0]["num_fences"] == 1 and seen[0]["requests"] == {}
    assert_idle(engine)


# -- hold, reserve, start -------------------------------------------------------------------------


def test_chunks_of_a_held_request() -> None:
    engine = new_engine(max_num_batched_tokens=6)
    for name, chunks in [("a", [6, 12, 14]), ("b", [14])]:
        engine.add(new_request(name, [5] * 14), hold=True)
        outputs = []
        while engine.has_work:
            outputs.append(engine.step())
        done = [chunk for output in outputs for chunk in output.chunks]
        assert [chunk.num_tokens for chunk in done] == chunks
        assert [chunk.is_last for chunk in done] == [False] * (len(chunks) - 1) + [True]
        num_cached = 0 if name == "a" else 12
        assert [o.started for o in outputs if o.started] == [{f"{name}/0": num_cached}]
        assert [t.index for output in outputs for t in output.tokens] == [0]
    assert engine.stats.load().num_running == 0
    for name in "ab":
        engine.abort(f"{name}/0")
        engine.abort(f"{name}/0")
    assert_idle(engine)


def test_block_refs_name_blocks_generations_and_hashes() -> None:
    engine = new_engine(max_num_batched_tokens=6)
    prompt = list(range(15))
    engine.add(new_request("r", prompt), hold=True)
    hashes = block_hashes(root_hash(FINGERPRINT), prompt, BLOCK_SIZE)
    for num_full in (1, 3, 3):
        engine.step()
        refs = engine.block_refs("r/0", 0, 4)
        assert len(refs) == 4
        assert refs.hashes == b"".join(hashes[:num_full])
        drawn = map(engine.pool._generations.read, refs.block_ids.tolist())
        assert refs.generations.tolist() == [*drawn]
    # The first token would fill the last block, but its KV is not computed.
    assert engine.block_refs("r/0", 3, 4).hashes == b""
    for index, block_id in enumerate(refs.block_ids[:3].tolist()):
        start = index * BLOCK_SIZE
        tokens = runner_of(engine).block_tokens(block_id)
        assert tokens == prompt[start : start + BLOCK_SIZE]


def test_a_held_request_that_ends_with_its_first_token_holds_nothing() -> None:
    engine = new_engine()
    engine.add(new_request("r", [1] * 9, max_tokens=1), hold=True)
    output = engine.step()
    assert output.tokens[0].finish_reason is FinishReason.LENGTH
    assert not output.chunks
    assert_idle(engine)


@pytest.fixture
def handed_over() -> Iterator[tuple[Engine, Engine, Request, int]]:
    """A source with a computed request of 14 tokens, an idle puller, request and first token."""
    source, puller = new_engine(), new_engine()
    request = new_request("r", range(14), max_tokens=9)
    source.add(request, hold=True)
    token_id = source.step().tokens[0].token_id
    yield source, puller, request, token_id
    source.abort(request.key)
    assert_idle(source)
    assert_idle(puller)


Handed = tuple[Engine, Engine, Request, int]


def test_the_puller_goes_on_as_if_it_had_computed_the_prompt(handed_over: Handed) -> None:
    source, puller, request, token_id = handed_over
    for num_cached in (0, 3):  # the second time, the puller has all full blocks cached
        puller.reserve(request)
        reservation = puller.next_reservation()
        assert reservation is not None
        assert reservation.num_cached_blocks == num_cached
        assert (reservation.num_known_blocks, len(reservation.block_ids)) == (4, 4)
        assert not puller.has_work
        copy_blocks(source, request.key, puller, reservation)
        puller.start(reservation, token_id)
        recorder = Recorder()
        recorder.tokens[request.key].append(token_id)
        recorder.tokens[request.key] += [token.token_id for token in puller.step().tokens]
        puller.reserve(dataclasses.replace(request, attempt=1))
        twin = puller.next_reservation()
        assert twin is not None and twin.num_cached_blocks == 3, "cached with its first step"
        puller.drop(twin)
        run(puller, recorder)
        assert recorder.tokens[request.key] == first_tokens(list(range(14)), 9)


def test_a_reservation_has_room_to_grow() -> None:
    puller = new_engine()
    request = new_request("r", range(16))
    puller.reserve(request)
    reservation = puller.next_reservation()
    assert reservation is not None
    assert (reservation.num_known_blocks, len(reservation.block_ids)) == (4, 5)
    check_integrity(puller)
    puller.drop(reservation)
    puller.drop(reservation)
    assert_idle(puller)


def test_dropping_leaves_a_fenced_block_to_its_fence(handed_over: Handed) -> None:
    _source, puller, request, _token_id = handed_over
    puller.reserve(request)
    reservation = puller.next_reservation()
    assert reservation is not None
    fence = puller.pool.open_fence(reservation.block_ids)
    puller.drop(reservation)
    check_integrity(puller)
    assert puller.pool.counts.held == 4
    fence.close()


def test_a_token_that_ends_the_request_is_not_handed_over(handed_over: Handed) -> None:
    _source, puller, request, token_id = handed_over
    ended = dataclasses.replace(
        request, sampling=dataclasses.replace(request.sampling, stop_token_ids=(token_id,))
    )
    puller.reserve(ended)
    reservation = puller.next_reservation()
    assert reservation is not None
    with pytest.raises(HandoffFailed):
        puller.start(reservation, token_id)
    puller.drop(reservation)


def test_a_reservation_that_does_not_fit_is_refused_until_something_ends() -> None:
    puller = new_engine(10)
    puller.add(new_request("a", [1] * 20, max_tokens=2))
    puller.step()
    late = new_request("b", [2] * 24, max_tokens=2)
    puller.reserve(late)
    assert puller.next_reservation() is None
    assert puller.next_reservation() is None
    run(puller)
    reservation = puller.next_reservation()
    assert reservation is not None
    puller.drop(reservation)
    assert_idle(puller)


def test_a_reservation_gets_the_place_of_a_request_that_is_now_held() -> None:
    engine = new_engine(max_num_seqs=1)
    engine.add(new_request("a", [1] * 20), hold=True)
    engine.step()
    late = new_request("b", [2] * 4)
    engine.reserve(late)
    assert engine.next_reservation() is None
    engine.step()
    reservation = engine.next_reservation()
    assert reservation is not None
    engine.drop(reservation)
    engine.abort("a/0")
    assert_idle(engine)


def test_a_closed_fence_is_work_for_who_waits_for_its_blocks() -> None:
    engine = new_engine(10)
    engine.reserve(new_request("a", [1] * 30))
    reservation = engine.next_reservation()
    assert reservation is not None
    fence = engine.pool.open_fence(reservation.block_ids)
    engine.drop(reservation)
    engine.add(new_request("b", [2] * 16, max_tokens=3))
    assert engine.step() == StepOutput()
    assert not engine.has_work
    fence.close()
    assert len(run(engine).tokens["b/0"]) == 3
    assert_idle(engine)


# -- inspection -----------------------------------------------------------------------------------


def test_load_and_ledger() -> None:
    engine = new_engine(20, max_held_blocks=8, max_num_seqs=1)
    engine.add(new_request("a", [1] * 20), hold=True)
    engine.add(new_request("b", [2] * 6))
    assert engine.stats.load() == EngineLoad(
        0, 2, waiting_tokens=26, waiting_pairs=231, free_blocks=20, credit_blocks=8, held_blocks=0,
        room_blocks=9, output_tokens=0, mean_output_tokens=0, waiting_by_caller={0: 26},
    )  # fmt: skip
    engine.step()
    assert engine.stats.load() == EngineLoad(
        1, 1, waiting_tokens=10, waiting_pairs=95, free_blocks=15, credit_blocks=3, held_blocks=5,
        room_blocks=9, output_tokens=0, mean_output_tokens=0, waiting_by_caller={0: 10},
    )  # fmt: skip
    ledger = json.loads(json.dumps(engine.stats.ledger()))
    assert ledger["blocks"] == {"free": 15, "cached": 0, "held": 5, "reserved": 2, "total": 22}
    assert ledger["requests"]["a/0"] == {
        "state": "running",
        "num_blocks": 5,
        "num_tokens": 20,
        "num_computed_tokens": 16,
    }
    engine.abort("a/0")
    engine.abort("b/0")
    engine.abort("never heard of")
    assert_idle(engine)


def test_a_salt_separates_equal_prompts() -> None:
    engine = new_engine()
    for salt, num_scheduled in [("x", 9), ("y", 9), ("x", 1)]:
        request = new_request(f"{salt}{num_scheduled}", [1] * 9, max_tokens=1)
        engine.add(dataclasses.replace(request, cache_salt=salt))
        engine.step()
        assert runner_of(engine).batch_sizes[-1] == [num_scheduled]


def test_a_request_that_would_break_the_promise_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = new_engine(max_num_seqs=16, max_num_batched_tokens=64)
    monkeypatch.setattr(engine._step_costs, "estimate", lambda: linear_cost(0.010, 0.002))
    engine.promise.check(new_request("a", [1, 2, 3]))
    engine.promise.tbt_target_s = 0.020
    for name in "bcde":
        engine.promise.check(new_request(name, [1, 2, 3]))
        engine.add(new_request(name, [1, 2, 3], max_tokens=30))
    engine.promise.check(new_request("f", [1, 2, 3]))
    with pytest.raises(PromiseRefused, match="6 decodes takes longer"):
        engine.promise.check(new_request("f", [1, 2, 3]), num_coming=1)
    with pytest.raises(PromiseRefused, match="5 decodes takes longer"):
        engine.promise.check(new_request("f", [1, 2, 3], tbt_target_ms=15.0))
    engine.promise.check(new_request("f", [1, 2, 3], tbt_target_ms=1.0))
    assert engine.stats.totals().num_refusals == 2, "what no engine keeps holds nobody up"
    run(engine)
    engine.promise.check(new_request("f", [1, 2, 3], tbt_target_ms=15.0), num_coming=1)


def test_what_steps_had_in_them_and_whether_they_kept_the_promise() -> None:
    engine = new_engine(max_num_batched_tokens=64)
    engine.promise.tbt_target_s = 1e-9
    engine.add(new_request("a", [1, 2, 3], max_tokens=6, ignore_eos=True))
    assert engine.stats.decode_step_p99_s is None
    run(engine)
    totals = engine.stats.totals()
    assert (totals.num_prompts, totals.num_prompt_tokens, totals.num_decode_tokens) == (1, 3, 5)
    assert (totals.num_promised_steps, totals.num_kept_steps) == (5, 0)
    engine.promise.tbt_target_s = 60.0
    engine.add(new_request("b", [1, 2, 3], max_tokens=6, ignore_eos=True))
    run(engine)
    totals = engine.stats.totals()
    assert (totals.num_promised_steps, totals.num_kept_steps) == (10, 5)
    assert engine.stats.decode_step_p99_s is not None and engine.stats.decode_step_p99_s > 0
