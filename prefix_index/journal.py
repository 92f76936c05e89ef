"""What one engine reports of its cache, until it is in Redis.

    record ─► hashes now ─┬─► take: DELTA seq+1, seq+2, ...    what changed since the last take
                          └─► stored: pages that changed       all of it, as it lies in Redis

Memory is bounded by the engine's cache, however long Redis is away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from ..core.request.token_ids import BlockHash, Tier
from .messages import Delta, Head, NetChanges
from .pages import Contents, StoredBlocks


class CacheJournal:
    """`changed` is set whenever there is something to take; whoever takes clears it."""

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
        """What the engine reports of its cache, in order. A change that is none is no error."""
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
        """Number what changed since the last call. A delta that is then lost shows as a gap."""
        deltas = []
        for part in self._unpublished.take().pieces():
            self.seq += 1
            removed, in_host, stored = map(tuple, part)
            deltas.append(Delta(self.incarnation, self.seq, removed, stored, in_host))
        return deltas

    def head(self) -> Head:
        return Head(self.incarnation, self.seq)

    def contents(self, unix_s: int) -> Contents:
        """Of the pages behind the deltas taken so far."""
        blocks = self.stored
        on_device, in_host = blocks.count(Tier.DEVICE), blocks.count(Tier.HOST)
        return Contents(self.incarnation, self.seq, blocks.num_pages, on_device, in_host, unix_s)

    def lost_pages(self, pages: Collection[int] | None = None) -> None:
        """Redis does not have these pages, or, if they are not given, may have none."""
        lost = range(self.stored.num_pages) if pages is None else pages
        if lost:
            self.stored.changed.update(lost)
            self.changed.set()
