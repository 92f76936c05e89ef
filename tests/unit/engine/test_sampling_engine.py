"""Sampling parameters through the real engine: equal to transformers, and the same for any
schedule.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from effort import half
from engines.integrity import check_integrity
from fakes.runner import FakeRunner, expected_tokens
from transformers import LlamaForCausalLM

from baton.core.engine_config import EngineConfig
from baton.core.request.request import FinishReason, Request, TokenLogprobs
from baton.core.request.sampling_params import SamplingParams
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.execution.batch import SequenceSlice
from baton.engine.execution.runner import ModelRunner
from baton.engine.kv.generations import Generations
from baton.engine.kv.limits import EngineLimits
from baton.engine.model.layers import Embedding
from baton.engine.scheduling.outputs import PromptLogprobs, TokenOutput

BLOCK_SIZE, EOS, NUM_TOKENS = 16, 2, 24
EVERYTHING = SamplingParams(
    max_tokens=NUM_TOKENS,
    temperature=0.9,
    top_p=0.95,
    top_k=40,
    min_p=0.01,
    seed=5,
    repetition_penalty=1.2,
    presence_penalty=-1.8,
    frequency_penalty=0.6,
    logit_bias=((7, 3.0), (9, -100.0)),
    allowed_token_ids=tuple(range(7, 300, 2)),
    min_tokens=NUM_TOKENS,
    stop_token_ids=(11, 12, 13),
    logprobs=3,
)
PLAIN = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


@dataclasses.dataclass
class Models:
    """One checkpoint in transformers and in our runners."""

    theirs: LlamaForCausalLM
    runners: list[ModelRunner]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    theirs = write_checkpoint(folder, seed=2)
    config = EngineConfig(model=str(folder), device="cpu", block_size=16, num_kv_blocks=80)
    return Models(theirs, [ModelRunner(config) for _ in range(2)])


def new_engine(models: Models, *, which: int = 0, **limits: int) -> Engine:
    """An engine over a runner's whole pool, or its first `num_blocks` blocks."""
    chosen = {"num_blocks": 80, "max_model_len": 512, "max_num_batched_tokens": 64} | limits
    return Engine(
        EngineParts(
            models.runners[which],
            EngineLimits(block_size=BLOCK_SIZE, **chosen),
            Generations(chosen["num_blocks"]),
            fingerprint="test",
            eos_token_ids={EOS},
        )
    )


def new_request(length: int, sampling: SamplingParams, **fields: object) -> Request:
    """A new request; requests of one length share their prompt."""
    prompt = tuple(random.Random(length).choices(range(3, 320), k=length))
    name = f"{random.getrandbits(128):032x}"
    return dataclasses.replace(Request(name, 0, prompt, sampling), **fields)


def run(engine: Engine, *requests: Request, hold: bool = False) -> dict[str, list[TokenOutput]]:
    """Output tokens by request key; checks at the end that all blocks are accounted for."""
    outputs: dict[str, list[TokenOutput]] = {}
    for request in requests:
        engine.add(request, hold=hold)
    while engine.has_work:
        step = engine.step()
        assert not step.failed
        for token in step.tokens:
            outputs.setdefault(token.key, []).append(token)
    check_integrity(engine)
    if not hold:
        assert engine.pool.counts.held == 0
    return outputs


def ids(tokens: Sequence[TokenOutput]) -> list[int]:
    return [token.token_id for token in tokens]


def alone(models: Models, request: Request) -> list[TokenOutput]:
    return run(new_engine(models), request)[request.key]


def results(tokens: Sequence[TokenOutput]) -> list[tuple[object, ...]]:
    """Token ids to compare exactly, log-probabilities up to the rounding of other chunk sizes."""
    return [
        (t.token_id, pytest.approx(t.logprob, abs=1e-4), [token_id for token_id, _ in t.top])
        for t in tokens
    ]


def hand_over(
    models: Models, request: Request
) -> tuple[dict[str, list[TokenOutput]], Engine, Engine]:
    """Prefill on one engine, copy the blocks, decode all samples on the other."""
    source, puller = new_engine(models, which=0), new_engine(models, which=1)
    outputs = run(source, request, hold=True)
    puller.reserve(request)
    reservation = puller.next_reservation()
    assert reservation is not None
    known = reservation.block_ids[: reservation.num_known_blocks]
    theirs = source.block_refs(request.key, 0, len(known)).block_ids.tolist()
    models.runners[1].kv.tensor[[*known]] = models.runners[0].kv.tensor[theirs]
    source.abort(request.key)
    for fork in request.forks:
        if outputs[fork.key][0].finish_reason is None:
            puller.start(reservation, outputs[fork.key][0].token_id, fork)
    if outputs[request.key][0].finish_reason is None:
        puller.start(reservation, outputs[request.key][0].token_id)
    puller.drop(reservation)
    for key, tokens in run(puller).items():
        outputs[key] += tokens
    return outputs, source, puller


