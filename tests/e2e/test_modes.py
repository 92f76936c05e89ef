"""Requests that one engine serves whole, and others that are handed off: the same tokens."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deployments import Running, running
from e2e.oracle import GreedyOracle
from e2e.test_tokens import generate, prompt_of

from baton.client import Client
from baton.core.config import UpConfig
from baton.core.engine_config import EngineConfig

BUNDLED = Path(__file__).resolve().parents[2] / "models" / "demo"
VOCAB_SIZE = 512


@pytest.fixture(scope="module", params=["auto", pytest.param("aggregated", marks=pytest.mark.slow)])
def system(request: pytest.FixtureRequest) -> Iterator[Running]:
    """Engines whose promise splits the prompts of these tests over several steps."""
    config = EngineConfig(
        model=str(BUNDLED), device="cpu", cpu_kv_bytes=64 << 20, max_num_batched_tokens=64,
        tbt_target_ms=4.0,
    )  # fmt: skip
    with running(config, up=UpConfig(mode=request.param)) as found:
        yield found


def test_tokens_are_the_same_wherever_they_are_computed(system: Running) -> None:
    chance, oracle = random.Random(5), GreedyOracle(BUNDLED)
    lengths = [chance.choice((3, 16, 40, 100, 257, 600)) for _ in range(12)]
    prompts = [prompt_of(length, VOCAB_SIZE, seed) for seed, length in enumerate(lengths)]
    with Client(system.address) as client, ThreadPoolExecutor(24) as threads:
        jobs = [
            threads.submit(generate, client, p, max_tokens=20, temperature=0.0) for p in prompts
        ]
        results = [job.result() for job in jobs]
    for prompt, result in zip(prompts, results, strict=True):
        oracle.check(prompt, result.token_ids, 20)
    plans = Counter((result.prefill_node, result.decode_node) for result in results)
    engines = {node for plan in plans for node in plan}
    assert engines == set(system.node_addresses())
    assert any(first == then for first, then in plans)


def test_samples_of_one_prompt_and_prefixes_in_the_cache(system: Running) -> None:
    prompt = prompt_of(200, VOCAB_SIZE, 77)
    settings = {"max_tokens": 12, "temperature": 0.9, "seed": 3}
    with Client(system.address) as client:
        first = generate(client, prompt, **settings)
        again = generate(client, prompt, **settings)
        for _ in range(20):  # until the gateway's index has the cached blocks
            if again.cached_tokens:
                break
            time.sleep(0.1)
            again = generate(client, prompt, **settings)
        samples = client.generate(prompt_token_ids=prompt, n=3, **settings)
        tokens: dict[int, list[int]] = {}
        for chunk in samples:
            tokens.setdefault(chunk.sample_index, []).extend(chunk.token_ids)
    assert again.token_ids == first.token_ids and again.cached_tokens >= 176
    assert tokens[0] == list(first.token_ids) and len(tokens) == 3
    assert len({tuple(each) for each in tokens.values()}) > 1
