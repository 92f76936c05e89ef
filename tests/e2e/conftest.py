"""Reference continuations by transformers, the oracle of every greedy test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

Reference = Callable[[Sequence[int], int], list[int]]


def greedy_reference(model_dir: Path) -> Reference:
    """`reference(prompt_ids, n)`: n greedy tokens in float32, ending early at EOS as generate does."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def reference(prompt_ids: Sequence[int], n: int) -> list[int]:
        ids = torch.tensor([list(prompt_ids)])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=n,
                do_sample=False,
                pad_token_id=0,
            )
        return [int(token) for token in out[0, len(prompt_ids) :]]

    return reference


@pytest.fixture(scope="session")
def bundled_dir() -> Path:
    return Path(__file__).resolve().parents[2] / "models" / "demo"
