"""The changes of one engine's cache, until they are in Redis.

    record ─► hashes now ─┬─► take: DELTA seq+1, seq+2, ...    changes since the last take
                          └─► stored: pages that changed       the whole cache, as stored in Redis

Memory is bounded by the size of the engine's cache, however long Redis is away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from ..core.request.token_ids import BlockHash, Tier
from .messages import Delta, Head, NetChanges
from .pages import Contents, StoredBlocks


class CacheJournal:
    """`changed` is set whenever there are changes to take; the publisher clears it."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.seq = 0  # of the last delta that was taken
        self.changed = asyncio.Event()
        self.stored = StoredBlocks(incarnation)
        self._unpublished = NetChanges()

    def record(
        self,
        removed: Iterable[BlockHash],
        stored: Iterable[BlockHash],
        in_host: Iterable[BlockHash] = (),
    ) -> None:
        """Record changes of the engine's cache, in order. A hash may be in its new tier already."""
        blocks, unpublished = self.stored, self._unpublished
        for now, hashes in ((Tier.NOWHERE, removed), (Tier.HOST, in_host), (Tier.DEVICE, stored)):
            for block_hash in hashes:
                was = blocks.tier(block_hash)
                if was is not now:
                    blocks.move(block_hash, was, now)
                    unpublished.moved((block_hash,), was, now)
        if unpublished:
            self.changed.set()

    def take(self) -> list[Delta]:
        """Number the changes since the last call. A delta that is lost later leaves a gap."""
        deltas = []
        for part in self._unpublished.take().pieces():
            self.seq += 1
            removed, in_host, stored = map(tuple, part)
            deltas.append(Delta(self.incarnation, self.seq, removed, stored, in_host))
        return deltas

    def head(self) -> Head:
        return Head(self.incarnation, self.seq)

    def contents(self, unix_s: int) -> Contents:
        """The contents of the pages after all deltas taken so far."""
        blocks = self.stored
        on_device, in_host = blocks.count(Tier.DEVICE), blocks.count(Tier.HOST)
        return Contents(self.incarnation, self.seq, blocks.num_pages, on_device, in_host, unix_s)

    def lost_pages(self, pages: Collection[int] | None = None) -> None:
        """Mark pages to be written again: Redis lacks them, or, if none are given, may lack all."""
        lost = range(self.stored.num_pages) if pages is None else pages
        if lost:
            self.stored.changed.update(lost)
            self.changed.set()
