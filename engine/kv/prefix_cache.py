"""Which block holds the KV of which prefix: chained block hash -> block id.

A block is entered once it is full and computed, and never rewritten while it is in here. The pool
decides when an unreferenced one is evicted. Knows no request and holds no reference: whoever
matches acquires. What is in host memory beside is in host_blocks.py; here both are known, and the
observer is told of the two as one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from ...core.request.token_ids import BlockHash, Tier
from .block_pool import BlockPool
from .host_blocks import HostBlocks


class CacheObserver(Protocol):
    """Receives what this engine could serve from its cache: a cluster-wide index is made of it."""

    def moved(self, block_hashes: Collection[BlockHash], was: Tier, now: Tier) -> None:
        """The best place that each is in; `was` and `now` differ."""
        ...


class PrefixCache:
    """The only listener of `pool`'s evictions. Switched off, it matches and stores nothing."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        is_enabled: bool = True,
        observer: CacheObserver | None = None,
        host: HostBlocks | None = None,
    ) -> None:
        """Switched off, there is no `host` either."""
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
        """The blocks of the longest cached beginning of `hashes`.

        They may be unreferenced: acquire them before anything is allocated.
        """
        matched: list[int] = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            matched.append(block_id)
        return matched

    def store(self, block_hashes: Iterable[BlockHash], block_ids: Iterable[int]) -> None:
        """Enter full, computed blocks that somebody holds, by their hashes, no two of them alike.

        Of two blocks with one hash the first stays; the second remains an ordinary block.
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
        """Of these the first `num_drafted` have a draft model's KV, and the others lack it."""
        self._undrafted.difference_update(block_ids[:num_drafted])
        self._undrafted.update(block_ids[num_drafted:])

    def first_undrafted(self, block_ids: Iterable[int]) -> int | None:
        """The place of the first of these that lacks a draft model's KV."""
        return next((n for n, each in enumerate(block_ids) if each in self._undrafted), None)

    def entered_host(self, block_hashes: Iterable[BlockHash]) -> None:
        """They are in host memory now, and were not before."""
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
