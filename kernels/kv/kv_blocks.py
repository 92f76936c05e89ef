"""Moving KV in and out of the block-major pool; the torch reference.

pool [num_blocks, num_layers, 2, kv_heads, block_size, dim]
slot = block_id * block_size + offset in the block
"""

from __future__ import annotations

import torch
from torch import Tensor


def store_kv(pool: Tensor, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Write one layer's k and v [tokens, kv_heads, dim] to the slots [tokens], int64."""
    block_size = pool.shape[4]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    store_kv_at(pool, layer, k, v, blocks, offsets)


def store_kv_at(
    pool: Tensor, layer: int, k: Tensor, v: Tensor, blocks: Tensor, offsets: Tensor
) -> None:
    """`store_kv` with the slots already split, which is the same for all layers of a step."""
    layer_pool = pool[:, layer]
    layer_pool[blocks, 0, :, offsets] = k
    layer_pool[blocks, 1, :, offsets] = v


def gather_blocks(pool: Tensor, block_ids: Tensor) -> Tensor:
    """Whole blocks as one contiguous tensor [n, num_layers, 2, kv_heads, block_size, dim]."""
    return pool.index_select(0, block_ids)


def scatter_blocks(pool: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
    """The reverse of `gather_blocks`; `block_ids` must not repeat."""
    pool.index_copy_(0, block_ids, blocks)


def copy_blocks(pool: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Copy blocks within the pool, as if all were read before any is written."""
    scatter_blocks(pool, target_ids, gather_blocks(pool, source_ids))


def copy_heads(
    source: Tensor,
    source_ids: Tensor,
    source_head: int,
    target: Tensor,
    target_ids: Tensor,
    target_head: int,
    num_heads: int,
) -> None:
    """Copy `num_heads` KV heads of blocks between pools that differ in `kv_heads` alone.

    source_ids, target_ids [n]; `target_ids` must not repeat. The heads that begin with
    `source_head` there go to those that begin with `target_head`.
    """
    heads = source[source_ids, :, :, source_head : source_head + num_heads]
    target[target_ids, :, :, target_head : target_head + num_heads] = heads


def block_rows(pool: Tensor, block_ids: Tensor) -> Tensor:
    """Where the pieces [block_size, dim] of blocks lie in `pool.view(-1, block_size * dim)`.

    block_ids [n] -> [num_layers, 2 * kv_heads * n]: for a layer, its K and V rows head by head, so
    that one gather of rows gives [2, kv_heads, n * block_size, dim] contiguously.
    """
    _, num_layers, _, kv_heads, _, _ = pool.shape
    pieces = torch.arange(num_layers * 2 * kv_heads, device=pool.device)
    rows = pieces[:, None] + block_ids * (num_layers * 2 * kv_heads)
    return rows.view(num_layers, -1)
