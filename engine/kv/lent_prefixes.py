"""Blocks of the prefix cache that other engines copy, and blocks that a copy fills for it.

    lend      cached blocks ── a reference, until it is closed ──► pullers read them
    borrow    cached + new blocks ── filled by a pull ──► `keep`: cached, and unreferenced

Both are fences: no request owns them. They use no blocks that running sequences, and the next one,
will need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...core.request.token_ids import BlockHash
from .block_pool import BlockPool, BlockRefs, Fence
from .prefix_cache import PrefixCache


@dataclass(slots=True, eq=False)
class BorrowedPrefix:
    """Blocks for the first ones of a prompt: `block_ids[i]` is for `block_hashes[i]`; the first
    `num_cached_blocks` are cached here."""

    block_hashes: tuple[BlockHash, ...]
    block_ids: tuple[int, ...]
    num_cached_blocks: int
    _fences: tuple[Fence, ...] = field(repr=False)


@dataclass(eq=False)
class LentPrefixes:
    """The lent and borrowed prefixes of one engine. `room()`: blocks beside the estimated peak of
    all sequences with blocks and of the next one."""

    _pool: BlockPool
    _cache: PrefixCache
    _room: Callable[[], int]
    _fences: set[Fence] = field(default_factory=set)

    def lend(self, block_hashes: Sequence[BlockHash]) -> tuple[Fence, BlockRefs] | None:
        """Hold the cached blocks of these hashes for a peer that copies them, until `give_back`;
        None if one is missing, or if sequences here will need the memory."""
        block_ids = self._cache.match(block_hashes)
        if len(block_ids) < len(block_hashes) or not self._has_room(block_ids, 0):
            return None
        return self._hold(block_ids), self._pool.refs(block_ids, block_hashes)

    def first_undrafted(self, lent: BlockRefs) -> int | None:
        """See PrefixCache."""
        return self._cache.first_undrafted(lent.block_ids.tolist())

    def give_back(self, fence: Fence) -> None:
        """The blocks are not copied any more. A second call does nothing."""
        self._fences.discard(fence)
        fence.close()

    def borrow(self, block_hashes: Sequence[BlockHash]) -> BorrowedPrefix | None:
        """Blocks for all of these hashes, to be filled by a copy; None if sequences here will need
        the memory, or if all are cached. Ends by `keep` or `drop`."""
        cached = self._cache.match(block_hashes)
        num_fresh = len(block_hashes) - len(cached)
        if not num_fresh or not self._has_room(cached, num_fresh):
            return None
        held = self._hold(cached)  # first: the allocation could evict them
        fresh = self._pool.allocate(num_fresh)
        if fresh is None:
            self.give_back(held)
            return None
        fences = (held, self._hold(fresh))
        self._pool.release(fresh)  # the fence holds them
        return BorrowedPrefix(tuple(block_hashes), (*cached, *fresh), len(cached), fences)

    def keep(self, prefix: BorrowedPrefix, first_undrafted: int | None = None) -> None:
        """The copy has filled the blocks: enter them into the prefix cache; from index
        `first_undrafted` on they lack the draft model's KV."""
        fresh = slice(prefix.num_cached_blocks, None)
        self._cache.store(prefix.block_hashes[fresh], prefix.block_ids[fresh])
        end = len(prefix.block_ids) if first_undrafted is None else first_undrafted
        self._cache.note_drafted(prefix.block_ids[fresh], max(0, end - fresh.start))
        self.drop(prefix)

    def drop(self, prefix: BorrowedPrefix) -> None:
        """Nothing writes to the blocks any more: cached ones can be evicted, others are free."""
        for fence in reversed(prefix._fences):  # a chain is evicted from its end
            self.give_back(fence)

    def _has_room(self, cached: Sequence[int], num_fresh: int) -> bool:
        """Whether these and `num_fresh` more can be held beside the estimated peak."""
        num_unheld = sum(not self._pool.num_refs(block_id) for block_id in cached)
        num_lent = sum(len(fence.block_ids) for fence in self._fences)
        return num_unheld + num_fresh + num_lent <= self._room()

    def _hold(self, block_ids: Sequence[int]) -> Fence:
        fence = self._pool.open_fence(block_ids)
        self._fences.add(fence)
        return fence
