"""The messages of the index: MessagePack of at most 64 KiB, checked when they are decoded.

Each begins with its kind, which contains the version of the format, then incarnation and seq. Any
other bytes raise BadMessage and nothing else. The sum of an engine's deltas is in pages.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from ..core.membership import HexId
from ..core.request.token_ids import HASH_BYTES, BlockHash, Tier

MAX_HASHES = 3600  # per message
MAX_MESSAGE_BYTES = 64 << 10

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_Hash: TypeAlias = Annotated[BlockHash, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Hashes: TypeAlias = tuple[_Hash, ...]


class BadMessage(Exception):
    """The bytes are no message of the index; the text is the reason."""


class Head(msgspec.Struct, frozen=True, array_like=True, tag="head 2"):
    """The engine lives, and has published the deltas 1 to `seq`."""

    incarnation: HexId
    seq: Count


class Delta(msgspec.Struct, frozen=True, array_like=True, tag="delta 2"):
    """The change number `seq` of an engine's cache. An incarnation starts empty, at 0. `stored` are
    on its device now, `in_host` in its host memory only, wherever they were before."""

    incarnation: HexId
    seq: Count
    removed: Hashes = ()
    stored: Hashes = ()
    in_host: Hashes = ()


Message: TypeAlias = Head | Delta

_decoder = msgspec.msgpack.Decoder(Message)
encode = msgspec.msgpack.Encoder().encode


def decode(raw: bytes) -> Message:
    """Raises BadMessage."""
    if len(raw) > MAX_MESSAGE_BYTES:
        raise BadMessage(f"{len(raw)} bytes")
    try:
        message: Message = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(str(error)) from error
    return message


def split_hashes(joined: bytes) -> tuple[BlockHash, ...]:
    """Split concatenated hashes."""
    starts = range(0, len(joined), HASH_BYTES)
    return tuple(BlockHash(joined[start : start + HASH_BYTES]) for start in starts)


class Changes(NamedTuple):
    """Hashes by the `Tier` that they are in now."""

    removed: Sequence[BlockHash]
    in_host: Sequence[BlockHash]
    stored: Sequence[BlockHash]  # on the device

    def pieces(self) -> Iterator[Changes]:
        """Split into parts of at most MAX_HASHES, removals first."""
        begins = [0, len(self.removed), len(self.removed) + len(self.in_host)]
        for start in range(0, begins[-1] + len(self.stored), MAX_HASHES):
            cuts = (
                slice(max(0, start - begin), max(0, start + MAX_HASHES - begin)) for begin in begins
            )
            yield Changes._make(part[cut] for part, cut in zip(self, cuts, strict=True))


class NetChanges:
    """The hashes that have moved to another tier since the last `take`.

    Those that moved back are left out, so there are never more than were cached then or are now.
    """

    def __init__(self) -> None:
        # By the tier that they are in now: the tier they were in. A step moves hundreds: no Python
        # loop over them.
        self._moves: tuple[dict[BlockHash, Tier], ...] = tuple({} for _ in Tier)

    def __len__(self) -> int:
        return sum(map(len, self._moves))

    def moved(self, block_hashes: Collection[BlockHash], was: Tier, now: Tier) -> None:
        if all(moves.keys().isdisjoint(block_hashes) for moves in self._moves if moves):
            self._moves[now].update(dict.fromkeys(block_hashes, was))
            return
        for block_hash in block_hashes:
            first = self._moves[was].pop(block_hash, was)
            if first is not now:
                self._moves[now][block_hash] = first

    def take(self) -> Changes:
        """The moves since the last call."""
        moves, self._moves = self._moves, tuple({} for _ in Tier)
        return Changes._make(map(list, moves))
