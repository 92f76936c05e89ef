"""A model's config.json, checked once: sizes, RoPE, windows, and which weights there are.

Reads the fields of transformers 5 (`dtype`, `layer_types`) and of older versions (`torch_dtype`,
`max_window_layers`). ARCHITECTURES holds what follows from an architecture's name alone. Rejects
unsupported configurations, naming the field. Knows no tensor.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...core.model_dir import read_json
from .config_fields import Fields
from .quantization import AT_LOAD, Quantization, read_quantization
from .rope_config import FULL_ATTENTION, SLIDING_ATTENTION, DynamicScaling, RopeConfig, read_rope


class Bias(enum.Enum):
    """Which projections of the attention have a bias."""

    NONE = "none"
    QKV = "q, k and v"
    QKV_BY_CONFIG = "q, k and v, unless qkv_bias is false"
    BY_CONFIG = "all four, if attention_bias is set"


class SlidingWindow(enum.Enum):
    """Which layers attend only to the last `sliding_window` positions."""

    NONE = "none"
    ALL = "all, if sliding_window is set"
    ALL_IF_ASKED = "all, if use_sliding_window is set"
    BY_LAYER = "by layer, if use_sliding_window is set"


@dataclass(frozen=True, slots=True)
class ExpertsRule:
    """How an architecture's mixture of experts differs from Qwen3-MoE's."""

    part: str = "mlp"  # name in a layer, in published checkpoints
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    inner_field: str = "moe_intermediate_size"
    has_normed_weights: bool | None = None  # None: by norm_topk_prob
    has_shared: bool = False  # a shared expert for all tokens, with its own gate


@dataclass(frozen=True, slots=True)
class Architecture:
    """How an architecture's decoder differs from the plainest decoder."""

    bias: Bias = Bias.NONE
    has_mlp_bias_field: bool = False
    has_qk_norm: bool = False  # RMSNorm of each head of q and k, before RoPE
    window: SlidingWindow = SlidingWindow.NONE
    experts: ExpertsRule | None = None
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads
    mtp_prefix: str | None = None  # weight prefix of the MTP head and its layer
    has_foreign_code: bool = False  # auto_map is allowed: its code computes what this row describes


ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(bias=Bias.BY_CONFIG, has_mlp_bias_field=True),
    "MistralForCausalLM": Architecture(window=SlidingWindow.ALL),
    "Qwen2ForCausalLM": Architecture(bias=Bias.QKV, window=SlidingWindow.BY_LAYER),
    "MiMoForCausalLM": Architecture(
        bias=Bias.QKV,
        window=SlidingWindow.BY_LAYER,
        mtp_prefix="model.mtp_layers.0",
        has_foreign_code=True,
    ),
    "Qwen3ForCausalLM": Architecture(
        bias=Bias.BY_CONFIG, has_qk_norm=True, window=SlidingWindow.BY_LAYER, default_head_dim=128
    ),
    "Qwen3MoeForCausalLM": Architecture(
        bias=Bias.BY_CONFIG,
        has_qk_norm=True,
        window=SlidingWindow.ALL_IF_ASKED,
        experts=ExpertsRule(),
    ),
    "Qwen2MoeForCausalLM": Architecture(
        bias=Bias.QKV_BY_CONFIG, experts=ExpertsRule(has_shared=True)
    ),
    "MixtralForCausalLM": Architecture(
        window=SlidingWindow.ALL,
        experts=ExpertsRule(
            part="block_sparse_moe",
            projections=("w1", "w3", "w2"),
            inner_field="intermediate_size",
            has_normed_weights=True,
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP of some layers."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of one expert
    has_normed_weights: bool  # the chosen experts' weights sum to one
    layers: tuple[int, ...]
    shared_intermediate_size: int | None  # of the expert that all tokens go through
    part: str  # the name of a layer's experts in published checkpoints
    projections: tuple[str, str, str]  # gate, up and down of an expert there


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-like decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]  # by layer: how many positions a token attends to, with its own
    experts: ExpertsConfig | None
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    initializer_range: float
    dtype: str  # the checkpoint's, e.g. "bfloat16"
    quantization: Quantization | None = None

    @property
    def max_context_tokens(self) -> int:
        """The longest context that may be requested, with RoPE scaled as far as it is made for."""
        return self.rope.max_tokens(self.max_position_embeddings)

    def smallest_window(self, max_model_len: int) -> int | None:
        """The smallest window; None if `max_model_len` tokens fit into every layer's window."""
        windows = [size for size in self.windows if size is not None and size < max_model_len]
        return min(windows, default=None)


def read_model_config(
    model_dir: Path,
    quantization: str | None = None,
    known: Mapping[str, Architecture] = ARCHITECTURES,
) -> ModelConfig:
    """Read config.json. Raises StartupFailed, naming the field, if it cannot be served.

    `quantization`: --quantization, for a checkpoint that is not quantised. `known`: the supported
    architectures.
    """
    fields = Fields(model_dir / "config.json", read_json(model_dir / "config.json"))
    name = _architecture_name(fields, known)
    architecture = known[name]
    _refuse_unsupported(fields, architecture)
    hidden_size, num_heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    num_layers = fields.positive("num_hidden_layers")
    has_bias = architecture.bias is Bias.BY_CONFIG and fields.flag("attention_bias")
    has_qkv_bias = (
        has_bias
        or architecture.bias is Bias.QKV
        or (architecture.bias is Bias.QKV_BY_CONFIG and fields.flag("qkv_bias", True))
    )
    config = ModelConfig(
        architecture=name,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.positive("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.positive("num_key_value_heads", num_heads),
        head_dim=fields.positive(
            "head_dim", architecture.default_head_dim or hidden_size // num_heads
        ),
        max_position_embeddings=fields.positive("max_position_embeddings", 2048),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=read_rope(fields),
        windows=_windows(fields, architecture, num_layers),
        experts=_experts(fields, architecture.experts, num_layers),
        has_tied_embeddings=fields.flag("tie_word_embeddings"),
        has_qkv_bias=has_qkv_bias,
        has_output_bias=has_bias,
        has_mlp_bias=architecture.has_mlp_bias_field and fields.flag("mlp_bias"),
        has_qk_norm=architecture.has_qk_norm,
        initializer_range=fields.number("initializer_range", 0.02),
        dtype=str(fields.get("dtype", fields.get("torch_dtype", "float32"))),
        quantization=read_quantization(fields) or AT_LOAD.get(quantization or ""),
    )
    _check_heads(config, fields)
    return config


def _check_heads(config: ModelConfig, fields: Fields) -> None:
    if config.num_heads % config.num_kv_heads:
        raise fields.error("num_attention_heads is no multiple of num_key_value_heads")
    if config.head_dim % 2:
        raise fields.error("head_dim is odd, which rotary embedding cannot have")
    if isinstance(config.rope.scaling, DynamicScaling) and config.head_dim == 2:
        raise fields.error("head_dim is 2, for which dynamic RoPE is not defined")


def _architecture_name(fields: Fields, known: Mapping[str, Architecture]) -> str:
    names = fields.get("architectures", [])
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and name in known:
            return name
    raise fields.error(
        f"architecture {names!r} is not supported",
        hint=f"supported are: {', '.join(known)}",
    )


def _refuse_unsupported(fields: Fields, architecture: Architecture) -> None:
    if fields.get("auto_map") is not None and not architecture.has_foreign_code:
        raise fields.error("auto_map requires code from the checkpoint, which Baton never runs")
    if fields.get("hidden_act", "silu") != "silu":
        raise fields.error(f"hidden_act {fields.get('hidden_act')!r} is not supported, only silu")


def _windows(fields: Fields, architecture: Architecture, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer; `layer_types` must agree with the architecture."""
    rule, size = architecture.window, None
    is_requested = rule is SlidingWindow.ALL or fields.flag("use_sliding_window")
    if rule is SlidingWindow.NONE and is_requested:
        raise fields.error("use_sliding_window is not supported for this architecture")
    if rule is not SlidingWindow.NONE and is_requested and fields.get("sliding_window") is not None:
        size = fields.positive("sliding_window")
    first = fields.count("max_window_layers", 28) if rule is SlidingWindow.BY_LAYER else 0
    usual = [
        FULL_ATTENTION if size is None or layer < first else SLIDING_ATTENTION
        for layer in range(num_layers)
    ]
    kinds = fields.get("layer_types", usual)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.error("layer_types is not a list with one entry for each layer")
    for kind in kinds:
        if kind not in (FULL_ATTENTION, SLIDING_ATTENTION):
            raise fields.error(f"layer_types names {kind!r}, which is not supported")
    if kinds != usual and (rule is not SlidingWindow.BY_LAYER or size is None):
        raise fields.error("layer_types requires windows that the other fields do not define")
    return tuple(size if kind == SLIDING_ATTENTION else None for kind in kinds)


def _experts(fields: Fields, rule: ExpertsRule | None, num_layers: int) -> ExpertsConfig | None:
    if rule is None:
        return None
    step, dense = fields.positive("decoder_sparse_step", 1), fields.counts("mlp_only_layers")
    layers = (n for n in range(num_layers) if n not in dense and (n + 1) % step == 0)
    old_name = fields.get("num_experts")  # transformers 5 writes num_local_experts
    is_normed = rule.has_normed_weights
    config = ExpertsConfig(
        num_experts=fields.positive("num_local_experts" if old_name is None else "num_experts"),
        num_experts_per_token=fields.positive("num_experts_per_tok"),
        intermediate_size=fields.positive(rule.inner_field),
        has_normed_weights=fields.flag("norm_topk_prob") if is_normed is None else is_normed,
        layers=tuple(layers),
        shared_intermediate_size=(
            fields.positive("shared_expert_intermediate_size") if rule.has_shared else None
        ),
        part=rule.part,
        projections=rule.projections,
    )
    if config.num_experts_per_token > config.num_experts:
        raise fields.error("num_experts_per_tok is larger than num_experts")
    return config
