"""Speculation over the fake runner: for any drafts, the tokens are the oracle's."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from engines.integrity import check_integrity
from fakes.clock import TickingClock
from fakes.proposer import FakeProposer
from fakes.runner import FakeRunner, expected_tokens
from fakes.speculation.drafting_runner import DraftingRunner

from baton.core.request.request import FinishReason, Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.kv.block_pool import NUM_RESERVED_BLOCKS, Reservation
from baton.engine.kv.generations import Generations
from baton.engine.kv.limits import EngineLimits
from baton.engine.scheduling.admission import OutputLengthEstimator
from baton.engine.scheduling.outputs import StepOutput
from baton.engine.speculation.draft_model import DraftModelProposer
from baton.engine.speculation.proposer import Context, Proposer

BLOCK_SIZE, VOCAB_SIZE, EOS = 4, 50, 7
MAX_MODEL_LEN = 120


class Optimist(OutputLengthEstimator):
    """Estimates outputs as one token, so that memory runs out and sequences are preempted."""

    def estimate(self, num_generated: int, max_tokens: int) -> int:
        return 1


class Scene:
    """Engines of one model, their requests and their outputs."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}

    def engine(
        self,
        capacity: int,
        *,
        runs_ahead: bool,
        rate: float,
        has_draft_model: bool = False,
        **limits: int,
    ) -> Engine:
        num_blocks = capacity + NUM_RESERVED_BLOCKS
        most, sizes = self.random.randint(1, 6), (num_blocks, BLOCK_SIZE)
        kind = {"vocab_size": VOCAB_SIZE, "runs_ahead": runs_ahead, "num_looks": 2}
        if has_draft_model:
            runner: FakeRunner = DraftingRunner(*sizes, rate=rate, **kind)
            proposer: Proposer = DraftModelProposer(runner, most)  # type: ignore[arg-type]
        else:
            runner = FakeRunner(*sizes, **kind)  # type: ignore[arg-type]
            proposer = FakeProposer(self.oracle, rate=rate, max_drafts=most, seed=capacity)
        return Engine(
            EngineParts(
                runner,
                EngineLimits(num_blocks, BLOCK_SIZE, max_model_len=MAX_MODEL_LEN, **limits),
                Generations(num_blocks),
                fingerprint="fake",
                eos_token_ids={EOS},
                estimator=Optimist(),
                clock=TickingClock(),
                proposer=proposer,
            )
        )

    def oracle(self, context: Context) -> Sequence[int]:
        request = self.requests[context.sequence.key]
        num_outputs = len(context.token_ids) - len(request.prompt_token_ids)
        return self.expected(request, num_outputs + context.max_drafts)[num_outputs:]

    def expected(self, request: Request, num_tokens: int) -> list[int]:
        return expected_tokens(
            request.prompt_token_ids,
            num_tokens,
            params=request.sampling,
            vocab_size=VOCAB_SIZE,
            sample_index=request.sample_index,
        )

    def new_request(self, **fields: object) -> Request:
        draw = self.random
        sampling = SamplingParams(
            max_tokens=draw.randint(1, 30),
            temperature=draw.choice([0.0, 1.0]),
            seed=draw.randint(0, 3),
            ignore_eos=draw.random() < 0.5,
            stop_token_ids=draw.choice([(), (3, 11)]),
            frequency_penalty=draw.choice([0.0, 0.0, 0.5]),
            speculative=draw.random() < 0.8,
            logprobs=draw.choice([None, 1]),
        )
        prompt = tuple(draw.choices(range(3), k=draw.randint(1, 25)))
        forks = tuple(f"{len(self.requests)}-{i}" for i in range(draw.choice([0, 0, 2])))
        request = Request(f"r{len(self.requests)}", 0, prompt, sampling, fork_ids=forks)
        for one in (request, *request.forks):
            self.requests[one.key] = one
            self.tokens[one.key] = []
        return request

    def take(self, output: StepOutput) -> None:
        assert not output.failed
        for token in output.tokens:
            assert token.key not in self.reasons, "a token behind the end"
            assert token.index == len(self.tokens[token.key])
            self.tokens[token.key].append(token.token_id)
            if self.requests[token.key].sampling.logprobs:
                assert token.top == ((token.token_id, 0.0),)
            if token.finish_reason is not None:
                self.reasons[token.key] = token.finish_reason

    def check(self, engine: Engine, *, but: Sequence[str] = ()) -> None:
        """All outputs are the oracle's, all requests have ended and no block is held."""
        for key, tokens in self.tokens.items():
            request = self.requests[key]
            assert tokens == self.expected(request, len(tokens))
            if key in but:
                continue
            ends = set(request.sampling.stop_token_ids)
            ends |= set() if request.sampling.ignore_eos else {EOS}
            assert not ends & set(tokens[:-1])
            is_full = len(tokens) == request.sampling.max_tokens
            assert is_full or tokens[-1] in ends, key
        check_integrity(engine)
        assert engine.pool.counts.held == 0
        assert engine.stats.ledger()["requests"] == {}


