"""Blocks of the prefix cache that others copy from, and blocks that a copy fills for it.

    lend      cached blocks ── a reference, until it is closed ──► pullers read them
    borrow    what is cached + fresh blocks ── filled by a pull ──► `keep`: cached, and free to go

Both are fences: no request owns them. Decides nothing about memory: whoever asks has judged that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ...core.request.token_ids import BlockHash
from .block_pool import BlockPool, Fence
from .prefix_cache import PrefixCache


@dataclass(slots=True, eq=False)
class BorrowedPrefix:
    """Room for the first blocks of a prompt: `block_ids[i]` is for that of `block_hashes[i]`; the
    first `num_cached_blocks` of them are cached here."""

    block_hashes: tuple[BlockHash, ...]
    block_ids: tuple[int, ...]
    num_cached_blocks: int
    _fences: tuple[Fence, ...] = field(repr=False)


class LentPrefixes:
    """Of one engine."""

    def __init__(self, pool: BlockPool, cache: PrefixCache) -> None:
        self._pool = pool
        self._cache = cache
        self._fences: set[Fence] = set()

    @property
    def num_blocks(self) -> int:
        """References that are held for copies."""
        return sum(len(fence.block_ids) for fence in self._fences)

    def num_unheld(self, block_ids: Collection[int]) -> int:
        """How many of them nobody refers to: to hold them makes less available."""
        return sum(not self._pool.num_refs(block_id) for block_id in block_ids)

    def match(self, block_hashes: Sequence[BlockHash]) -> list[int]:
        """The cached blocks of the longest beginning."""
        return self._cache.match(block_hashes) if self._cache.is_enabled else []

    def lend(self, block_ids: Sequence[int]) -> Fence:
        """Hold blocks of the cache until `give_back`."""
        fence = self._pool.open_fence(block_ids)
        self._fences.add(fence)
        return fence

    def give_back(self, fence: Fence) -> None:
        """Nobody copies from these any more. A second call does nothing."""
        self._fences.discard(fence)
        fence.close()

    def borrow(self, block_hashes: Sequence[BlockHash]) -> BorrowedPrefix | None:
        """Blocks for all of these, or None if the pool has too few left."""
        cached = self.match(block_hashes)
        held = self.lend(cached)  # first: the allocation could evict them
        fresh = self._pool.allocate(len(block_hashes) - len(cached))
        if fresh is None:
            self.give_back(held)
            return None
        fences = (held, self.lend(fresh))
        self._pool.release(fresh)  # the fence has them
        return BorrowedPrefix(tuple(block_hashes), (*cached, *fresh), len(cached), fences)

    def keep(self, prefix: BorrowedPrefix) -> None:
        """They are filled: enter them into the cache."""
        fresh = slice(prefix.num_cached_blocks, None)
        self._cache.store(prefix.block_hashes[fresh], prefix.block_ids[fresh])

    def drop(self, prefix: BorrowedPrefix) -> None:
        """Nothing writes to them any more: what is cached can be evicted, the rest is free."""
        for fence in prefix._fences:
            self.give_back(fence)
