"""The prefix cache: chained block hash -> block id.

A block is entered once it is full and computed, and never rewritten while it is in the cache. The
pool decides when an unreferenced one is evicted. Knows no request and holds no reference: the
caller of `match` acquires. The blocks in host memory are in host_blocks.py; the observer is
notified of the better of both places.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from ...core.request.token_ids import BlockHash, Tier
from .block_pool import BlockPool
from .host_blocks import HostBlocks, found_prefix


class CacheObserver(Protocol):
    """Receives what this engine could serve from its cache, for the cluster-wide prefix index."""

    def moved(self, block_hashes: Collection[BlockHash], was: Tier, now: Tier) -> None:
        """The best place of each block; `was` and `now` differ."""
        ...


class PrefixCache:
    """The only listener of `pool`'s evictions. Disabled, it matches and stores nothing."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        is_enabled: bool = True,
        observer: CacheObserver | None = None,
        host: HostBlocks | None = None,
    ) -> None:
        """Without `is_enabled` there must be no `host`."""
        self.is_enabled = is_enabled
        self._in_host: AbstractSet[BlockHash] = frozenset()
        if host is not None:
            self._in_host = host.hashes
            host.on_evict = self._left_host
        self._pool = pool
        self._observer = observer
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._undrafted: set[int] = set()
        pool.on_evict = self._remove

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The blocks of the longest cached prefix of `hashes`.

        They may be unreferenced: acquire them before anything is allocated.
        """
        return found_prefix(hashes, self._block_of.get)

    def store(self, block_hashes: Iterable[BlockHash], block_ids: Iterable[int]) -> None:
        """Enter full, computed blocks that are referenced, by their distinct hashes.

        If a hash is cached already, the earlier block stays; the other is not cached.
        """
        if not self.is_enabled:
            return
        pairs = zip(block_hashes, block_ids, strict=True)
        entered = {each: block_id for each, block_id in pairs if each not in self._block_of}
        if not entered:
            return
        hash_of = {block_id: each for each, block_id in entered.items()}
        assert self._hash_of.keys().isdisjoint(hash_of), "a block was rewritten while cached"
        self._pool.keep(hash_of)
        self._block_of |= entered
        self._hash_of |= hash_of
        self._notify_device(entered, is_there=True)

    def note_drafted(self, block_ids: Sequence[int], num_drafted: int) -> None:
        """The first `num_drafted` of these have a draft model's KV, the others lack it."""
        self._undrafted.difference_update(block_ids[:num_drafted])
        self._undrafted.update(block_ids[num_drafted:])

    def first_undrafted(self, block_ids: Iterable[int]) -> int | None:
        """The index of the first of these that lacks a draft model's KV."""
        return next((n for n, each in enumerate(block_ids) if each in self._undrafted), None)

    def entered_host(self, block_hashes: Iterable[BlockHash]) -> None:
        """Notify that these are in host memory now, and were not before."""
        self._notify_host(block_hashes, Tier.NOWHERE, Tier.HOST)

    def _left_host(self, block_hashes: Iterable[BlockHash]) -> None:
        self._notify_host(block_hashes, Tier.HOST, Tier.NOWHERE)

    def _remove(self, block_ids: Iterable[int]) -> None:
        removed = [*map(self._hash_of.pop, block_ids)]
        for block_hash in removed:
            del self._block_of[block_hash]
        self._notify_device(removed, is_there=False)

    def _notify_host(self, block_hashes: Iterable[BlockHash], was: Tier, now: Tier) -> None:
        alone = [each for each in block_hashes if each not in self._block_of]
        if self._observer is not None and alone:
            self._observer.moved(alone, was, now)

    def _notify_device(self, block_hashes: Collection[BlockHash], *, is_there: bool) -> None:
        if self._observer is None:
            return
        nowhere, in_host = block_hashes, list[BlockHash]()
        if not self._in_host.isdisjoint(block_hashes):
            in_host = [each for each in block_hashes if each in self._in_host]
            nowhere = [each for each in block_hashes if each not in self._in_host]
        for other, hashes in ((Tier.NOWHERE, nowhere), (Tier.HOST, in_host)):
            if hashes:
                was, now = (other, Tier.DEVICE) if is_there else (Tier.DEVICE, other)
                self._observer.moved(hashes, was, now)
