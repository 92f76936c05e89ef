"""Models with weights in FP8 on a GPU. The oracle is transformers in float32 with explicitly
dequantised weights.

An engine in float32 dequantises at loading, and must agree like any other. One in bfloat16 computes
in FP8, and quantises activations too: its tokens equal the oracle's, or on average nearly tie with
them. On a CPU the same arithmetic has mean gaps of 0.01 to 0.1, and with misplaced scales of 0.9
and more.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
import torch
from checkpoints import write_checkpoint
from fp8_checkpoints import FORMATS, write_fp8_checkpoint
from near_ties import engine_of, gaps

from baton.core.errors import StartupFailed
from baton.kernels.products.weights import BlockScaled, RowScaled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "vocab_size": 320}
NEAR_TIE, NEAR_TIE_IN_FLOATS = 0.2, 0.01  # relative to the spread of a position's logits


@pytest.mark.parametrize("name", FORMATS)
def test_greedy_tokens_are_those_of_the_dequantised_model(tmp_path: Path, name: str) -> None:
    theirs = write_fp8_checkpoint(tmp_path, name, seed=4, **SIZES)
    engine = engine_of(tmp_path)
    weight = engine.runner.model.layers[0].attention.qkv.weight
    assert isinstance(weight, BlockScaled if "block" in name else RowScaled)
    found = gaps(engine, theirs)
    same = sum(gap == 0 for gap in found) / len(found)
    print(
        f"{name}: {same:.0%} of tokens equal, gaps of {mean(found):.3f}, at most {max(found):.2f}"
    )
    assert mean(found) < NEAR_TIE
    assert same > 0.5


@pytest.mark.parametrize("name", FORMATS)
def test_an_engine_in_float32_dequantises(tmp_path: Path, name: str) -> None:
    theirs = write_fp8_checkpoint(tmp_path, name, seed=4, **SIZES)
    engine = engine_of(tmp_path, dtype="float32")
    assert isinstance(engine.runner.model.layers[0].attention.qkv.weight, torch.Tensor)
    assert max(gaps(engine, theirs)) < NEAR_TIE_IN_FLOATS


def test_quantised_at_load(tmp_path: Path) -> None:
    theirs = write_checkpoint(tmp_path, seed=4, **SIZES)
    engine = engine_of(tmp_path, quantization="fp8")
    assert isinstance(engine.runner.model.layers[1].mlp.down.weight, RowScaled)
    assert mean(gaps(engine, theirs)) < 2 * NEAR_TIE  # the oracle's weights are not quantised


def test_biases_and_norms_of_heads(tmp_path: Path) -> None:
    variants = {
        "qwen2": {"architecture": "Qwen2ForCausalLM"},
        "qwen3": {"architecture": "Qwen3ForCausalLM", "attention_bias": True},
    }
    for name, variant in variants.items():
        folder = tmp_path / name
        changes = {**SIZES, **variant, "has_varied_vectors": True}
        theirs = write_fp8_checkpoint(folder, "block", seed=4, **changes)
        assert mean(gaps(engine_of(folder), theirs)) < NEAR_TIE


def test_sizes_that_are_no_multiples(tmp_path: Path) -> None:
    """A hidden size that torch's FP8 GEMM does not support works."""
    sizes = SIZES | {"hidden_size": 200, "intermediate_size": 184}
    theirs = write_fp8_checkpoint(tmp_path, "compressed, channel", seed=4, **sizes)
    assert mean(gaps(engine_of(tmp_path), theirs)) < NEAR_TIE


def test_blocks_that_merged_parts_share_are_refused(tmp_path: Path) -> None:
    write_fp8_checkpoint(tmp_path, "block", **(SIZES | {"intermediate_size": 192}))
    with pytest.raises(StartupFailed, match="begins at 192") as caught:
        engine_of(tmp_path)
    assert "float32" in caught.value.hint


@pytest.mark.parametrize("name", ["block", "compressed, channel"])
def test_scales_in_the_wrong_place_are_seen(tmp_path: Path, name: str) -> None:
    theirs = write_fp8_checkpoint(tmp_path, name, seed=4, **SIZES)
    engine = engine_of(tmp_path)
    scale = engine.runner.model.layers[0].mlp.down.weight.scale
    scale.mul_(torch.where(torch.rand_like(scale) < 0.5, 0.25, 4.0))
    assert mean(gaps(engine, theirs)) > 2 * NEAR_TIE
