"""Rotary position embedding (Su et al. 2021) in Llama's layout: i turns together with i + dim/2.

The angles are float32 whatever the model's type: bf16 cannot tell neighbouring positions apart.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_angles(positions: Tensor, inv_freq: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """`scale` times cos and signed sin for `apply_rope`, computed once per step.

    positions [tokens], inv_freq [dim/2] or [tokens, dim/2] float32 -> two of [tokens, 1, dim]
    float32.
    """
    angles = positions[:, None].float() * inv_freq
    cos, sin = angles.cos(), angles.sin()
    if scale != 1:
        cos, sin = cos * scale, sin * scale
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [tokens, heads, dim]: (a, b) -> (a cos - b sin, b cos + a sin) on its halves."""
    x32 = x.float()
    swapped = x32.roll(x.shape[-1] // 2, -1)  # (a, b) -> (b, a); the sign is in sin
    return torch.addcmul(x32 * cos, swapped, sin).type_as(x)
