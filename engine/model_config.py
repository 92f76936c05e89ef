"""What config.json says about a model, checked once: sizes, RoPE, which weights are shared.

Reads what transformers 5 writes (`rope_parameters`, `dtype`) and what came before it (`rope_theta`,
`rope_scaling`, `torch_dtype`). Knows no tensor; refuses by name what this engine cannot compute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import StartupFailed
from ..core.model_dir import read_json

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """How Llama 3.1 stretches RoPE to longer contexts."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base, and how it is stretched, if it is."""

    theta: float
    scaling: Llama3Scaling | None


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
    has_tied_embeddings: bool
    has_attention_bias: bool
    has_mlp_bias: bool
    initializer_range: float
    dtype: str  # the checkpoint's, e.g. "bfloat16"


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read config.json. Raises StartupFailed, naming the field, if it cannot be served."""
    fields = _Fields(model_dir / "config.json", read_json(model_dir / "config.json"))
    architecture = _architecture(fields)
    _refuse_unsupported(fields)
    num_heads = fields.positive("num_attention_heads")
    hidden_size = fields.positive("hidden_size")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.positive("intermediate_size"),
        num_layers=fields.positive("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.positive("num_key_value_heads", num_heads),
        head_dim=fields.positive("head_dim", hidden_size // num_heads),
        max_position_embeddings=fields.positive("max_position_embeddings", 2048),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields),
        has_tied_embeddings=fields.flag("tie_word_embeddings"),
        has_attention_bias=fields.flag("attention_bias"),
        has_mlp_bias=fields.flag("mlp_bias"),
        initializer_range=fields.number("initializer_range", 0.02),
        dtype=str(fields.get("dtype", fields.get("torch_dtype", "float32"))),
    )
    if config.num_heads % config.num_kv_heads:
        raise fields.error("num_attention_heads is no multiple of num_key_value_heads")
    if config.head_dim % 2:
        raise fields.error("head_dim is odd, which rotary embedding cannot have")
    return config


class _Fields:
    """The fields of one JSON object; what is absent or null has the default."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path = path
        self._values = values

    def get(self, name: str, default: object = None) -> object:
        value = self._values.get(name)
        return default if value is None else value

    def positive(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"{name} is {value!r}, not a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if isinstance(value, int | float) and type(value) is not bool and 0 < value < math.inf:
            return float(value)
        raise self.error(f"{name} is {value!r}, not a positive number")

    def flag(self, name: str) -> bool:
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise self.error(f"{name} is {value!r}, not true or false")
        return value

    def section(self, name: str) -> _Fields:
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.error(f"{name} is no object")
        return _Fields(self._path, value)

    def error(self, what: str, *, hint: str = "") -> StartupFailed:
        return StartupFailed(f"{self._path}: {what}", hint=hint)


def _architecture(fields: _Fields) -> str:
    names = fields.get("architectures", [])
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    for name in names if isinstance(names, list) else []:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    raise fields.error(
        f"architecture {names!r} is not supported", hint=f"supported are: {supported}"
    )


def _refuse_unsupported(fields: _Fields) -> None:
    if fields.get("auto_map") is not None:
        raise fields.error("auto_map asks to run code from the checkpoint, which Baton never does")
    if fields.get("quantization_config") is not None:
        raise fields.error("quantised checkpoints are not supported")
    if fields.get("hidden_act", "silu") != "silu":
        raise fields.error(f"hidden_act {fields.get('hidden_act')!r} is not supported, only silu")


def _rope(fields: _Fields) -> RopeConfig:
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    theta = new.number("rope_theta", fields.number("rope_theta", 10_000.0))
    rope_type = new.get("rope_type", old.get("rope_type", old.get("type", "default")))
    if new.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1:
        raise fields.error("partial_rotary_factor is not supported")
    if rope_type == "default":
        return RopeConfig(theta, None)
    if rope_type != "llama3":
        raise fields.error(f"rope_type {rope_type!r} is not supported, only default and llama3")
    source = new if new.get("rope_type") else old
    scaling = Llama3Scaling(
        factor=source.number("factor"),
        low_freq_factor=source.number("low_freq_factor"),
        high_freq_factor=source.number("high_freq_factor"),
        original_max_position_embeddings=source.positive("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise fields.error("high_freq_factor of rope is not above low_freq_factor")
    return RopeConfig(theta, scaling)
