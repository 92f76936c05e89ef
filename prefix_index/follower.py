"""Keeps a gateway's mirror up to date: feeds it messages, asks for snapshots and reads them.

One message at a time, in order: while a snapshot is read, the deltas behind it wait in the
subscription, so that they fit. Never ends by what others write or by the loss of Redis.
"""

from __future__ import annotations

from contextlib import aclosing

from ..core.request.token_ids import BlockHash
from .link import FollowerLink, IndexAway
from .messages import BadMessage, Snapshot, SnapshotChunk, decode
from .mirror import AskSnapshot, PrefixMirror, ReadSnapshot


class Follower:
    """`run` follows until cancelled."""

    def __init__(self, link: FollowerLink, mirror: PrefixMirror) -> None:
        self._link = link
        self._mirror = mirror

    async def run(self) -> None:
        async with aclosing(self._link.messages()) as messages:
            async for raw in messages:
                await self.take(raw)

    async def take(self, raw: bytes) -> None:
        """One message, and what follows from it. What fails is made up for by the next head."""
        try:
            match self._mirror.take(raw):
                case AskSnapshot(incarnation):
                    await self._link.ask(incarnation)
                case ReadSnapshot(snapshot):
                    hashes = await self._read(snapshot)
                    if hashes is not None:
                        self._mirror.install(snapshot, hashes)
        except IndexAway:
            return

    async def _read(self, snapshot: Snapshot) -> set[BlockHash] | None:
        """The snapshot's hashes; None if a chunk is gone or is not what it should be."""
        hashes: set[BlockHash] = set()
        for index in range(snapshot.num_chunks):
            raw = await self._link.read_chunk(snapshot.incarnation, index)
            try:
                chunk = decode(raw)
            except BadMessage:
                return None
            if not isinstance(chunk, SnapshotChunk) or (
                (chunk.incarnation, chunk.seq, chunk.index)
                != (snapshot.incarnation, snapshot.seq, index)
            ):
                return None
            hashes.update(chunk.hashes)
        return hashes
