"""The system's tokens == our single process's == transformers', token for token, in float32."""

from __future__ import annotations

import dataclasses
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from e2e.subject import Subject
from engines.generation import outputs_of

from baton.client import Client, Result
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams

LENGTHS = (1, 15, 16, 17, 255, 256, 257, 600)
NUM_TOKENS = 20


def prompt_of(length: int, vocab_size: int, seed: int) -> list[int]:
    generator = random.Random(f"{length}/{seed}")
    return [generator.randrange(3, vocab_size) for _ in range(length)]


def generate(client: Client, prompt: list[int], **params: object) -> Result:
    stream = client.generate(prompt_token_ids=prompt, **params)  # type: ignore[arg-type]
    for _ in stream:
        pass
    return stream.result


def local_tokens(subject: Subject, prompt: list[int], sampling: SamplingParams) -> list[int]:
    request = Request(f"{random.getrandbits(128):032x}", 0, tuple(prompt), sampling)
    return outputs_of(subject.local, [request])[request.key]


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_cold_and_warm(subject: Subject, length: int) -> None:
    prompt = prompt_of(length, subject.vocab_size, 0)
    greedy = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    with Client(subject.system.address) as client:
        cold = generate(client, prompt, max_tokens=NUM_TOKENS, temperature=0.0)
        warm = generate(client, prompt, max_tokens=NUM_TOKENS, temperature=0.0)
    subject.oracle.check(prompt, cold.token_ids, NUM_TOKENS)
    assert warm.token_ids == cold.token_ids
    assert list(cold.token_ids) == local_tokens(subject, prompt, greedy)
    if length > 17:
        assert warm.cached_tokens > 0


def test_concurrent_requests_of_mixed_lengths(subject: Subject) -> None:
    generator = random.Random(7)
    prompts = [
        prompt_of(generator.choice((3, 16, 40, 100, 257)), subject.vocab_size, seed)
        for seed in range(32)
    ]
    with Client(subject.system.address) as client, ThreadPoolExecutor(32) as threads:
        jobs = [
            threads.submit(generate, client, p, max_tokens=12, temperature=0.0) for p in prompts
        ]
        results = [job.result() for job in jobs]
    for prompt, result in zip(prompts, results, strict=True):
        subject.oracle.check(prompt, result.token_ids, 12)
    nodes = {f"decode-{i}" for i in range(subject.num_decode_nodes)}
    assert {r.decode_node for r in results} >= nodes
    assert sum(r.transfer_bytes for r in results) > 0


def test_seeded_sampling_is_the_same_alone_in_a_batch_and_in_one_process(
    subject: Subject,
) -> None:
    settings = {"temperature": 0.9, "top_p": 0.95, "top_k": 50}
    prompts = [prompt_of(20 + 7 * i, subject.vocab_size, 100 + i) for i in range(8)]
    with Client(subject.system.address) as client, ThreadPoolExecutor(8) as threads:
        alone = [
            generate(client, p, max_tokens=12, seed=i, **settings) for i, p in enumerate(prompts)
        ]
        jobs = [
            threads.submit(generate, client, p, max_tokens=12, seed=i, **settings)
            for i, p in enumerate(prompts)
        ]
        batched = [job.result() for job in jobs]
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=12, seed=i, **settings)  # type: ignore[arg-type]
        assert alone[i].token_ids == batched[i].token_ids
        assert list(alone[i].token_ids) == local_tokens(subject, prompt, sampling)
    assert len({r.token_ids for r in alone}) > 1


def test_a_first_token_that_ends_the_request_is_not_handed_over(subject: Subject) -> None:
    prompt = prompt_of(30, subject.vocab_size, 1)
    with Client(subject.system.address) as client:
        result = generate(client, prompt, max_tokens=1, temperature=0.0)
    assert len(result.token_ids) == 1
    assert result.decode_node is None
    assert result.transfer_bytes == 0
    subject.system.wait_idle()


