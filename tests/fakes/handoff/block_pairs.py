"""Pairs of blocks for a pull, one by one."""

from __future__ import annotations

from typing import NamedTuple

from baton.engine.kv.block_pool import BlockRef
from baton.kv_transfer.window.block_pairs import BlockPairs


class BlockPair(NamedTuple):
    """One block to copy: where it lies in the source's pool, and the block of ours it goes to."""

    source: BlockRef
    destination: int


def split(pairs: BlockPairs) -> list[BlockPair]:
    columns = (*pairs.ids.tolist(), pairs.generations.tolist())
    return [
        BlockPair(BlockRef(0, source, generation, None), destination)
        for source, destination, generation in zip(*columns, strict=True)
    ]


def join(*pairs: BlockPair) -> BlockPairs:
    """One at least."""
    sources, destinations = zip(*pairs, strict=True)
    return BlockPairs.join(sources, destinations)
