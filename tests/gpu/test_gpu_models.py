"""Every architecture and RoPE type on a GPU: logits and greedy tokens equal those of transformers
in float32.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VARIANTS, write_checkpoint
from engines.generation import outputs_of
from engines.steps import execute
from transformers import PreTrainedModel

from baton.core.engine_config import EngineConfig
from baton.core.errors import StartupFailed
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.batch import SequenceSlice
from baton.engine.execution.runner import ModelRunner
from baton.engine.local import LocalEngine
from baton.kernels.sampling.sample_spec import SampleSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NEAR_TIE = 2e-3  # of the top two logits: float32 logits differ by about 1e-4 between devices
GREEDY = SampleSpec(SamplingParams(temperature=0.0), key=0)
ALL = VARIANTS | {
    "dynamic rope, within its length": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    },
    "head_dim 128, group of 4": {"head_dim": 128, "num_key_value_heads": 1},
    "head_dim 256": {"head_dim": 256},
}


@dataclass
class Pair:
    """One checkpoint in both implementations."""

    theirs: PreTrainedModel
    ours: LocalEngine

    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """Log-probabilities by transformers, [tokens, vocab]."""
        with torch.inference_mode():
            return self.theirs(torch.tensor([token_ids])).logits[0].log_softmax(-1)


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    settings = {"device": "cuda", "dtype": "float32", "num_kv_blocks": 200, "max_num_seqs": 8}
    return EngineConfig(model=str(folder), **(settings | changes))


@pytest.fixture(scope="module", params=ALL)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("checkpoint")
    theirs = write_checkpoint(folder, seed=1, has_varied_vectors=True, **ALL[request.param])
    config = config_of(folder, max_num_batched_tokens=128)
    runner = ModelRunner(config)
    yield Pair(theirs, LocalEngine(config, runner))
    runner.close()


def test_greedy_tokens_are_those_of_transformers(pair: Pair) -> None:
    vocab_size = pair.ours.runner.model_config.vocab_size
    rng = random.Random(3)
    sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    requests = [
        Request(f"{n:032x}", 0, tuple(rng.choices(range(3, vocab_size), k=n)), sampling)
        for n in (1, 17, 40, 130, 200)
    ]
    outputs = outputs_of(pair.ours, requests)
    for request in requests:
        tokens, prompt = outputs[request.key], request.prompt_token_ids
        rows = pair.logprobs([*prompt, *tokens])[len(prompt) - 1 : -1]
        for index, (token, row) in enumerate(zip(tokens, rows, strict=True)):
            gap = float(row.max() - row[token])
            assert gap < NEAR_TIE, f"prompt of {len(prompt)}, token {index}: {gap:.1e} below"


def test_logprobs_are_those_of_transformers(pair: Pair) -> None:
    runner, rng = pair.ours.runner, random.Random(5)
    prompt = rng.choices(range(3, runner.model_config.vocab_size), k=150)
    table = [9, 4, 17, 30, 2, 12, 6, 8, 21, 14]
    (one,) = execute(runner, [SequenceSlice(prompt, 0, table, GREEDY)])
    assert one is not None
    (two,) = execute(runner, [SequenceSlice([one.token_id], 150, table, GREEDY)])
    assert two is not None
    rows = pair.logprobs([*prompt, one.token_id])
    assert one.logprob == pytest.approx(float(rows[-2, one.token_id]), abs=1e-3)
    assert two.logprob == pytest.approx(float(rows[-1, two.token_id]), abs=1e-3)


def test_flashinfer_refuses_what_it_cannot_compute(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "80", head_dim=80)
    wanted = {"attention_backend": "flashinfer", "dtype": "bfloat16"}
    with pytest.raises(StartupFailed, match="80 dimensions") as caught:
        ModelRunner(config_of(tmp_path / "80", **wanted))
    assert "triton" in caught.value.hint
    mistral = {"architecture": "MistralForCausalLM", "sliding_window": 40, "head_dim": 128}
    write_checkpoint(tmp_path / "window", **mistral)
    with pytest.raises(StartupFailed, match="one of 40 tokens"):
        ModelRunner(config_of(tmp_path / "window", **wanted))
