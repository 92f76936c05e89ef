"""KV in 8 bits: values as float8_e4m3fn or int8, with a float32 scale for each token, head, K or V.

    pool              [num_blocks, num_layers, 2, kv_heads, block_size, head_dim + 4], a byte each
    one head's piece  | values [block_size, head_dim] | scales [block_size] float32 |

The scales lie in the piece of the block whose values they belong to, so whatever moves a block, or
some heads of it, moves them too. They are computed when a token's KV is written: nothing is
calibrated. They take 4 bytes for head_dim values, 3 % of heads of 128.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SCALE_BYTES = 4
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # what a row's largest value becomes
SMALLEST = 2.0**-40  # a row's largest value counts as this at least: a scale is never 0


def is_8bit(pool: Tensor) -> bool:
    """Whether the pool, or a layer of it, holds values and scales."""
    return pool.dtype in LARGEST


def head_dim_of(pool: Tensor) -> int:
    """Of a pool of any type: [.., block_size, head_dim], or head_dim + 4 bytes."""
    return pool.shape[-1] - SCALE_BYTES if is_8bit(pool) else pool.shape[-1]


def values_and_scales(pool: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a pool of 8 bits, or a part of one [.., block_size, head_dim + 4]: the values
    [.., block_size, head_dim], as bytes, and the scales [.., block_size] float32."""
    block_size, dim = pool.shape[-2], head_dim_of(pool)
    pieces = pool.flatten(-2).view(torch.uint8)
    values, scales = pieces.tensor_split([block_size * dim], dim=-1)
    return values.view(*pool.shape[:-1], dim), scales.view(torch.float32)


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [.., dim] -> values of `dtype` [.., dim], scales [..] float32: x is about values * scales.

    A row with anything that is not finite has a scale of NaN, and so means nothing.
    """
    x32 = x.float()
    most = x32.abs().amax(-1)  # NaN, if there is one
    bounded = most.clamp(min=SMALLEST)
    scaled = x32 * (LARGEST[dtype] / bounded)[..., None]
    scales = torch.where(most < math.inf, bounded * (1 / LARGEST[dtype]), math.nan)
    if dtype == torch.int8:
        scaled = scaled.round()
    return scaled.to(dtype), scales


def dequantize(pieces: Tensor, dtype: torch.dtype) -> Tensor:
    """Pieces of a pool [n, block_size, head_dim + 4] -> [n, block_size, head_dim] of `dtype`."""
    values, scales = values_and_scales(pieces)
    return (values.view(pieces.dtype).float() * scales[..., None]).to(dtype)


def store_kv_8bit(
    pool: Tensor, layer: int, k: Tensor, v: Tensor, blocks: Tensor, offsets: Tensor
) -> None:
    """`kv_blocks.store_kv` for a pool of 8 bits."""
    all_values, all_scales = values_and_scales(pool[:, layer])
    for which, x in enumerate((k, v)):
        values, scales = quantize(x, pool.dtype)
        all_values[blocks, which, :, offsets] = values.view(torch.uint8)
        all_scales[blocks, which, :, offsets] = scales
