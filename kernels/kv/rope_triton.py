"""Rotate q and k in place and store k and v into the paged pool, in one Triton kernel.

The reference is apply_rope and store_kv of kv_blocks.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous

_TILE_HEADS = 8


def rotate_and_store(
    qkv: Tensor, rope: tuple[Tensor, Tensor], layer_pool: Tensor, slot_mapping: Tensor
) -> None:
    """Rotates q and k where they lie; k and v go to the slots [tokens], int64, too.

    qkv [tokens, heads + 2 kv_heads, dim] contiguous, rope from `kv_blocks.rope_angles`, layer_pool
    [num_blocks, 2, kv_heads, block_size, dim]: one layer of the pool.
    """
    num_tokens, all_heads, dim = qkv.shape
    _, _, kv_heads, block_size, _ = layer_pool.shape
    heads = all_heads - 2 * kv_heads
    cos, sin = rope
    q_tiles, kv_tiles = triton.cdiv(heads, _TILE_HEADS), triton.cdiv(kv_heads, _TILE_HEADS)
    _rotate_and_store[(num_tokens, q_tiles + 2 * kv_tiles)](
        qkv,
        cos,
        sin,
        slot_mapping,
        layer_pool,
        heads,
        kv_heads,
        q_tiles,
        kv_tiles,
        layer_pool.stride(0),
        BLOCK_SIZE=block_size,
        DIM=dim,
        HALF_PADDED=triton.next_power_of_2(dim // 2),
        TILE_HEADS=_TILE_HEADS,
        num_warps=2,
        **launch_options(qkv.device),
    )


@triton.jit
def _rotate_and_store(
    qkv,
    cos,
    sin,
    slot_mapping,
    layer_pool,
    heads,
    kv_heads,
    q_tiles,
    kv_tiles,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_in(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    half: tl.constexpr = DIM // 2
    dims = tl.arange(0, HALF_PADDED)[None, :]
    rows = tl.arange(0, TILE_HEADS)[:, None]
    # part 0: q, 1: k, 2: v; `head` counts within its part.
    is_q = tile < q_tiles
    kv_tile = tile - q_tiles
    part = tl.where(is_q, 0, 1 + kv_tile // kv_tiles)
    head = tl.where(is_q, tile, kv_tile % kv_tiles) * TILE_HEADS + rows
    num_heads = tl.where(is_q, heads, kv_heads)
    source = qkv + token * (heads + 2 * kv_heads) * DIM
    source += (tl.where(is_q, 0, heads + (part - 1) * kv_heads) + head) * DIM
    mask = (head < num_heads) & (dims < half)
    first = tl.load(source + dims, mask=mask, other=0.0)
    second = tl.load(source + dims + half, mask=mask, other=0.0)
    if part < 2:
        # cos is (c, c) and sin is (-s, s) over the two halves.
        c = tl.load(cos + token * DIM + dims, mask=dims < half, other=0.0)
        s = tl.load(sin + token * DIM + half + dims, mask=dims < half, other=0.0)
        a, b = first.to(tl.float32), second.to(tl.float32)
        first, second = (a * c - b * s).to(first.dtype), (b * c + a * s).to(second.dtype)
        tl.store(source + dims, first, mask=mask)
        tl.store(source + dims + half, second, mask=mask)
    if part > 0:
        slot = tl.load(slot_mapping + token)
        block = layer_pool + slot // BLOCK_SIZE * block_stride
        place = ((part - 1) * kv_heads + head) * BLOCK_SIZE + slot % BLOCK_SIZE
        kv = block + place * DIM + dims
        tl.store(kv, first, mask=mask)
        tl.store(kv + half, second, mask=mask)
