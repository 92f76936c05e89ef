"""Greedy tokens of an engine on a GPU, and how far their logits are below an oracle's best."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from engines.generation import outputs_of

from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.runner import ModelRunner
from baton.engine.local import LocalEngine

LENS = (1, 2, 17, 40, 130, 200, 300)  # prefills of one row, of few and of many


def engine_of(folder: Path, **changes: Any) -> LocalEngine:
    settings = {"device": "cuda", "num_kv_blocks": 300, "max_num_seqs": 8, "dtype": "bfloat16"}
    config = EngineConfig(model=str(folder), **(settings | changes))
    return LocalEngine(config, ModelRunner(config))


def gaps(engine: LocalEngine, theirs: Any) -> list[float]:
    """How far each token of the outputs for LENS is below the oracle's best, in spreads of the
    position's logits. `theirs` is a model of transformers. Closes the engine."""
    rng = random.Random(3)
    sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    vocab = range(3, theirs.config.vocab_size)
    requests = [Request(f"{n:032x}", 0, tuple(rng.choices(vocab, k=n)), sampling) for n in LENS]
    outputs, found = outputs_of(engine, requests), []
    for request in requests:
        tokens, prompt = outputs[request.key], request.prompt_token_ids
        with torch.inference_mode():
            logits = theirs(torch.tensor([[*prompt, *tokens]])).logits[0]
        for token, row in zip(tokens, logits[len(prompt) - 1 : -1], strict=True):
            found.append(float((row.max() - row[token]) / row.std()))
    engine.runner.close()
    return found
