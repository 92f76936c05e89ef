"""One engine's cache as its publisher knows it: the hashes, and which deltas tell of them.

    record ─► hashes now ─┬─► take: DELTA seq+1, seq+2, ...    what changed since the last take
                          └─► snapshot: CHUNKs, SNAPSHOT seq   all of it

Pure state: no time, no network. Memory is bounded by the engine's pool, whoever does not listen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from ..core.request.token_ids import BlockHash
from .messages import MAX_HASHES, Delta, Head, Snapshot, SnapshotChunk, pieces
from .net_changes import NetChanges


class CacheJournal:
    """`changed` is set whenever there is something to take; whoever takes clears it."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.seq = 0  # of the last delta that was taken
        self.changed = asyncio.Event()
        self._hashes: set[BlockHash] = set()
        self._untold = NetChanges()

    def record(self, removed: Iterable[BlockHash], stored: Iterable[BlockHash]) -> None:
        """What the engine says of its cache, in order. A change that is none is no error."""
        hashes = self._hashes
        gone = [each for each in removed if each in hashes]
        hashes.difference_update(gone)
        self._untold.removed(gone)
        new = [each for each in stored if each not in hashes]
        hashes.update(new)
        self._untold.stored(new)
        if self._untold:
            self.changed.set()

    def take(self) -> list[Delta]:
        """Number what changed since the last call. A delta that is then lost shows as a gap."""
        removed, stored = self._untold.take()
        deltas = []
        for start in range(0, len(removed) + len(stored), MAX_HASHES):
            end = start + MAX_HASHES
            some_stored = stored[max(0, start - len(removed)) : max(0, end - len(removed))]
            self.seq += 1
            deltas.append(
                Delta(self.incarnation, self.seq, tuple(removed[start:end]), tuple(some_stored))
            )
        return deltas

    def head(self) -> Head:
        return Head(self.incarnation, self.seq)

    def snapshot(self) -> tuple[list[SnapshotChunk], Snapshot]:
        """The cache behind the deltas taken so far; take first, so that nothing is untold."""
        assert not self._untold, "the cache is ahead of its deltas"
        chunks = [
            SnapshotChunk(self.incarnation, self.seq, index, tuple(piece))
            for index, piece in enumerate(pieces(list(self._hashes)))
        ]
        return chunks, Snapshot(self.incarnation, self.seq, len(chunks))
