"""What rank 0 orders the other ranks to do about pools, as bytes. Both ends are of one engine.

open     JSON: [[pool, the fields of its piece, those of its remote or null], ...]
pull     | window: uint64 | source ids: int64 [n] | ours: int64 [n] | generations: uint64 [n] |
cancel   | the pull's order: uint64 |
close    | window: uint64 |                      a window's number is that of the order to open it
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.errors import HandoffFailed
from ..window.block_pairs import BlockPairs
from ..window.head_ranges import HeadPiece
from ..window.network_address import RemotePool
from .joined import SourcePiece

_NUMBER = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Opened:
    """What a rank answers: its window stands, or `error` says why not."""

    error: str = ""
    gbytes_per_s: float = 0.0

    def pack(self) -> bytes:
        return json.dumps([self.error, self.gbytes_per_s]).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> Opened:
        error, gbytes_per_s = json.loads(packed)
        return cls(error, gbytes_per_s)

    def require(self, rank: int) -> None:
        """Raises HandoffFailed if the window does not stand."""
        if self.error:
            raise HandoffFailed(f"rank {rank}: {self.error}")


def pack_open(pieces: Sequence[SourcePiece]) -> bytes:
    def fields_of(remote: RemotePool | None) -> list[str | int | bool] | None:
        if remote is None:
            return None
        key = remote.key.hex()
        return [remote.host, remote.port, key, remote.is_elsewhere, remote.puller]

    told = [[p.pool, dataclasses.astuple(p.piece), fields_of(p.remote)] for p in pieces]
    return json.dumps(told).encode()


def unpack_open(packed: memoryview) -> list[SourcePiece]:
    pieces = []
    for pool, fields, reached in json.loads(bytes(packed)):
        remote = None
        if reached is not None:
            host, port, key, is_elsewhere, puller = reached
            remote = RemotePool(host, port, bytes.fromhex(key), is_elsewhere, puller)
        pieces.append(SourcePiece(pool, HeadPiece(*fields), remote))
    return pieces


def pack_number(number: int) -> bytes:
    return _NUMBER.pack(number)


def unpack_number(packed: memoryview) -> int:
    number: int = _NUMBER.unpack_from(packed)[0]
    return number


def pack_pull(window: int, pairs: BlockPairs) -> bytes:
    return b"".join((_NUMBER.pack(window), pairs.ids.tobytes(), pairs.generations.tobytes()))


def unpack_pull(packed: memoryview) -> tuple[int, BlockPairs]:
    """The window and the pairs, which lie in a copy of their own."""
    rows = np.frombuffer(packed[_NUMBER.size :], np.int64).reshape(3, -1).copy()
    return unpack_number(packed), BlockPairs(rows[:2], rows[2].view(np.uint64))
