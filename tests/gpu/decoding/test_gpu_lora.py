"""LoRA adapters on a GPU: each request of a mixed batch gets the tokens of its merged model in
transformers in float32, or nearly tied ones.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from engines.generation import outputs_of
from fakes.adapters import merge, write_adapter
from transformers import AutoModelForCausalLM

from baton.core.engine_config import EngineConfig
from baton.core.request.request import Adapter, Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.local import LocalEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 320}
LENS = (1, 17, 40, 130)
NEAR_TIE = {"float32": 0.01, "bfloat16": 0.2}  # relative to the spread of a position's logits
NUM_ADAPTERS = 3


@pytest.mark.parametrize("dtype", NEAR_TIE)
def test_a_mixed_batch(tmp_path: Path, dtype: str) -> None:
    base = tmp_path / "base"
    write_checkpoint(base, seed=4, **SIZES)
    paths = [
        write_adapter(tmp_path / f"adapter-{n}", base, seed=n, rank=4 * n)
        for n in range(1, 1 + NUM_ADAPTERS)
    ]
    config = EngineConfig(
        model=str(base),
        device="cuda",
        dtype=dtype,
        num_kv_blocks=400,
        max_num_seqs=32,
        enable_lora=True,
        max_loras=NUM_ADAPTERS,
        max_lora_rank=16,
    )
    engine = LocalEngine.load(config, lambda line: None)
    adapters: list[Adapter | None] = [None]
    adapters += [engine.load_adapter(path.name, str(path)) for path in paths]
    rng = random.Random(3)
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    requests = {
        (number, length): Request(
            f"{100 * number + length:032x}",
            0,
            tuple(rng.choices(range(3, SIZES["vocab_size"]), k=length)),
            sampling,
            adapter=adapter,
        )
        for number, adapter in enumerate(adapters)
        for length in LENS
    }
    outputs = outputs_of(engine, [*requests.values()])
    engine.close()
    folders = [base, *(merge(tmp_path / f"{p.name}-merged", base, p) for p in paths)]
    different: set[str] = set()
    for number, folder in enumerate(folders):
        theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for length in LENS:
            request = requests[number, length]
            tokens, prompt = outputs[request.key], request.prompt_token_ids
            different.add(str(tokens))
            with torch.inference_mode():
                logits = theirs(torch.tensor([[*prompt, *tokens]])).logits[0]
            for token, row in zip(tokens, logits[len(prompt) - 1 : -1], strict=True):
                gap = float((row.max() - row[token]) / row.std())
                assert gap < NEAR_TIE[dtype], f"adapter {number}, prompt of {length}: {gap:.3f}"
    assert len(different) == len(requests)
