"""Stages on several GPUs: the tokens of one GPU, with and without graphs, and divided memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from engines.generation import outputs_of
from engines.integrity import check_integrity

from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.local import LocalEngine

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(300),
]
SHAPES = [(stages, size) for stages, size in ((2, 1), (2, 2), (4, 1)) if stages * size <= NUM_GPUS]
PROMPT_LENS = (1, 15, 16, 33, 100, 255, 300)
WAYS: list[dict[str, float]] = [
    {},
    {"temperature": 0.9},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.9, "repetition_penalty": 1.2, "logprobs": 3},
]


def requests_of(vocab_size: int, **sampling: float) -> list[Request]:
    rng = random.Random(5)
    made = []
    for index, length in enumerate(PROMPT_LENS):
        params = SamplingParams(max_tokens=24, seed=index, **{"temperature": 0.0} | sampling)
        prompt = tuple(rng.randrange(3, vocab_size) for _ in range(length))
        made.append(Request(f"{index:032x}", 0, prompt, params))
    return made


@pytest.mark.parametrize(("stages", "size"), SHAPES)
def test_tokens_are_those_of_one_gpu(tmp_path: Path, stages: int, size: int) -> None:
    write_checkpoint(
        tmp_path,
        num_attention_heads=8,
        head_dim=64,
        num_hidden_layers=5,
        has_varied_vectors=True,
    )
    found = []
    for num_stages, num_ranks in ((1, 1), (stages, size)):
        config = EngineConfig(
            model=str(tmp_path),
            device="cuda",
            dtype="float32",
            num_kv_blocks=400,
            max_num_seqs=24,
            max_num_batched_tokens=128,
            pipeline_parallel_size=num_stages,
            tensor_parallel_size=num_ranks,
        )
        engine = LocalEngine.load(config, print)
        outputs = [outputs_of(engine, requests_of(320, **way)) for way in WAYS]
        check_integrity(engine.engine)
        assert engine.runner.kv.layout.num_layers == len(engine.runner.layers)
        found.append(outputs)
        engine.close()
    assert found[0] == found[1]
