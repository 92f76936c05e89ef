"""Host memory below the KV pool: tokens equal those of a pool without evictions."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from deployments import running
from engines.generation import outputs_of
from engines.integrity import check_integrity

from baton.client import Client
from baton.core.config import UpConfig
from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.runner import ModelRunner
from baton.engine.kv.host_copies import CopyCost
from baton.engine.local import LocalEngine
from baton.engine.scheduling.admission import OutputLengthEstimator

Prompts = Sequence[tuple[int, ...]]
GENERATOR = random.Random(7)
CHATS = [tuple(GENERATOR.choices(range(3, 4096), k=n)) for n in (250, 17, 100, 400, 330)]
LONGER = [(*chat, 5, 6, 7, *chat[:9]) for chat in CHATS]
GROWING = [tuple(GENERATOR.choices(range(3, 4096), k=100)) for _ in range(4)]


@pytest.fixture(autouse=True)
def copying_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying always pays: in a model this small, computing the blocks takes no longer."""
    monkeypatch.setattr(CopyCost, "pays", lambda self, num_bytes, *others: num_bytes > 0)


class Optimist(OutputLengthEstimator):
    """An estimator that admits more requests than fit."""

    def estimate(self, num_generated: int, max_tokens: int) -> int:
        return 1


def engine_of(kind: str, num_kv_blocks: int, swap_space: float) -> LocalEngine:
    config = EngineConfig(
        device="cpu",
        kv_cache_dtype=kind,
        block_size=16,
        max_model_len=512,
        num_kv_blocks=num_kv_blocks,
        max_num_batched_tokens=64,
        swap_space=swap_space,
    )
    return LocalEngine(config, ModelRunner(config))


def generate(engine: LocalEngine, prompts: Prompts, num_tokens: int) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    requests = [Request(f"{n:032x}", 0, prompt, sampling) for n, prompt in enumerate(prompts)]
    outputs = outputs_of(engine, requests)
    check_integrity(engine.engine)
    return [outputs[request.key] for request in requests]


@pytest.fixture(scope="module")
def cold() -> Iterator[LocalEngine]:
    """An engine whose pool is large enough to evict nothing."""
    engine = engine_of("auto", 800, 0)
    yield engine
    assert not engine.engine.stats.totals().num_preemptions
    engine.close()


def test_tokens_are_the_same_from_host_memory(cold: LocalEngine) -> None:
    check_host_memory(cold, "auto")


@pytest.mark.slow
def test_tokens_in_int8_are_the_same_from_host_memory() -> None:
    cold = engine_of("int8", 400, 0)
    check_host_memory(cold, "int8")
    cold.close()


def check_host_memory(cold: LocalEngine, kind: str) -> None:
    tight = engine_of(kind, 36, 0.1)
    for prompts in (CHATS, LONGER, CHATS):
        expected = [generate(cold, [prompt], 8)[0] for prompt in prompts]
        assert [generate(tight, [prompt], 8)[0] for prompt in prompts] == expected
    assert tight.engine.stats.totals().host_hit_tokens > sum(map(len, CHATS))
    tight.close()


def test_tokens_of_swapped_requests_are_the_same(cold: LocalEngine) -> None:
    tight = engine_of("auto", 36, 0.1)
    tight.engine.stats._parts.output_lengths.__class__ = Optimist
    assert generate(tight, GROWING, 60) == generate(cold, GROWING, 60)
    totals = tight.engine.stats.totals()
    assert totals.num_swaps and totals.host_hit_tokens
    tight.close()


def test_tokens_of_two_ranks_are_the_same(cold: LocalEngine) -> None:
    config = EngineConfig(
        device="cpu",
        tensor_parallel_size=2,
        max_model_len=512,
        num_kv_blocks=36,
        max_num_batched_tokens=64,
        swap_space=0.1,
    )
    tight = LocalEngine.load(config, print)
    for prompts in (CHATS, LONGER):
        for prompt in prompts:
            assert generate(tight, [prompt], 8) == generate(cold, [prompt], 8)
    assert tight.engine.stats.totals().host_hit_tokens > sum(map(len, CHATS)) // 2
    tight.close()


def test_a_deployments_prompt_is_found_in_host_memory(cold: LocalEngine) -> None:
    """A prompt that others have evicted from the prefill node's pool is read from host memory, and
    the gateway routes to it."""
    config = EngineConfig(
        device="cpu",
        max_model_len=512,
        num_kv_blocks=36,
        max_num_batched_tokens=64,
        swap_space=0.1,
    )
    params = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    expected = [generate(cold, [prompt], 8)[0] for prompt in CHATS]
    with (
        running(config, up=UpConfig(mode="disaggregated", num_decode_nodes=1)) as system,
        Client(system.address) as client,
    ):
        for _ in range(2):
            results = [client.generate(prompt_token_ids=chat, **params).result for chat in CHATS]
            assert [list(one.token_ids) for one in results] == expected
        assert [one.cached_tokens for one in results] == [
            (len(chat) - 1) // 16 * 16 for chat in CHATS
        ]
