"""Every architecture with a hand-off: tokens equal those of transformers' `generate`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from checkpoints import VARIANTS, write_byte_tokenizer, write_checkpoint
from deployments import running
from e2e.handing_over import hand_over
from e2e.oracle import GreedyOracle
from engines.generation import outputs_of

from baton.cli.deployment.deployment import UpConfig
from baton.client import Client
from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.runner import ModelRunner
from baton.engine.local import LocalEngine

NUM_TOKENS = 12
# Decodes go beyond the trained length; no prompt is longer than that.
DYNAMIC: dict[str, Any] = {
    "max_position_embeddings": 96,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
}
MODELS = VARIANTS | {"llama, dynamic rope": DYNAMIC}
BY_ARCHITECTURE = (
    "mistral, window",
    "qwen2, yarn, window of the upper layers",
    "qwen3",
    "qwen3-moe, a dense layer",
    "llama, dynamic rope",
)


def engine_config(folder: Path, name: str) -> EngineConfig:
    write_checkpoint(folder, seed=9, has_varied_vectors=True, **MODELS[name])
    return EngineConfig(
        model=str(folder),
        device="cpu",
        cpu_kv_bytes=16 << 20,
        max_model_len=200,
        max_num_batched_tokens=24,
    )


def prompts(runner: ModelRunner) -> list[tuple[int, ...]]:
    generator = random.Random(4)
    vocab = range(3, runner.model_config.vocab_size)
    return [tuple(generator.choices(vocab, k=length)) for length in (1, 33, 90)]


# One model of each architecture, of each kind of KV (heads, windows) and of RoPE by position.
QUICK = {
    *BY_ARCHITECTURE,
    *("llama, gqa 4:1, tied", "llama, mha 4:4, derived head_dim", "mixtral, moe", "qwen2-moe"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS],
)
def test_hand_off_in_one_process(tmp_path: Path, name: str) -> None:
    config = engine_config(tmp_path, name)
    source, puller = (LocalEngine(config, ModelRunner(config)) for _ in range(2))
    oracle = GreedyOracle(tmp_path)
    for number, prompt in enumerate(prompts(source.runner)):
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
        request = Request(f"{number:032x}", 0, prompt, sampling)
        tokens = hand_over(source, puller, request)
        oracle.check(prompt, tokens, NUM_TOKENS)
        assert outputs_of(puller, [Request("f" * 32, number, prompt, sampling)]) == {
            f"{'f' * 32}/{number}": tokens
        }


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_ARCHITECTURE)
def test_deployment_of_processes(tmp_path: Path, name: str) -> None:
    write_byte_tokenizer(tmp_path)
    config = engine_config(tmp_path, name)
    oracle = GreedyOracle(tmp_path)
    with (
        running(config, up=UpConfig(mode="disaggregated")) as system,
        Client(system.address) as client,
    ):
        for prompt in prompts(ModelRunner(config)):
            stream = client.generate(
                prompt_token_ids=list(prompt), max_tokens=NUM_TOKENS, temperature=0.0
            )
            for _ in stream:
                pass
            oracle.check(prompt, stream.result.token_ids, NUM_TOKENS)
            if len(stream.result.token_ids) > 1:
                assert stream.result.transfer_bytes > 0
