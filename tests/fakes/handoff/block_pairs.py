"""Blocks of a hand-off, and block pairs of a pull, as single objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from baton.core.request.token_ids import HASH_BYTES, BlockHash
from baton.engine.kv.block_pool import BlockRefs
from baton.kv_transfer.window.block_pairs import BlockPairs


class BlockRef(NamedTuple):
    """One entry of `BlockRefs`; `hash` is None for a partial block."""

    block_id: int
    generation: int = 0
    hash: BlockHash | None = None


class BlockPair(NamedTuple):
    """One block to copy: its id in the source's pool, and the id of the local block that it goes
    to."""

    source: BlockRef
    destination: int


def packed(blocks: Iterable[BlockRef]) -> BlockRefs:
    ids, generations, hashes = zip(*blocks, strict=True)
    return BlockRefs.pack(ids, generations, [each for each in hashes if each is not None])


def unpacked(refs: BlockRefs) -> list[BlockRef]:
    hashes: list[BlockHash | None] = [
        BlockHash(refs.hashes[at : at + HASH_BYTES])
        for at in range(0, len(refs.hashes), HASH_BYTES)
    ]
    hashes += [None] * (len(refs) - len(hashes))
    columns = (refs.block_ids.tolist(), refs.generations.tolist(), hashes)
    return [BlockRef(*each) for each in zip(*columns, strict=True)]


def split(pairs: BlockPairs) -> list[BlockPair]:
    columns = (*pairs.ids.tolist(), pairs.generations.tolist())
    return [
        BlockPair(BlockRef(source, generation), destination)
        for source, destination, generation in zip(*columns, strict=True)
    ]


def join(*pairs: BlockPair) -> BlockPairs:
    """One at least."""
    sources, destinations = zip(*pairs, strict=True)
    return BlockPairs.join(packed(sources), destinations)