def test_every_sampling_parameter_at_once(subject: Subject) -> None:
    """Three samples that share a hand-off, with scores, have the tokens of one process."""
    prompt = prompt_of(100, subject.vocab_size, 9)
    allowed = tuple(range(1, subject.vocab_size, 3))
    settings = {
        "max_tokens": 16, "temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.01, "seed": 3,
        "repetition_penalty": 1.2, "presence_penalty": -1.0, "frequency_penalty": 0.5,
        "min_tokens": 16, "logprobs": 2, "prompt_logprobs": 1, "allowed_token_ids": allowed,
    }  # fmt: skip
    with Client(subject.system.address) as client, ThreadPoolExecutor(4) as threads:
        others = [threads.submit(generate, client, prompt, max_tokens=16) for _ in range(3)]
        stream = client.generate(
            prompt_token_ids=prompt,
            n=3,
            logit_bias={5: 4.0},
            **settings,  # type: ignore[arg-type]
        )
        results = stream.results
        for other in others:
            other.result()
    sampling = SamplingParams(logit_bias=((5, 4.0),), **settings)  # type: ignore[arg-type]
    request = Request(f"{random.getrandbits(128):032x}", 0, tuple(prompt), sampling)
    request = dataclasses.replace(request, fork_ids=("1" * 32, "2" * 32))
    wanted = outputs_of(subject.local, [request])
    assert [list(r.token_ids) for r in results] == [
        wanted[sample.key] for sample in (request, *request.forks)
    ]
    assert [r.sample_index for r in results] == [0, 1, 2]
    assert len({r.token_ids for r in results}) == 3
    assert {token_id for r in results for token_id in r.token_ids} <= {*allowed}
    assert [len(r.prompt_logprobs) for r in results] == [99, 0, 0]
    for result in results:
        assert [len(one.top) for one in result.logprobs] == [2] * 16
        assert result.decode_node is not None and result.attempts == 1
    theirs = subject.oracle.logprobs([*prompt, *results[1].token_ids])
    reported = [*(one.logprob for one in results[0].prompt_logprobs)]
    reported += [one.logprob for one in results[1].logprobs]
    assert reported == pytest.approx(theirs, abs=1e-3)
    subject.system.wait_idle()


def test_beams_of_one_hand_off(subject: Subject) -> None:
    """Beams beside other requests are those of one process, with scores, complete at the end."""
    settings = {"max_tokens": 14, "length_penalty": 0.4, "early_stopping": "never", "logprobs": 2}
    with Client(subject.system.address) as client, ThreadPoolExecutor(4) as threads:
        prompts = [prompt_of(length, subject.vocab_size, 11) for length in (16, 100)]
        others = [threads.submit(generate, client, prompts[0], max_tokens=16) for _ in range(3)]
        streams = [
            client.generate(
                prompt_token_ids=prompt,
                n=3,
                best_of=4,
                use_beam_search=True,
                **settings,  # type: ignore[arg-type]
            )
            for prompt in prompts
        ]
        results = [stream.results for stream in streams]
        for other in others:
            other.result()
    sampling = SamplingParams(
        use_beam_search=True,
        best_of=4,
        temperature=0.0,
        **settings,  # type: ignore[arg-type]
    )
    for prompt, found in zip(prompts, results, strict=True):
        request = Request(f"{random.getrandbits(128):032x}", 0, tuple(prompt), sampling)
        request = dataclasses.replace(request, fork_ids=("1" * 32, "2" * 32))
        wanted = outputs_of(subject.local, [request])
        assert [list(one.token_ids) for one in found] == list(wanted.values())
        for one in found:
            assert [len(each.top) for each in one.logprobs] == [2] * len(one.token_ids)
            assert one.decode_node is not None and one.attempts == 1
            reported = [each.logprob for each in one.logprobs]
            theirs = subject.oracle.logprobs([*prompt, *one.token_ids])[len(prompt) - 1 :]
            assert reported == pytest.approx(theirs, abs=1e-3)
    subject.system.wait_idle()
