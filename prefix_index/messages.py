"""The index on the wire: MessagePack arrays of at most 64 KiB, and the check that keeps junk out.

Each begins with its kind, which has the format's version, then incarnation and seq. Whatever else
comes raises BadMessage and nothing else.
"""

from __future__ import annotations

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
