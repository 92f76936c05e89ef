"""The architectures that can be served, each by how it differs from the others: one table.

A row is what the architecture's name alone decides; config.json decides the rest.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Bias(enum.Enum):
    """Which projections of the attention have a bias."""

    NONE = "none"
    QKV = "q, k and v"
    BY_CONFIG = "all four, if attention_bias says so"


class SlidingWindow(enum.Enum):
    """Which layers see the last `sliding_window` positions only."""

    NONE = "none"
    ALL = "all, if sliding_window is set"
    ALL_IF_ASKED = "all, if use_sliding_window says so"
    BY_LAYER = "by layer, if use_sliding_window says so"


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a decoder differs from the plainest one."""

    bias: Bias = Bias.NONE
    has_mlp_bias_field: bool = False
    has_qk_norm: bool = False  # RMSNorm of each head of q and k, before RoPE
    window: SlidingWindow = SlidingWindow.NONE
    has_experts: bool = False
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads


ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(bias=Bias.BY_CONFIG, has_mlp_bias_field=True),
    "MistralForCausalLM": Architecture(window=SlidingWindow.ALL),
    "Qwen2ForCausalLM": Architecture(bias=Bias.QKV, window=SlidingWindow.BY_LAYER),
    "Qwen3ForCausalLM": Architecture(
        bias=Bias.BY_CONFIG, has_qk_norm=True, window=SlidingWindow.BY_LAYER, default_head_dim=128
    ),
    "Qwen3MoeForCausalLM": Architecture(
        bias=Bias.BY_CONFIG, has_qk_norm=True, window=SlidingWindow.ALL_IF_ASKED, has_experts=True
    ),
}
