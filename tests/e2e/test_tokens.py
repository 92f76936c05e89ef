"""The system's tokens == our single process's == transformers', token for token, in float32."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import Subject

from baton.client import Client, Result
from baton.core.request import Request, SamplingParams

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
    return subject.local.generate([request])[request.key]


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
    assert {r.decode_node for r in results} >= {"decode-0", "decode-1"}
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
