"""Norm, rotate, store and copy keys and values; the torch reference.

    pool [num_blocks, num_layers, 2, kv_heads, block_size, dim], or of 8 bits: see kv_8bit.py
    slot = block_id * block_size + offset in the block

Rotary position embedding (Su et al. 2021) in Llama's layout: i turns together with i + dim/2. Its
angles are float32 whatever the model's type: bf16 cannot distinguish neighbouring positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .kv_8bit import is_8bit


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


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each head of q and of k, in front of the rotation: weights [dim]."""

    q: Tensor
    k: Tensor
    eps: float


def norm_heads(x: Tensor, kv_heads: int, norms: HeadNorms) -> Tensor:
    """x [tokens, heads + kv_heads, dim], q and k -> the same, contiguous."""

    def normed(heads: Tensor, weight: Tensor) -> Tensor:
        # Over rows behind each other, as everywhere: the order of sums may depend on it.
        flat = F.rms_norm(heads.reshape(-1, heads.shape[-1]), weight.shape, weight, norms.eps)
        return flat.view(heads.shape)

    q, k = x.tensor_split([-kv_heads], dim=1)
    return torch.cat((normed(q, norms.q), normed(k, norms.k)), dim=1)


def store_kv(
    pool: Tensor, layer: int, k: Tensor, v: Tensor, blocks: Tensor, offsets: Tensor
) -> None:
    """Write one layer's k and v [tokens, kv_heads, dim] to the offsets [tokens] in blocks [tokens],
    int64: the slots, split once for all layers of a step. Not for 8 bits: kv_8bit.store_kv_8bit."""
    layer_pool = pool[:, layer]
    layer_pool[blocks, 0, :, offsets] = k
    layer_pool[blocks, 1, :, offsets] = v


def copy_blocks(pool: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Copy blocks within the pool, as if all were read before any is written; ids [n] int64, no
    target may repeat."""
    if is_8bit(pool):
        pool = pool.view(torch.int32)  # fewer elements, and of a type that all devices copy
    pool.index_copy_(0, target_ids, pool.index_select(0, source_ids))


def block_rows(pool: Tensor, block_ids: Tensor) -> Tensor:
    """Where the pieces [block_size, dim] of blocks lie in `pool.view(-1, block_size, dim)`.

    block_ids [n] -> [num_layers, 2 * kv_heads * n]: for a layer, its K and V rows head by head, so
    that one gather of rows gives [2, kv_heads, n * block_size, dim] contiguously. In 8 bits with as
    many bytes, scales included, in the place of dim.
    """
    _, num_layers, _, kv_heads, _, _ = pool.shape
    pieces = torch.arange(num_layers * 2 * kv_heads, device=pool.device)
    rows = pieces[:, None] + block_ids * (num_layers * 2 * kv_heads)
    return rows.view(num_layers, -1)
