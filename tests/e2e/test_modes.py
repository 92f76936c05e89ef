"""Requests that one engine computes whole, beside others that are handed off: the same tokens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deployments import Running, running
from e2e.oracle import GreedyOracle
from e2e.test_tokens import generate, prompt_of

from baton.client import Client
from baton.core.config import EngineConfig

BUNDLED = Path(__file__).resolve().parents[2] / "models" / "demo"
VOCAB_SIZE = 512


@pytest.fixture(scope="module")
def promising() -> Iterator[Running]:
    """A prefill and a decode engine that both take whole requests."""
    config = EngineConfig(
        model=str(BUNDLED), device="cpu", cpu_kv_bytes=64 << 20, max_num_batched_tokens=64,
        tbt_target_ms=4.0,
    )  # fmt: skip
    with running(config) as system:
        yield system


def test_tokens_are_the_same_wherever_they_are_computed(promising: Running) -> None:
    chance, oracle = random.Random(5), GreedyOracle(BUNDLED)
    lengths = [chance.choice((3, 16, 40, 100, 257, 600)) for _ in range(48)]
    prompts = [prompt_of(length, VOCAB_SIZE, seed) for seed, length in enumerate(lengths)]
    with Client(promising.address) as client, ThreadPoolExecutor(24) as threads:
        jobs = [
            threads.submit(generate, client, p, max_tokens=20, temperature=0.0) for p in prompts
        ]
        results = [job.result() for job in jobs]
    plans = Counter((r.prefill_node, r.decode_node) for r in results)
    print(plans)
    for prompt, result in zip(prompts, results, strict=True):
        oracle.check(prompt, result.token_ids, 20)
    assert sum(count for (first, then), count in plans.items() if first == then) > 0
