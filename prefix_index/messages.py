"""The index on the wire: MessagePack arrays of at most 64 KiB, and the check that keeps junk out.

Each begins with its kind, which has the format's version, then incarnation and seq. Whatever else
comes raises BadMessage and nothing else. An engine's journal makes them of what its cache reports:

    record ─► hashes now ─┬─► take: DELTA seq+1, seq+2, ...    what changed since the last take
                          └─► snapshot: CHUNKs, SNAPSHOT seq   all of it

Memory is bounded by the engine's pool, whoever does not listen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from ..core.request.token_ids import BlockHash, Tier

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
    """The change number `seq` of an engine's cache. An incarnation begins empty, at 0. `stored` are
    on its device now, `in_host` in its host memory alone, wherever they were before."""

    incarnation: Incarnation
    seq: Count
    removed: Hashes = ()
    stored: Hashes = ()
    in_host: Hashes = ()


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag="snapshot 2"):
    """The whole cache behind delta `seq` can be read for some seconds, in `num_chunks` pieces."""

    incarnation: Incarnation
    seq: Count
    num_chunks: Count


class SnapshotChunk(msgspec.Struct, frozen=True, array_like=True, tag="chunk 2"):
    """One piece of a snapshot, of at most MAX_HASHES, those in host memory alone apart."""

    incarnation: Incarnation
    seq: Count
    index: Count
    hashes: Hashes
    in_host: Hashes = ()

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
    """Which hashes have moved to another tier since the last `take`.

    What moved back has not: never more hashes than there were then and are now.
    """

    def __init__(self) -> None:
        self._moves: dict[BlockHash, tuple[Tier, Tier]] = {}  # from where, to where

    def __len__(self) -> int:
        return len(self._moves)

    def moved(self, block_hashes: Iterable[BlockHash], was: Tier, now: Tier) -> None:
        moves = self._moves
        for block_hash in block_hashes:
            first, _ = moves.setdefault(block_hash, (was, now))
            if first is now:
                del moves[block_hash]
            else:
                moves[block_hash] = (first, now)

    def take(self) -> list[tuple[BlockHash, Tier]]:
        """Since the last call, what is no longer anywhere first."""
        moves, self._moves = self._moves, {}
        ends = [(block_hash, now) for block_hash, (_, now) in moves.items()]
        return sorted(ends, key=itemgetter(1))


class Changes(NamedTuple):
    """Hashes by the `Tier` that they are in now."""

    removed: list[BlockHash]
    in_host: list[BlockHash]
    stored: list[BlockHash]  # on the device

    @classmethod
    def of(cls, moves: Iterable[tuple[BlockHash, Tier]]) -> Changes:
        changes = cls([], [], [])
        for block_hash, now in moves:
            changes[now].append(block_hash)
        return changes


class CacheJournal:
    """`changed` is set whenever there is something to take; whoever takes clears it."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.seq = 0  # of the last delta that was taken
        self.changed = asyncio.Event()
        self._tiers: dict[BlockHash, Tier] = {}  # of all that is somewhere
        self._unpublished = NetChanges()

    def record(
        self,
        removed: Iterable[BlockHash],
        stored: Iterable[BlockHash],
        in_host: Iterable[BlockHash] = (),
    ) -> None:
        """What the engine reports of its cache, in order. A change that is none is no error."""
        tiers = self._tiers
        for now, hashes in ((Tier.NOWHERE, removed), (Tier.HOST, in_host), (Tier.DEVICE, stored)):
            for block_hash in hashes:
                was = tiers.get(block_hash, Tier.NOWHERE)
                if was is now:
                    continue
                if now is Tier.NOWHERE:
                    del tiers[block_hash]
                else:
                    tiers[block_hash] = now
                self._unpublished.moved((block_hash,), was, now)
        if self._unpublished:
            self.changed.set()

    def take(self) -> list[Delta]:
        """Number what changed since the last call. A delta that is then lost shows as a gap."""
        moves = self._unpublished.take()
        deltas = []
        for part in _pieces(moves):
            self.seq += 1
            removed, in_host, stored = map(tuple, Changes.of(part))
            deltas.append(Delta(self.incarnation, self.seq, removed, stored, in_host))
        return deltas

    def head(self) -> Head:
        return Head(self.incarnation, self.seq)

    def snapshot(self) -> tuple[list[SnapshotChunk], Snapshot]:
        """The cache behind the deltas taken so far; take first."""
        assert not self._unpublished, "the cache is ahead of its deltas"
        chunks = []
        for index, part in enumerate(_pieces([*self._tiers.items()])):
            _, in_host, stored = map(tuple, Changes.of(part))
            chunks.append(SnapshotChunk(self.incarnation, self.seq, index, stored, in_host))
        return chunks, Snapshot(self.incarnation, self.seq, len(chunks))


def _pieces(moves: list[tuple[BlockHash, Tier]]) -> Iterator[list[tuple[BlockHash, Tier]]]:
    """Of as many as a message has."""
    for start in range(0, len(moves), MAX_HASHES):
        yield moves[start : start + MAX_HASHES]