# -- against transformers -------------------------------------------------------------------------


def their_tokens(models: Models, request: Request, **options: object) -> list[int]:
    """The tokens of transformers for the prompt, greedily and with a repetition penalty of 1.3."""
    prompt = torch.tensor([request.prompt_token_ids])
    with torch.inference_mode():
        found = models.theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            repetition_penalty=1.3,
            eos_token_id=EOS,
            pad_token_id=0,
            **options,
        )
    tokens: list[int] = found[0, prompt.shape[1] :].tolist()
    return tokens


def test_greedy_with_processors_equals_transformers(models: Models) -> None:
    sampling = dataclasses.replace(
        PLAIN,
        ignore_eos=False,
        repetition_penalty=1.3,
        logit_bias=((7, 4.0), (EOS, 30.0)),
        min_tokens=10,
    )
    request = new_request(40, sampling)
    bias = [[[7], 4.0], [[EOS], 30.0]]
    theirs = their_tokens(models, request, min_new_tokens=10, sequence_bias=bias)
    tokens = alone(models, request)
    assert ids(tokens) == theirs
    assert len(tokens) == 11 and tokens[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("allowed", [(40, 41, 42, 43), (EOS, 5, 310), (77,)])
def test_greedy_among_few_tokens_equals_transformers(
    models: Models, allowed: tuple[int, ...]
) -> None:
    sampling = dataclasses.replace(
        PLAIN, ignore_eos=False, repetition_penalty=1.3, min_tokens=4, allowed_token_ids=allowed
    )
    request = new_request(40, sampling)
    theirs = their_tokens(
        models,
        request,
        min_new_tokens=4,
        prefix_allowed_tokens_fn=lambda batch_id, ids: [*allowed],
    )
    assert ids(alone(models, request)) == theirs


def test_logprobs_equal_transformers(models: Models) -> None:
    request = new_request(50, EVERYTHING)
    tokens = alone(models, request)
    whole = [*request.prompt_token_ids, *ids(tokens)]
    with torch.inference_mode():
        theirs = models.theirs(torch.tensor([whole])).logits[0].log_softmax(-1)
    for place, token in enumerate(tokens, start=49):
        best = theirs[place].topk(3)
        assert token.logprob == pytest.approx(float(theirs[place, token.token_id]), abs=1e-4)
        assert [token_id for token_id, _ in token.top] == best.indices.tolist()
        assert [p for _, p in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def prompt_logprobs_of(engine: Engine, request: Request, **options: bool) -> list[TokenLogprobs]:
    parts: list[PromptLogprobs] = []
    engine.add(request, **options)
    while engine.has_work:
        parts += engine.step().prompt_logprobs
    found: list[TokenLogprobs] = []
    for part in parts:
        assert (part.key, part.first_index) == (request.key, 1 + len(found))
        found += part.logprobs
    return found


@pytest.mark.parametrize("is_held", [False, True])
def test_prompt_logprobs_equal_transformers(models: Models, is_held: bool) -> None:
    sampling = dataclasses.replace(PLAIN, max_tokens=4, prompt_logprobs=2)
    request = new_request(150, sampling)
    engine = new_engine(models)
    run(engine, new_request(150, PLAIN))  # cached blocks must not be skipped by the request
    found = prompt_logprobs_of(engine, request, hold=is_held)
    with torch.inference_mode():
        theirs = models.theirs(torch.tensor([request.prompt_token_ids])).logits[0].log_softmax(-1)
    assert len(found) == 149
    for place, one in enumerate(found):
        best = theirs[place].topk(2)
        own = float(theirs[place, request.prompt_token_ids[place + 1]])
        assert one.logprob == pytest.approx(own, abs=1e-4)
        assert [token_id for token_id, _ in one.top] == best.indices.tolist()
        assert [p for _, p in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_prompt_logprobs_are_told_once_in_spite_of_preemptions(models: Models) -> None:
    """A preempted request reports its prompt log-probabilities once. Both are admitted into a pool
    for one and a half, so the later one is recomputed."""
    sampling = dataclasses.replace(PLAIN, max_tokens=90, prompt_logprobs=0)
    engine = new_engine(models, num_blocks=2 + 11)
    engine._scheduler.admission.fits = lambda *_: True  # type: ignore[method-assign]
    requests = [new_request(length, sampling) for length in (40, 41)]
    found: dict[str, list[TokenLogprobs]] = {request.key: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for part in engine.step().prompt_logprobs:
            assert part.first_index == 1 + len(found[part.key])
            found[part.key] += part.logprobs
    assert engine.stats.ledger()["num_preemptions"]
    assert [len(logprobs) for logprobs in found.values()] == [39, 40]


# -- any schedule ---------------------------------------------------------------------------------


def test_the_same_alone_and_in_a_batch(models: Models) -> None:
    requests = [
        new_request(
            20 + 9 * i, PLAIN if i % 2 else dataclasses.replace(EVERYTHING, seed=i, logprobs=i)
        )
        for i in range(6)
    ]
    batched = run(new_engine(models), *requests)
    for request in requests:
        assert results(batched[request.key]) == results(alone(models, request))


def test_the_same_after_preemption(models: Models) -> None:
    requests = [new_request(30, dataclasses.replace(EVERYTHING, seed=i)) for i in range(4)]
    engine = new_engine(models, num_blocks=2 + 8)
    engine._scheduler.admission.fits = lambda *_: True  # type: ignore[method-assign]
    squeezed = run(engine, *requests)
    assert engine.stats.ledger()["num_preemptions"]
    for request in requests:
        assert results(squeezed[request.key]) == results(alone(models, request))


@pytest.mark.parametrize("num_streamed", [1, 9])
def test_the_same_after_a_retry(models: Models, num_streamed: int) -> None:
    request = new_request(33, EVERYTHING)
    whole = alone(models, request)
    streamed = tuple(ids(whole)[:num_streamed])
    again = dataclasses.replace(request, attempt=1, output_token_ids=streamed)
    assert results(alone(models, again)) == results(whole[num_streamed:])


def test_the_same_after_a_handoff(models: Models) -> None:
    request = new_request(45, EVERYTHING)
    outputs, source, puller = hand_over(models, request)
    assert results(outputs[request.key]) == results(alone(models, request))
    assert source.pool.counts.held == puller.pool.counts.held == 0


def test_each_parameter_matters(models: Models) -> None:
    """Without any one parameter the tokens differ, so the tests above do cover each."""
    whole = ids(alone(models, new_request(45, EVERYTHING)))
    assert not {9, 11, 12, 13, EOS} & set(whole)
    assert set(whole) <= set(EVERYTHING.allowed_token_ids)
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    for name in (*penalties, "logit_bias", "allowed_token_ids"):
        default = getattr(SamplingParams(), name)
        changed = dataclasses.replace(EVERYTHING, **{name: default})
        assert ids(alone(models, new_request(45, changed))) != whole, name


# -- several samples of one prompt ----------------------------------------------------------------


def samples_of(request: Request, n: int) -> tuple[Request, list[Request]]:
    """The request with forks, and the same samples as separate requests."""
    forked = dataclasses.replace(request, fork_ids=tuple(f"{i:032x}" for i in range(1, n)))
    separate = [dataclasses.replace(forked, fork_ids=()), *forked.forks]
    return forked, separate


@pytest.mark.parametrize(("length", "way"), half([31, 32, 33, 5], ["local", "handed over"]))
def test_samples_are_what_separate_requests_give(models: Models, length: int, way: str) -> None:
    forked, separate = samples_of(new_request(length, EVERYTHING), 4)
    outputs = run(new_engine(models), forked) if way == "local" else hand_over(models, forked)[0]
    for request in separate:
        assert results(outputs[request.key]) == results(alone(models, request))
    assert len({tuple(ids(tokens)) for tokens in outputs.values()}) == 4


def test_samples_share_full_blocks_and_copy_the_partial_one(models: Models) -> None:
    forked, _ = samples_of(new_request(40, PLAIN), 3)
    engine = new_engine(models)
    engine.add(forked)
    while not engine.step().tokens:
        pass
    keys = (forked.key, *(fork.key for fork in forked.forks))
    tables = [tuple(engine.block_refs(key, 0, 3).block_ids.tolist()) for key in keys]
    (first, second, _), *_ = tables
    assert {ids[:2] for ids in tables} == {(first, second)}
    assert len({ids[2] for ids in tables}) == 3
    assert engine.pool.num_refs(first) == 3
    assert engine.pool.counts.held == 2 + 3
    for key in (forked.forks[0].key, forked.key, forked.forks[1].key):
        engine.abort(key)
        check_integrity(engine)
    assert engine.pool.counts.held == 0


def test_samples_without_room_wait_and_are_the_same(models: Models) -> None:
    forked, separate = samples_of(new_request(40, EVERYTHING), 6)
    engine = new_engine(models, num_blocks=2 + 6)
    outputs = run(engine, forked)
    for request in separate:
        assert results(outputs[request.key]) == results(alone(models, request))


def test_a_sample_that_ends_at_once_leaves_the_others(models: Models) -> None:
    sampling = dataclasses.replace(EVERYTHING, min_tokens=0, stop_token_ids=())
    forked, separate = samples_of(new_request(40, sampling), 3)
    firsts = [alone(models, request)[0].token_id for request in separate]
    assert len(set(firsts)) > 1
    for ending in set(firsts):
        stopping = dataclasses.replace(sampling, stop_token_ids=(ending,))
        request = dataclasses.replace(forked, sampling=stopping)
        outputs, source, puller = hand_over(models, request)
        for sample, first in zip((request, *request.forks), firsts, strict=True):
            tokens = outputs[sample.key]
            if first == ending:
                assert ids(tokens) == [ending]
            assert ids(tokens) == ids(alone(models, dataclasses.replace(sample, fork_ids=())))
        assert source.pool.counts.held == puller.pool.counts.held == 0


# -- broken logits --------------------------------------------------------------------------------


def test_logits_that_are_not_numbers_fail_their_request_alone(models: Models) -> None:
    healthy = new_request(20, PLAIN)
    wanted = ids(alone(models, healthy))
    forked, _ = samples_of(new_request(21, EVERYTHING), 2)
    steps = models.runners[0]._steps
    compute = steps.model.lm_head.project

    def broken(_: Embedding, hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        logits[1] = torch.nan
        return logits

    engine = new_engine(models)
    engine.add(healthy)
    engine.add(forked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Embedding, "project", broken)
        output = engine.step()
    assert [(key, error.code) for key, error in output.failed] == [
        (forked.key, "engine_failed"),
        (forked.forks[0].key, "engine_failed"),
    ]
    tokens = [*output.tokens, *run(engine)[healthy.key]]
    assert ids(tokens) == wanted


def test_many_ask_at_once(models: Models) -> None:
    """Outputs are right for more rows than the sampler processes at once."""
    short = dataclasses.replace(EVERYTHING, max_tokens=2, min_tokens=2)
    groups = [
        new_request(
            4 + i % 3,
            dataclasses.replace(short, seed=i),
            fork_ids=tuple(f"{i:016x}{fork:016x}" for fork in range(7)),
        )
        for i in range(12)
    ]
    outputs = run(new_engine(models), *groups)
    assert len(outputs) == 96
    for sample in (groups[11].forks[6], groups[5].forks[0]):
        assert results(outputs[sample.key]) == results(alone(models, sample))


# -- one step ahead of the host -------------------------------------------------------------------


def fake_engine(seen: list[SequenceSlice], *, num_blocks: int = 40) -> Engine:
    """An engine that runs ahead; `seen` receives each slice launched."""
    return Engine(
        EngineParts(
            FakeRunner(num_blocks, 4, runs_ahead=True, on_execute=seen.extend),
            EngineLimits(num_blocks, 4, max_model_len=100),
            Generations(num_blocks),
            fingerprint="fake",
            eos_token_ids=(),
        )
    )


def test_penalties_wait_for_the_last_token() -> None:
    penalised = SamplingParams(max_tokens=9, temperature=1.0, frequency_penalty=1.0)
    requests = [new_request(10, penalised), new_request(11, SamplingParams(max_tokens=9))]
    seen: list[SequenceSlice] = []
    outputs = run(fake_engine(seen), *requests)
    for request in requests:
        prompt = request.prompt_token_ids
        assert ids(outputs[request.key]) == expected_tokens(prompt, 9, params=request.sampling)
    followers = {one.follows is None for one in seen if one.sample and one.sample.counts is None}
    assert followers == {True, False}, "the other one runs ahead"
    for one in seen:
        if one.sample and one.sample.counts is not None:
            assert one.follows is None


@pytest.mark.parametrize("num_blocks", [40, 2 + 6])
def test_samples_fork_behind_a_step_in_flight(num_blocks: int) -> None:
    forked, separate = samples_of(new_request(10, SamplingParams(max_tokens=9, seed=4)), 5)
    outputs = run(fake_engine([], num_blocks=num_blocks), forked)
    for one in separate:
        assert ids(outputs[one.key]) == expected_tokens(
            one.prompt_token_ids, 9, params=one.sampling, sample_index=one.sample_index
        )
