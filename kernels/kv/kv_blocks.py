"""Normalise, rotate, store and copy keys and values in plain torch: reference of the GPU kernels.

    pool [num_blocks, num_layers, 2, kv_heads, block_size, dim], or of 8 bits: see kv_8bit.py
    slot = block_id * block_size + offset in the block

Rotary position embedding (Su et al. 2021) in Llama's layout: i and i + dim/2 rotate as a pair.
Angles are always float32: bf16 cannot distinguish neighbouring positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .kv_8bit import is_8bit


def rope_angles(positions: Tensor, inv_freq: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """`scale` times cos and signed sin for `apply_rope`, once per step.

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


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each head of q and k, applied before the rotation: weights [dim]."""

    q: Tensor
    k: Tensor
    eps: float


def norm_heads(x: Tensor, kv_heads: int, norms: HeadNorms) -> Tensor:
    """Apply `norms` to q and k: x [tokens, heads + kv_heads, dim] -> the same shape, contiguous."""

    def normed(heads: Tensor, weight: Tensor) -> Tensor:
        # Over contiguous rows: the order of summation, and so the rounding, may depend on strides.
        flat = F.rms_norm(heads.reshape(-1, heads.shape[-1]), weight.shape, weight, norms.eps)
        return flat.view(heads.shape)

    q, k = x.tensor_split([-kv_heads], dim=1)
    return torch.cat((normed(q, norms.q), normed(k, norms.k)), dim=1)


def store_kv(
    pool: Tensor, layer: int, k: Tensor, v: Tensor, blocks: Tensor, offsets: Tensor
) -> None:
    """Write one layer's k and v [tokens, kv_heads, dim] to their slots: blocks [tokens] and offsets
    [tokens], int64. For an 8-bit pool see kv_8bit.store_kv_8bit."""
    by_slot = pool[:, layer].permute(0, 3, 1, 2, 4)  # [num_blocks, block_size, 2, kv_heads, dim]
    by_slot[blocks, offsets] = torch.stack((k, v), dim=1)


def copy_blocks(pool: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Copy blocks within the pool. All sources are read before any target is written; ids [n]
    int64, no target may repeat."""
    if is_8bit(pool):
        pool = pool.view(torch.int32)  # fewer elements, of a type that all devices can copy
    pool.index_copy_(0, target_ids, pool.index_select(0, source_ids))


def block_rows(pool: Tensor, block_ids: Tensor) -> Tensor:
    """Row indices of blocks in `pool.view(-1, block_size, dim)`.

    block_ids [n] -> [num_layers, 2 * kv_heads * n]: for each layer its K and V head by head, so
    that one gather of rows gives [2, kv_heads, n * block_size, dim] contiguously. In an 8-bit pool
    dim is the number of bytes of a token's values and scale.
    """
    _, num_layers, _, kv_heads, _, _ = pool.shape
    pieces = torch.arange(num_layers * 2 * kv_heads, device=pool.device)
    rows = pieces[:, None] + block_ids * (num_layers * 2 * kv_heads)
    return rows.view(num_layers, -1)
