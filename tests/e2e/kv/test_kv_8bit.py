"""With KV in 8 bits: a deployment's tokens equal those of one process with the same KV format."""

from __future__ import annotations

import dataclasses
import math
import random
import sysconfig
from pathlib import Path

import pytest
from deployments import running
from effort import number
from engines.generation import outputs_of
from engines.integrity import check_integrity
from tokenizers import Tokenizer

from baton.client import Client
from baton.core.config import UpConfig
from baton.core.engine_config import EngineConfig
from baton.core.model_dir import resolve_model_dir
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.batch import SequenceSlice
from baton.engine.execution.runner import ModelRunner
from baton.engine.local import LocalEngine
from baton.engine.scheduling.admission import OutputLengthEstimator

KINDS = ("fp8", "int8")
ONE_IS_SLOW = ("fp8", pytest.param("int8", marks=pytest.mark.slow))
NUM_TOKENS = 20


def config_of(kind: str, **changes: int) -> EngineConfig:
    return EngineConfig(
        device="cpu", kv_cache_dtype=kind, max_num_batched_tokens=64, max_model_len=680, **changes
    )


def prompts() -> list[tuple[int, ...]]:
    generator = random.Random(5)
    return [tuple(generator.choices(range(3, 4096), k=n)) for n in (1, 17, 100, 256, 600)]


def tokens_of(
    config: EngineConfig, num_tokens: int, num_prompts: int = 5, *, is_tight: bool = False
) -> list[list[int]]:
    """The tokens of `num_prompts` prompts at once, some with a further sample, which copies a
    block."""
    engine = LocalEngine(config, ModelRunner(config))
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    requests = [
        Request(
            f"{index:032x}", 0, prompt, sampling, fork_ids=(f"{index + 100:032x}",) * (index % 2)
        )
        for index, prompt in enumerate(prompts()[:num_prompts])
    ]
    outputs = outputs_of(engine, requests)
    check_integrity(engine.engine)
    assert (engine.engine.stats.totals().num_preemptions > 0) == is_tight
    engine.close()
    for request in requests:
        for fork in request.forks:
            assert outputs[fork.key] == outputs[request.key]
    return [outputs[request.key] for request in requests]


@pytest.mark.parametrize("kind", ONE_IS_SLOW)
def test_tokens_after_a_hand_off_and_from_the_cache(kind: str) -> None:
    config = config_of(kind, cpu_kv_bytes=16 << 20)
    expected = tokens_of(config, NUM_TOKENS)
    params = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
    with (
        running(config, up=UpConfig(mode="disaggregated", num_decode_nodes=1)) as system,
        Client(system.address) as client,
    ):
        cold = [client.generate(prompt_token_ids=p, **params).result for p in prompts()]
        streams = [client.generate(prompt_token_ids=p, **params) for p in prompts()]
        warm = [stream.result for stream in streams]
    block_bytes = 6 * 2 * 2 * 32 * (64 + 4)
    for prompt, first, second, tokens in zip(prompts(), cold, warm, expected, strict=True):
        assert list(first.token_ids) == list(second.token_ids) == tokens
        assert first.transfer_bytes == math.ceil(len(prompt) / 32) * block_bytes
        assert (second.cached_tokens > 0) == (len(prompt) > 32)


@pytest.mark.parametrize("kind", ONE_IS_SLOW)
def test_preemption_changes_no_token(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = config_of(kind, cpu_kv_bytes=16 << 20)
    tight = dataclasses.replace(roomy, num_kv_blocks=24, max_model_len=320)
    expected = tokens_of(roomy, 60, 4)
    # Each request is expected to end at once, so that too many are admitted.
    monkeypatch.setattr(OutputLengthEstimator, "estimate", lambda *_: 1)
    assert tokens_of(tight, 60, 4, is_tight=True) == expected


def perplexity(kind: str, ids: list[int]) -> float:
    """The perplexity of the bundled model on a text."""
    runner = ModelRunner(EngineConfig(device="cpu", kv_cache_dtype=kind, block_size=16))
    table = range(2, 2 + len(ids) // 16)
    launched = runner.launch([SequenceSlice(ids, 0, table, None, prompt_targets=ids[1:])])
    launched.collect()
    logprobs = [one.logprob for one in launched.prompt_logprobs()[0]]
    runner.close()
    return math.exp(-sum(logprobs) / len(logprobs))


def test_perplexity_grows_by_less_than_half_a_percent() -> None:
    tokenizer = Tokenizer.from_file(str(resolve_model_dir("demo") / "tokenizer.json"))
    text = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_text()
    ids = tokenizer.encode(text).ids[: number(1024, 2048)]  # as long as its context
    auto, *others = (perplexity(kind, ids) for kind in ("auto", *KINDS))
    for kind, found in zip(KINDS, others, strict=True):
        print(f"{kind}: {found:.4f}, auto: {auto:.4f}")
        assert found != auto
        assert found < 1.005 * auto
