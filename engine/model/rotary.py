"""The inverse frequencies of rotary embeddings, with the scalings for long contexts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .layers import RotaryEmbedding
from .rope_config import DynamicScaling, LinearScaling, Llama3Scaling, RopeConfig, YarnScaling


def make_rotary_embedding(rope: RopeConfig, head_dim: int, device: torch.device) -> RotaryEmbedding:
    scaling = rope.scaling
    if isinstance(scaling, DynamicScaling):
        table = dynamic_inv_freq(rope.theta, scaling, head_dim).to(device)
        return RotaryEmbedding(table, trained_length=scaling.max_position_embeddings)
    scale = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
    return RotaryEmbedding(inv_freq(rope, head_dim).to(device), scale)


def inv_freq(rope: RopeConfig, head_dim: int) -> Tensor:
    """The angle per position of each pair of dimensions, [head_dim / 2] float32.

    Not for DynamicScaling, whose angles depend on the length.
    """
    plain: Tensor = 1.0 / (rope.theta ** _exponents(head_dim))
    match rope.scaling:
        case LinearScaling(factor):
            return plain / factor
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(plain, rope.theta, scaling)
    return plain


def dynamic_inv_freq(theta: float, scaling: DynamicScaling, head_dim: int) -> Tensor:
    """NTK-aware scaling: [1 + positions beyond the trained length, head_dim / 2] float32.

    Row 0 is for all positions within it. A position has the base of a sequence that ends there, as
    in transformers when it decodes token by token. (For a prompt beyond the trained length it uses
    the base of the prompt's end.) A table, because a vectorised power rounds differently depending
    on an element's place.
    """
    length, factor = scaling.max_position_embeddings, scaling.factor
    ends = torch.arange(length, int(length * factor) + 1, dtype=torch.float64)
    stretch = factor * ends / length - (factor - 1)
    bases = theta * stretch ** (head_dim / (head_dim - 2))
    return (1.0 / bases[:, None] ** _exponents(head_dim).double()).float()


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim


def _llama3(plain: Tensor, s: Llama3Scaling) -> Tensor:
    """Frequencies of wavelengths above original / low_freq_factor are divided by `factor`, those
    below original / high_freq_factor stay; in between they are interpolated (Llama 3.1)."""
    turns = s.original_max_position_embeddings * plain / (2 * math.pi)
    share = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    share = share.clamp(0, 1)  # 1: unchanged, 0: divided by the factor
    return (1 - share) * plain / s.factor + share * plain


def _yarn(plain: Tensor, theta: float, s: YarnScaling) -> Tensor:
    """NTK by parts (YaRN, section 3.2): pairs that turn more than `beta_fast` times within the
    trained length stay, those below `beta_slow` are divided by `factor`; in between the two are
    mixed linearly by the pair's index."""
    dim = 2 * len(plain)

    def pair_that_turns(times: float) -> float:
        length = s.original_max_position_embeddings
        return dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(s.beta_fast), pair_that_turns(s.beta_slow)
    if s.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    share = ((torch.arange(len(plain), dtype=torch.float32) - low) / width).clamp(0, 1)
    return (1 - share) * plain + share * plain / s.factor  # share 0: unchanged
