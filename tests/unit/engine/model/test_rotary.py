"""RoPE's scalings against transformers' functions, and the inputs of a position's angles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from baton.engine.model.config_fields import Fields
from baton.engine.model.rope_config import DynamicScaling, RopeConfig, YarnScaling, read_rope
from baton.engine.model.rotary import inv_freq, make_rotary_embedding

HEAD_DIM, LENGTH = 48, 256
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, length of the model": {"rope_type": "yarn", "factor": 2.0},
    "yarn, its own betas": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 8,
        "beta_slow": 0.5,
        "truncate": False,
    },
    "yarn, a range of nothing": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 2.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
    "yarn, attention_factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.9,
    },
}


def both(
    folder: Path, scaling: dict[str, Any], theta: float = 5000.0
) -> tuple[LlamaConfig, RopeConfig]:
    """One configuration as transformers' object, and as read from the file transformers writes."""
    theirs = LlamaConfig(
        hidden_size=192,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    theirs.save_pretrained(folder)
    path = folder / "config.json"
    return theirs, read_rope(Fields(path, json.loads(path.read_text())))


@pytest.mark.parametrize("name", SCALINGS)
def test_angles_equal_transformers(tmp_path: Path, name: str) -> None:
    theirs, ours = both(tmp_path, SCALINGS[name])
    wanted, scale = ROPE_INIT_FUNCTIONS[SCALINGS[name]["rope_type"]](theirs)
    torch.testing.assert_close(inv_freq(ours, HEAD_DIM), wanted, rtol=1e-6, atol=0)
    cos, sin = make_rotary_embedding(ours, HEAD_DIM, torch.device("cpu"))(torch.tensor([0, 7, 300]))
    angles = torch.tensor([0.0, 7.0, 300.0])[:, None] * wanted
    torch.testing.assert_close(cos[:, 0, : HEAD_DIM // 2], angles.cos() * scale)
    torch.testing.assert_close(sin[:, 0, HEAD_DIM // 2 :], angles.sin() * scale)


def test_dynamic_angles_are_those_of_a_sequence_that_ends_there(tmp_path: Path) -> None:
    theirs, ours = both(tmp_path, {"rope_type": "dynamic", "factor": 4.0})
    positions = torch.tensor([0, 100, LENGTH - 1, LENGTH, 300, 1000])
    cos, _ = make_rotary_embedding(ours, HEAD_DIM, torch.device("cpu"))(positions)
    for row, position in zip(cos[:, 0], positions.tolist(), strict=True):
        wanted, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, seq_len=position + 1)
        torch.testing.assert_close(
            row[: HEAD_DIM // 2], (position * wanted).cos(), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("scaling", [*SCALINGS.values(), {"rope_type": "dynamic", "factor": 4.0}])
def test_a_position_has_the_same_bits_in_any_batch(tmp_path: Path, scaling: dict[str, Any]) -> None:
    _, ours = both(tmp_path, scaling)
    rotary = make_rotary_embedding(ours, HEAD_DIM, torch.device("cpu"))
    positions = torch.randint(0, 2 * LENGTH, (64,), generator=torch.Generator().manual_seed(0))
    cos, sin = rotary(positions)
    for index in range(0, 64, 7):
        alone = rotary(positions[index : index + 2])
        assert torch.equal(alone[0], cos[index : index + 2])
        assert torch.equal(alone[1], sin[index : index + 2])


def test_contexts_that_the_scalings_are_made_for(tmp_path: Path) -> None:
    contexts = {
        name: both(tmp_path, scaling)[1].max_tokens(LENGTH) for name, scaling in SCALINGS.items()
    }
    assert contexts["linear"] == 3 * LENGTH
    assert contexts["llama3"] == LENGTH  # Llama 3.1 states the stretched length itself
    assert contexts["yarn"] == LENGTH == 4 * 64
    assert contexts["yarn, length of the model"] == 2 * LENGTH
    assert RopeConfig(1e4, DynamicScaling(4.0, LENGTH)).max_tokens(LENGTH) == 4 * LENGTH
    assert RopeConfig(1e4, None).max_tokens(LENGTH) == LENGTH


def test_yarn_without_a_factor_takes_the_ratio_of_the_lengths(tmp_path: Path) -> None:
    values = {
        "max_position_embeddings": 512,
        "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 64},
    }
    scaling = read_rope(Fields(tmp_path / "config.json", values)).scaling
    assert isinstance(scaling, YarnScaling) and scaling.factor == 8.0
