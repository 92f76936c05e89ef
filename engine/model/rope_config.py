"""The rotary embedding that a config.json sets: base, and scaling to longer contexts.

Values only; rotary.py and layers.py compute the angles. Reads `rope_parameters` of transformers 5,
also by layer type, and the older `rope_theta` and `rope_scaling`, which has priority as there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .config_fields import Fields

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation: all angles divided by `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK: beyond the trained length the base grows with the position."""

    factor: float
    max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """NTK by parts (Peng et al. 2023): slow dimensions are interpolated, fast ones are not.

    `attention_factor` scales cos and sin, and so the scores by its square.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    is_truncated: bool  # dimensions between the two are rounded outwards to integers


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling of RoPE to longer contexts."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


Scaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base, and scaling if any."""

    theta: float
    scaling: Scaling | None

    def max_tokens(self, max_position_embeddings: int) -> int:
        """The longest context that the scaling is made for; `max_position_embeddings` without
        scaling, and for Llama 3.1, where it is that of the scaled model."""
        match self.scaling:
            case LinearScaling(factor) | DynamicScaling(factor):
                return int(max_position_embeddings * factor)
            case YarnScaling(factor=factor, original_max_position_embeddings=original):
                return max(max_position_embeddings, int(original * factor))
        return max_position_embeddings


def read_rope(fields: Fields) -> RopeConfig:
    """The RopeConfig of all layers. Raises StartupFailed, naming an unsupported field."""
    section = fields.section("rope_scaling") or fields.section("rope_parameters")
    if fields.number("partial_rotary_factor", 1.0) != 1:
        raise fields.error("partial_rotary_factor is not supported")
    both = [FULL_ATTENTION, SLIDING_ATTENTION]
    used = fields.get("layer_types", both)
    kinds = [kind for kind in both if isinstance(used, list) and kind in used]
    by_kind = [section.section(kind) for kind in kinds if section.get(kind) is not None]
    ropes = {_read_one(part, fields) for part in by_kind or [section]}
    if len(ropes) > 1:
        raise fields.error("rope_parameters that differ between layer types are not supported")
    return ropes.pop()


def _read_one(section: Fields, fields: Fields) -> RopeConfig:
    theta = section.number("rope_theta", fields.number("rope_theta", 10_000.0))
    if theta <= 1:
        raise fields.error(f"rope_theta is {theta}, which rotates all dimensions alike")
    rope_type = section.get("rope_type", section.get("type", "default"))
    if section.number("partial_rotary_factor", 1.0) != 1:
        raise fields.error("partial_rotary_factor is not supported")
    if rope_type == "default":
        return RopeConfig(theta, None)
    read = _READERS.get(rope_type) if isinstance(rope_type, str) else None
    if read is None:
        supported = ", ".join(("default", *_READERS))
        raise fields.error(
            f"rope_type {rope_type!r} is not supported", hint=f"supported are: {supported}"
        )
    return RopeConfig(theta, read(section, fields))


def _dynamic(section: Fields, fields: Fields) -> DynamicScaling:
    return DynamicScaling(_factor(section), fields.positive("max_position_embeddings"))


def _yarn(section: Fields, fields: Fields) -> YarnScaling:
    original = _original_length(section, fields)
    implied = fields.positive("max_position_embeddings", original) / original
    factor = _factor(section, implied)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=section.number("attention_factor", _attention_factor(section, factor)),
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        is_truncated=section.flag("truncate", True),
    )


def _attention_factor(section: Fields, factor: float) -> float:
    """YaRN, section 3.4, with the weights `mscale` of DeepSeek's configurations."""

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if section.get("mscale") and section.get("mscale_all_dim"):
        return temperature(section.number("mscale")) / temperature(section.number("mscale_all_dim"))
    return temperature(1.0)


def _llama3(section: Fields, fields: Fields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=_factor(section),
        low_freq_factor=section.number("low_freq_factor"),
        high_freq_factor=section.number("high_freq_factor"),
        original_max_position_embeddings=_original_length(section, fields),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise fields.error("high_freq_factor of rope is not above low_freq_factor")
    return scaling


def _factor(section: Fields, default: float | None = None) -> float:
    factor = section.number("factor", default)
    if factor < 1:
        raise section.error(f"factor of rope is {factor}, which is below 1")
    return factor


def _original_length(section: Fields, fields: Fields) -> int:
    name = "original_max_position_embeddings"
    inner = section.get(name, fields.get("max_position_embeddings"))
    return fields.positive(name, inner if isinstance(inner, int) else None)


_READERS: Mapping[str, Callable[[Fields, Fields], Scaling]] = {
    "linear": lambda section, fields: LinearScaling(_factor(section)),
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
}
