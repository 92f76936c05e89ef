"""8-bit KV: values as float8_e4m3fn or int8, K and V with a float32 scale per token and head.

    pool              [num_blocks, num_layers, 2, kv_heads, block_size, head_dim + 4], a byte each
    one head's piece  | values [block_size, head_dim] | scales [block_size] float32 |

Scales are stored in the block of their values, so any copy of a block, or of some of its heads,
includes them. They are computed when a token's KV is written, without calibration, and take 4 bytes
for head_dim values: 3 % for heads of 128.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SCALE_BYTES = 4
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # quantised largest value of a row
SMALLEST = 2.0**-40  # lower bound of a row's largest value, so that no scale is 0


def is_8bit(pool: Tensor) -> bool:
    """Whether the pool, or a layer of it, holds 8-bit values and scales."""
    return pool.dtype in LARGEST


def head_dim_of(pool: Tensor) -> int:
    """The head_dim of a pool of any type [.., block_size, head_dim], or head_dim + 4 bytes."""
    return pool.shape[-1] - SCALE_BYTES if is_8bit(pool) else pool.shape[-1]


def values_and_scales(pool: Tensor) -> tuple[Tensor, Tensor]:
    """Views of an 8-bit pool, or a part of one [.., block_size, head_dim + 4]: the values
    [.., block_size, head_dim], as bytes, and the scales [.., block_size] float32."""
    block_size, dim = pool.shape[-2], head_dim_of(pool)
    pieces = pool.flatten(-2).view(torch.uint8)
    values, scales = pieces.tensor_split([block_size * dim], dim=-1)
    return values.view(*pool.shape[:-1], dim), scales.view(torch.float32)


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [.., dim] -> values of `dtype` [.., dim], scales [..] float32: x is about values * scales.

    A row with a value that is not finite gets a scale of NaN and so is invalid.
    """
    x32 = x.float()
    most = x32.abs().amax(-1)  # NaN if the row has one
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
    """`kv_blocks.store_kv` for an 8-bit pool."""
    all_values, all_scales = values_and_scales(pool[:, layer])
    for which, x in enumerate((k, v)):
        values, scales = quantize(x, pool.dtype)
        all_values[blocks, which, :, offsets] = values.view(torch.uint8)
        all_scales[blocks, which, :, offsets] = scales
