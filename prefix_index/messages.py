"""The index on its channel: MessagePack of at most 64 KiB, and the check that keeps junk out.

Each begins with its kind, which has the format's version, then incarnation and seq. Whatever else
comes raises BadMessage and nothing else. What all of an engine's deltas add up to is in pages.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from ..core.membership import HexId
from ..core.request.token_ids import HASH_BYTES, BlockHash, Tier

MAX_HASHES = 3600  # in one message
MAX_MESSAGE_BYTES = 64 << 10

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_Hash: TypeAlias = Annotated[BlockHash, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Hashes: TypeAlias = tuple[_Hash, ...]


class BadMessage(Exception):
    """This is not a message of the index; the text is why."""


class Head(msgspec.Struct, frozen=True, array_like=True, tag="head 2"):
    """A sign of life: the engine has published the deltas 1 to `seq`."""

    incarnation: HexId
    seq: Count


class Delta(msgspec.Struct, frozen=True, array_like=True, tag="delta 2"):
    """The change number `seq` of an engine's cache. An incarnation begins empty, at 0. `stored` are
    on its device now, `in_host` in its host memory alone, wherever they were before."""

    incarnation: HexId
    seq: Count
    removed: Hashes = ()
    stored: Hashes = ()
    in_host: Hashes = ()


Message: TypeAlias = Head | Delta

_decoder = msgspec.msgpack.Decoder(Message)
encode = msgspec.msgpack.Encoder().encode


def decode(raw: bytes) -> Message:
    """The message in `raw`; raises BadMessage."""
    if len(raw) > MAX_MESSAGE_BYTES:
        raise BadMessage(f"{len(raw)} bytes")
    try:
        message: Message = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(str(error)) from error
    return message


def split_hashes(joined: bytes) -> tuple[BlockHash, ...]:
    """The hashes that lie behind each other in `joined`."""
    starts = range(0, len(joined), HASH_BYTES)
    return tuple(BlockHash(joined[start : start + HASH_BYTES]) for start in starts)


class Changes(NamedTuple):
    """Hashes by the `Tier` that they are in now."""

    removed: Sequence[BlockHash]
    in_host: Sequence[BlockHash]
    stored: Sequence[BlockHash]  # on the device

    def pieces(self) -> Iterator[Changes]:
        """Of as many as a message has, what is no longer anywhere first."""
        begins = [0, len(self.removed), len(self.removed) + len(self.in_host)]
        for start in range(0, begins[-1] + len(self.stored), MAX_HASHES):
            cuts = (
                slice(max(0, start - begin), max(0, start + MAX_HASHES - begin)) for begin in begins
            )
            yield Changes._make(part[cut] for part, cut in zip(self, cuts, strict=True))


class NetChanges:
    """Which hashes have moved to another tier since the last `take`.

    What moved back has not: never more hashes than there were then and are now.
    """

    def __init__(self) -> None:
        # By where they are now: where they were. A step moves hundreds: no loop of ours over them.
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
        """Since the last call."""
        moves, self._moves = self._moves, tuple({} for _ in Tier)
        return Changes._make(map(list, moves))
