"""The index on the wire: binary messages of at most 64 KiB, and the check that keeps junk out.

    every message   "BPX1" | kind: u8 | incarnation: 16 bytes | seq: u64     little-endian
    HEAD            nothing more: "I have published `seq` deltas"
    DELTA           num_removed: u32 | num_stored: u32 | 16-byte hashes, the removed ones first
    SNAPSHOT        num_chunks: u32: "my cache behind delta `seq` lies in as many keys"
    CHUNK           index: u32 | 16-byte hashes: what one of those keys holds

Whatever else comes raises BadMessage and nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..core.request.token_ids import BlockHash

HASH_BYTES = 16
MAX_HASHES = 4000  # in one message
MAX_MESSAGE_BYTES = 64 << 10

_HEADER = struct.Struct("<4sB16sQ")
_MAGIC = b"BPX1"
_HEAD, _DELTA, _SNAPSHOT, _CHUNK = 1, 2, 3, 4
_TWO_COUNTS = struct.Struct("<II")
_COUNT = struct.Struct("<I")


class BadMessage(Exception):
    """This is not a message of the index; the text says why."""


@dataclass(frozen=True, slots=True)
class Head:
    """A sign of life: the engine has published the deltas 1 to `seq`."""

    incarnation: str
    seq: int


@dataclass(frozen=True, slots=True)
class Delta:
    """The change number `seq` of an engine's cache. An incarnation begins empty, at 0."""

    incarnation: str
    seq: int
    removed: tuple[BlockHash, ...] = ()
    stored: tuple[BlockHash, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole cache behind delta `seq` can be read for some seconds, in `num_chunks` pieces."""

    incarnation: str
    seq: int
    num_chunks: int


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """One piece of a snapshot."""

    incarnation: str
    seq: int
    index: int
    hashes: tuple[BlockHash, ...]


Message = Head | Delta | Snapshot | SnapshotChunk


def encode(message: Message) -> bytes:
    """The bytes of a message. Its incarnation has 32 hex digits."""
    match message:
        case Head():
            kind, body = _HEAD, b""
        case Delta(_, _, removed, stored):
            assert len(removed) + len(stored) <= MAX_HASHES
            kind = _DELTA
            body = _TWO_COUNTS.pack(len(removed), len(stored)) + join_hashes((*removed, *stored))
        case Snapshot(_, _, num_chunks):
            kind, body = _SNAPSHOT, _COUNT.pack(num_chunks)
        case SnapshotChunk(_, _, index, hashes):
            assert len(hashes) <= MAX_HASHES
            kind, body = _CHUNK, _COUNT.pack(index) + join_hashes(hashes)
    incarnation = bytes.fromhex(message.incarnation)
    return _HEADER.pack(_MAGIC, kind, incarnation, message.seq) + body


def decode(raw: bytes) -> Message:
    """The message in `raw`; raises BadMessage."""
    if not _HEADER.size <= len(raw) <= MAX_MESSAGE_BYTES:
        raise BadMessage(f"{len(raw)} bytes")
    magic, kind, incarnation_bytes, seq = _HEADER.unpack_from(raw)
    if magic != _MAGIC:
        raise BadMessage("not of this index, or of another version")
    incarnation, body = incarnation_bytes.hex(), raw[_HEADER.size :]
    try:
        return _decode_body(kind, incarnation, seq, body)
    except struct.error as error:
        raise BadMessage("cut short") from error


def _decode_body(kind: int, incarnation: str, seq: int, body: bytes) -> Message:
    if kind == _HEAD:
        if body:
            raise BadMessage("a head with a body")
        return Head(incarnation, seq)
    if kind == _DELTA:
        num_removed, num_stored = _TWO_COUNTS.unpack_from(body)
        hashes = split_hashes(body[_TWO_COUNTS.size :])
        if len(hashes) != num_removed + num_stored:
            raise BadMessage("counts and hashes disagree")
        return Delta(incarnation, seq, hashes[:num_removed], hashes[num_removed:])
    if kind == _SNAPSHOT:
        return Snapshot(incarnation, seq, *_COUNT.unpack(body))
    if kind == _CHUNK:
        index = _COUNT.unpack_from(body)[0]
        return SnapshotChunk(incarnation, seq, index, split_hashes(body[_COUNT.size :]))
    raise BadMessage(f"kind {kind}")


def join_hashes(hashes: Iterable[BlockHash]) -> bytes:
    """The hashes behind each other."""
    return b"".join(hashes)


def split_hashes(joined: bytes) -> tuple[BlockHash, ...]:
    """The hashes that lie behind each other in `joined`; raises BadMessage on a broken one."""
    if len(joined) % HASH_BYTES:
        raise BadMessage("a hash is cut short")
    return tuple(
        BlockHash(joined[start : start + HASH_BYTES]) for start in range(0, len(joined), HASH_BYTES)
    )


def pieces(hashes: Sequence[BlockHash]) -> list[Sequence[BlockHash]]:
    """`hashes` cut to what a message may hold."""
    return [hashes[i : i + MAX_HASHES] for i in range(0, len(hashes), MAX_HASHES)]
