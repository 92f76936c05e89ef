"""Rotary embedding, norm and activation against transformers and plain formulas."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from baton.kernels.kv.kv_blocks import apply_rope, rope_angles
from baton.kernels.layers.ops import Ops, silu_and_mul


def test_rope_equals_transformers() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, head_dim=32)
    positions = torch.tensor([0, 1, 5, 63, 64, 700, 100_000])
    q, k = torch.randn(2, 7, 2, 32)  # [tokens, heads, dim]
    theirs = LlamaRotaryEmbedding(config)
    cos, sin = theirs(q, positions[None])
    wanted_q, wanted_k = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin
    )
    angles = rope_angles(positions, theirs.inv_freq)
    for x, wanted in ((q, wanted_q), (k, wanted_k)):
        got = apply_rope(x, *angles)
        torch.testing.assert_close(got, wanted[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


def test_rope_keeps_float32_angles_for_bf16() -> None:
    x = torch.randn(3, 2, 16)
    angles = rope_angles(torch.tensor([1000, 1001, 1002]), torch.ones(8))
    got = apply_rope(x.bfloat16(), *angles)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), apply_rope(x, *angles), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_transformers(dtype: torch.dtype) -> None:
    theirs = LlamaRMSNorm(48, eps=1e-5)
    theirs.weight.data = torch.randn(48)
    theirs = theirs.to(dtype)
    x = (torch.randn(5, 48) * 3).to(dtype)
    got = Ops().rms_norm(x, theirs.weight.detach(), 1e-5)
    torch.testing.assert_close(got, theirs(x).detach())


def test_silu_and_mul_is_the_gated_part_of_llama() -> None:
    mlp = LlamaMLP(LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2)).eval()
    x = torch.randn(5, 16)
    with torch.inference_mode():
        gate_up = torch.cat((mlp.gate_proj(x), mlp.up_proj(x)), -1)
        torch.testing.assert_close(mlp.down_proj(silu_and_mul(gate_up)), mlp(x))
