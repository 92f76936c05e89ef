"""Which KV heads a rank pulls from which rank of a source that is cut otherwise: pure arithmetic.

    source, 4 ranks   | 0 1 | 2 3 | 4 5 | 6 7 |      a block of one rank's pool holds its KV heads
    puller, 2 ranks   |  0 1 2 3  |  4 5 6 7  |      alone: a head range is a piece of each row

    row = one layer's K or V of a block:  [ head | head | ... ], head = that of block_size tokens

KV heads that are fewer than ranks lie on several: each puller reads one of the replicas, another
than its neighbours do. Knows no pool and no transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...core.errors import FingerprintMismatch


class HeadRange(Protocol):
    """KV heads [first_kv_head, first_kv_head + num_kv_heads) of a model, in one rank's pool."""

    @property
    def first_kv_head(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...


@dataclass(frozen=True, slots=True)
class HeadPiece:
    """`num_heads` heads of each row, from one source rank's pool to ours.

    They begin with head `source_head` of the `source_heads` there, and go to those from `my_head`
    on of the `my_heads` here.
    """

    source_rank: int
    source_head: int
    my_head: int
    num_heads: int
    source_heads: int
    my_heads: int

    @property
    def is_whole(self) -> bool:
        """Whether a block there is a block here."""
        return self.num_heads == self.source_heads == self.my_heads


def pieces_of(sources: Sequence[HeadRange], mine: HeadRange, my_rank: int) -> list[HeadPiece]:
    """What rank `my_rank`, with the heads `mine`, pulls: all of its heads, each once.

    Raises FingerprintMismatch if a head lies on no rank of the source.
    """
    pieces = []
    head, end = mine.first_kv_head, mine.first_kv_head + mine.num_kv_heads
    while head < end:
        replicas = _holders(sources, head)
        rank = replicas[my_rank % len(replicas)]
        there = sources[rank]
        source_head = head - there.first_kv_head
        num_heads = min(there.num_kv_heads - source_head, end - head)
        my_head = head - mine.first_kv_head
        pieces.append(
            HeadPiece(rank, source_head, my_head, num_heads, there.num_kv_heads, mine.num_kv_heads)
        )
        head += num_heads
    return pieces


def _holders(sources: Sequence[HeadRange], head: int) -> list[int]:
    """The ranks that hold `head`; if some hold more of what follows, those alone."""
    ends = {
        rank: each.first_kv_head + each.num_kv_heads
        for rank, each in enumerate(sources)
        if each.first_kv_head <= head < each.first_kv_head + each.num_kv_heads
    }
    if not ends:
        raise FingerprintMismatch(f"tensor parallelism: no rank there has KV head {head}")
    return [rank for rank, end in ends.items() if end == max(ends.values())]


@dataclass(frozen=True, slots=True)
class BlockCut:
    """A piece in bytes: of each of a block's `num_rows` rows, `width` bytes.

    They lie `source_offset` into a row of `source_pitch` bytes there, and go `offset` into one of
    `pitch` bytes here.
    """

    num_rows: int
    width: int
    source_pitch: int
    source_offset: int
    pitch: int
    offset: int

    @classmethod
    def of(cls, piece: HeadPiece | None, num_rows: int, block_bytes: int) -> BlockCut:
        """Of blocks that have `block_bytes` here; None is all of a block, as one row."""
        if piece is None or piece.is_whole:
            return cls(1, block_bytes, block_bytes, 0, block_bytes, 0)
        head_bytes, rest = divmod(block_bytes, num_rows * piece.my_heads)
        assert not rest, "a block that does not consist of its rows' heads"
        return cls(
            num_rows,
            piece.num_heads * head_bytes,
            piece.source_heads * head_bytes,
            piece.source_head * head_bytes,
            piece.my_heads * head_bytes,
            piece.my_head * head_bytes,
        )

    @property
    def is_whole(self) -> bool:
        return self.width == self.source_pitch == self.pitch

    @property
    def source_block_bytes(self) -> int:
        return self.num_rows * self.source_pitch

    @property
    def piece_bytes(self) -> int:
        """What is copied of one block."""
        return self.num_rows * self.width

    def of_source(self, block: bytes) -> bytes:
        """The piece of a source's block, row behind row."""
        begin, end = self.source_offset, self.source_offset + self.width
        starts = range(0, self.source_block_bytes, self.source_pitch)
        return b"".join(block[start + begin : start + end] for start in starts)
