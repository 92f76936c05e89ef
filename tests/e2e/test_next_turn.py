"""A chat's next turn: the last output's KV is fetched from the engine that decoded it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployments import Running, running
from e2e.oracle import GreedyOracle
from e2e.test_tokens import generate, prompt_of

from baton.client import Client
from baton.core.engine_config import EngineConfig

BUNDLED = Path(__file__).resolve().parents[2] / "models" / "demo"
VOCAB_SIZE = 512
NUM_ANSWER_TOKENS = 120


@pytest.fixture(scope="module")
def system() -> Iterator[Running]:
    """One prefill and one decode engine: only the second has the KV of outputs."""
    with running(EngineConfig(model=str(BUNDLED), device="cpu", cpu_kv_bytes=64 << 20)) as found:
        yield found


def test_an_answer_is_not_computed_again(system: Running) -> None:
    oracle = GreedyOracle(BUNDLED)
    cached = []
    with Client(system.address) as client:
        for seed in range(2):
            prompt = prompt_of(40, VOCAB_SIZE, seed)
            greedy = {"temperature": 0.0, "ignore_eos": True}
            first = generate(client, prompt, max_tokens=NUM_ANSWER_TOKENS, **greedy)
            time.sleep(0.3)  # until the gateway's index has the cached blocks
            turn = [*prompt, *first.token_ids, *prompt_of(30, VOCAB_SIZE, 100 + seed)]
            second = generate(client, turn, max_tokens=12, **greedy)
            oracle.check(turn, second.token_ids, 12)
            cached.append(second.cached_tokens)
    # The last token's KV was never computed; the first pull may fail while its pair opens.
    assert max(cached) >= (40 + NUM_ANSWER_TOKENS - 1) // 16 * 16, cached
