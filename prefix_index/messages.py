"""The index on the wire: MessagePack arrays of at most 64 KiB, and the check that keeps junk out.

Each begins with its kind, which has the format's version, then incarnation and seq. Whatever else
comes raises BadMessage and nothing else. An engine's journal makes them of what its cache reports:

    record ─► hashes now ─┬─► take: DELTA seq+1, seq+2, ...    what changed since the last take
                          └─► snapshot: CHUNKs, SNAPSHOT seq   all of it

Memory is bounded by the engine's pool, whoever does not listen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Annotated, TypeAlias

import msgspec

from ..core.request.token_ids import BlockHash

HASH_BYTES = 16
MAX_HASHES = 3600  # in one message
MAX_MESSAGE_BYTES = 64 << 10

Incarnation: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_Hash: TypeAlias = Annotated[BlockHash, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Hashes: TypeAlias = tuple[_Hash, ...]


class BadMessage(Exception):
    """This is not a message of the index; the text is why."""


class IndexAway(Exception):
    """The broker did not answer. What was to be sent or read is lost; try later."""


class Head(msgspec.Struct, frozen=True, array_like=True, tag="head 2"):
    """A sign of life: the engine has published the deltas 1 to `seq`."""

    incarnation: Incarnation
    seq: Count


class Delta(msgspec.Struct, frozen=True, array_like=True, tag="delta 2"):
    """The change number `seq` of an engine's cache. An incarnation begins empty, at 0."""

    incarnation: Incarnation
    seq: Count
    removed: Hashes = ()
    stored: Hashes = ()


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag="snapshot 2"):
    """The whole cache behind delta `seq` can be read for some seconds, in `num_chunks` pieces."""

    incarnation: Incarnation
    seq: Count
    num_chunks: Count


class SnapshotChunk(msgspec.Struct, frozen=True, array_like=True, tag="chunk 2"):
    """One piece of a snapshot, of at most MAX_HASHES."""

    incarnation: Incarnation
    seq: Count
    index: Count
    hashes: Hashes

    @property
    def place(self) -> tuple[str, int, int]:
        return self.incarnation, self.seq, self.index


Message: TypeAlias = Head | Delta | Snapshot | SnapshotChunk

_decoder = msgspec.msgpack.Decoder(Message)
encode = msgspec.msgpack.Encoder().encode


def decode(raw: bytes) -> Message:
    """The message in `raw`; raises BadMessage."""
    if len(raw) > MAX_MESSAGE_BYTES:
        raise BadMessage(f"{len(raw)} bytes")
    try:
        message: Message = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadMessage(str(error)) from error
    return message


def split_hashes(joined: bytes) -> tuple[BlockHash, ...]:
    """The hashes that lie behind each other in `joined`."""
    starts = range(0, len(joined), HASH_BYTES)
    return tuple(BlockHash(joined[start : start + HASH_BYTES]) for start in starts)


class NetChanges:
    """What changed in a set of hashes since the last `take`.

    Each hash is stored and removed in turn, so a second change takes the first one back: never more
    hashes than the set had then and has now.
    """

    def __init__(self) -> None:
        self._is_stored: dict[BlockHash, bool] = {}

    def __len__(self) -> int:
        return len(self._is_stored)

    def stored(self, block_hashes: Iterable[BlockHash]) -> None:
        self._note(block_hashes, True)

    def removed(self, block_hashes: Iterable[BlockHash]) -> None:
        self._note(block_hashes, False)

    def _note(self, block_hashes: Iterable[BlockHash], is_stored: bool) -> None:
        changes = self._is_stored
        for block_hash in block_hashes:
            if changes.setdefault(block_hash, is_stored) is not is_stored:
                del changes[block_hash]

    def take(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """(removed, stored) since the last call."""
        changes, self._is_stored = self._is_stored, {}
        removed = [h for h, is_stored in changes.items() if not is_stored]
        return removed, [h for h, is_stored in changes.items() if is_stored]


class CacheJournal:
    """`changed` is set whenever there is something to take; whoever takes clears it."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.seq = 0  # of the last delta that was taken
        self.changed = asyncio.Event()
        self._hashes: set[BlockHash] = set()
        self._unpublished = NetChanges()

    def record(self, removed: Iterable[BlockHash], stored: Iterable[BlockHash]) -> None:
        """What the engine reports of its cache, in order. A change that is none is no error."""
        hashes = self._hashes
        gone = [each for each in removed if each in hashes]
        hashes.difference_update(gone)
        self._unpublished.removed(gone)
        new = [each for each in stored if each not in hashes]
        hashes.update(new)
        self._unpublished.stored(new)
        if self._unpublished:
            self.changed.set()

    def take(self) -> list[Delta]:
        """Number what changed since the last call. A delta that is then lost shows as a gap."""
        removed, stored = self._unpublished.take()
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
        """The cache behind the deltas taken so far; take first."""
        assert not self._unpublished, "the cache is ahead of its deltas"
        hashes = list(self._hashes)
        chunks = [
            SnapshotChunk(self.incarnation, self.seq, index, tuple(hashes[start:][:MAX_HASHES]))
            for index, start in enumerate(range(0, len(hashes), MAX_HASHES))
        ]
        return chunks, Snapshot(self.incarnation, self.seq, len(chunks))
