"""Two stages of every kind of model give the tokens of one stage, for all kinds of layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from checkpoints import VARIANTS, write_checkpoint
from engines.generation import outputs_of
from fakes.ranks.played_ranks import play_ranks
from fp8_checkpoints import write_fp8_checkpoint
from int4_checkpoints import write_int4_checkpoint

from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.local import LocalEngine

# Embeddings tied across stages; windows in some layers; experts in some layers, or in one tensor.
NAMES = [
    "qwen2, tied",
    "qwen2, yarn, window of the upper layers",
    "qwen3, biases, window by layer_types",
    "qwen3-moe, a dense layer",
    "qwen3-moe, merged",
]
WRITERS: dict[str, Callable[[Path], object]] = {
    **{name: partial(write_checkpoint, **VARIANTS[name]) for name in NAMES},
    "fp8": lambda folder: write_fp8_checkpoint(folder, "compressed, channel"),
    "int4": lambda folder: write_int4_checkpoint(
        folder, "awq, groups of 32", head_dim=16, intermediate_size=192
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_two_stages_equal_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WRITERS[name](tmp_path)
    play_ranks(monkeypatch)
    greedy = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    requests = [Request(f"{i:032x}", 0, tuple(range(3 + i, 40)), greedy) for i in range(3)]
    tokens = []
    for num_stages in (1, 2):
        config = EngineConfig(
            model=str(tmp_path),
            device="cpu",
            num_kv_blocks=60,
            kv_cache_dtype="fp8" if name == "fp8" else "auto",
            max_num_batched_tokens=32,
            pipeline_parallel_size=num_stages,
        )
        engine = LocalEngine.load(config, lambda line: None)
        tokens.append(outputs_of(engine, requests))
        engine.close()
    assert tokens[0] == tokens[1]