def mixed_run(
    seed: int, num_requests: int, *, runs_ahead: bool, has_draft_model: bool = False
) -> Engine:
    """Run requests that arrive while others run; some are aborted, all others end."""
    scene = Scene(seed)
    draw = scene.random
    engine = scene.engine(
        draw.choice([14, 30, 200]),
        runs_ahead=runs_ahead,
        rate=draw.choice([0.0, 0.5, 0.8, 1.0]),
        has_draft_model=has_draft_model,
        max_num_seqs=draw.randint(1, 8),
        max_num_batched_tokens=draw.choice([8, 16, 64]),
    )
    aborted: list[str] = []

    def meanwhile() -> bool:
        if draw.random() < 0.2 and scene.requests:
            key = draw.choice([*scene.requests])
            if key not in scene.reasons:
                engine.abort(key)
                aborted.append(key)
                aborted.extend(one.key for one in scene.requests[key].forks)
        return draw.random() < 0.3

    waiting = num_requests
    for _ in range(10_000):
        if waiting and draw.random() < 0.4:
            engine.add(scene.new_request())
            waiting -= 1
        elif not engine.has_work and not waiting:
            break
        scene.take(engine.step(meanwhile if draw.random() < 0.1 else None))
        check_integrity(engine)
    scene.check(engine, but=aborted)
    return engine


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_outputs_are_those_without_speculation(runs_ahead: bool) -> None:
    preempted = accepted = 0
    for seed in range(25):
        totals = mixed_run(seed, 8, runs_ahead=runs_ahead).stats.totals()
        preempted += totals.num_preemptions
        accepted += sum(totals.speculation.accepted)
        assert sum(totals.speculation.accepted) <= totals.speculation.num_draft_tokens
    assert preempted and accepted > 100


@pytest.mark.slow
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_outputs_of_thousands_of_requests(runs_ahead: bool) -> None:
    for seed in range(1000, 1250):
        mixed_run(seed, 20, runs_ahead=runs_ahead, has_draft_model=seed % 3 == 0)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_perfect_drafts_take_few_steps(runs_ahead: bool) -> None:
    scene = Scene(1)
    engine = scene.engine(200, runs_ahead=runs_ahead, rate=1.0)
    sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    request = scene.requests["a/0"] = Request("a", 0, (1, 2, 3), sampling)
    scene.tokens["a/0"] = []
    engine.add(request)
    num_steps = 0
    while engine.has_work:
        scene.take(engine.step())
        num_steps += 1
    scene.check(engine)
    assert num_steps < 45
    counts = engine.stats.totals().speculation
    assert sum(counts.accepted) == counts.num_draft_tokens
    assert engine.stats.totals().num_decode_tokens == 59


@pytest.mark.parametrize("seed", range(20))
def test_drafts_behind_the_end_do_not_count_as_accepted(seed: int) -> None:
    """Drafts behind a stop token do not count as accepted, even if the model would output them."""
    scene = Scene(seed)
    engine = scene.engine(200, runs_ahead=False, rate=1.0)
    sampling = SamplingParams(max_tokens=60, seed=seed, ignore_eos=True, stop_token_ids=(3, 11))
    request = scene.requests["a/0"] = Request("a", 0, (1, 2, 3), sampling)
    tokens = scene.tokens["a/0"] = []
    engine.add(request)
    while engine.has_work:
        before, num_tokens = engine.stats.totals().speculation, len(tokens)
        scene.take(engine.step())
        counts = engine.stats.totals().speculation
        if counts.num_drafts > before.num_drafts:
            num_accepted = sum(counts.accepted) - sum(before.accepted)
            num_output, has_ended = len(tokens) - num_tokens, "a/0" in scene.reasons
            assert num_accepted == num_output - 1 or (has_ended and num_accepted == num_output)
    scene.check(engine)


def hand_over(scene: Scene, source: Engine, puller: Engine, key: str) -> Reservation:
    puller.reserve(scene.requests[key])
    reservation = puller.next_reservation()
    assert reservation is not None
    first, last = reservation.num_cached_blocks, reservation.num_known_blocks
    refs = source.block_refs(key, first, last)
    for theirs, ours in zip(refs.block_ids, reservation.block_ids[first:last], strict=True):
        content = source._runner.read_block(int(theirs))  # type: ignore[attr-defined]
        puller._runner.write_block(ours, content)  # type: ignore[attr-defined]
    return reservation


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_speculation_goes_on_behind_a_hand_off(runs_ahead: bool) -> None:
    """Speculation continues behind a hand-off: drafts depend on the tokens alone."""

    def counts(*, handed_over: bool) -> list[int]:
        scene = Scene(3)
        source, puller = (scene.engine(300, runs_ahead=runs_ahead, rate=0.8) for _ in range(2))
        puller._speculator._proposer.max_drafts = 4  # type: ignore[union-attr, misc]
        for index in range(6):
            sampling = SamplingParams(max_tokens=80, temperature=1.0, seed=index, ignore_eos=True)
            request = Request(f"r{index}", 0, tuple(range(index + 3)), sampling)
            scene.requests[request.key] = request
            scene.tokens[request.key] = []
            (source if handed_over else puller).add(request, hold=handed_over)
        while source.has_work:
            scene.take(source.step())
        assert not source.stats.totals().speculation.num_draft_tokens, "held ones have one token"
        for key in [*scene.requests] if handed_over else []:
            reservation = hand_over(scene, source, puller, key)
            puller.start(reservation, scene.tokens[key][-1])
            source.abort(key)
        while puller.has_work:
            scene.take(puller.step())
        scene.check(puller)
        found = puller.stats.totals().speculation
        return [found.num_draft_tokens, sum(found.accepted)]

    (drafted, accepted), (drafted_one, accepted_one) = (
        counts(handed_over=each) for each in (True, False)
    )
    assert accepted / drafted == pytest.approx(accepted_one / drafted_one, rel=0.1)


def test_a_request_without_speculation_has_no_drafts() -> None:
    scene = Scene(1)
    engine = scene.engine(200, runs_ahead=True, rate=1.0)
    sampling = SamplingParams(max_tokens=20, temperature=0.0, speculative=False, ignore_eos=True)
    request = scene.requests["a/0"] = Request("a", 0, (1, 2, 3), sampling)
    scene.tokens["a/0"] = []
    engine.add(request)
    while engine.has_work:
        scene.take(engine.step())
    scene.check(engine)
    assert engine.stats.totals().speculation.num_draft_tokens == 0
