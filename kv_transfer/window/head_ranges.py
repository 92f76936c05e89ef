"""Which KV heads and layers a rank pulls from which rank of a source that is cut otherwise: pure
arithmetic.

    source, 4 ranks   | 0 1 | 2 3 | 4 5 | 6 7 |      a block of one rank's pool holds its KV heads
    puller, 2 ranks   |  0 1 2 3  |  4 5 6 7  |      alone: a head range is a piece of each row

    row = one layer's K or V of a block:  [ head | head | ... ], head = that of block_size tokens

A stage of a pipeline has the rows of its layers: what it pulls from another is some of the rows
there, for some of the rows here. KV heads that are fewer than ranks lie on several: each puller
reads one of the replicas, another than its neighbours do. Knows no pool and no transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ...core.errors import FingerprintMismatch


class HeadRange(Protocol):
    """KV heads [first_kv_head, first_kv_head + num_kv_heads) of a model, in one rank's pool.

    `layers`: (the first, how many); None: all."""

    @property
    def first_kv_head(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def layers(self) -> tuple[int, int] | None: ...


@dataclass(frozen=True, slots=True)
class LayerPiece:
    """`num_layers` layers from `source_layer` on of the `source_layers` in the source's pool, which
    go to those from `my_layer` on of ours."""

    source_layer: int
    my_layer: int
    num_layers: int
    source_layers: int
    my_layers: int

    @property
    def is_whole(self) -> bool:
        return self.num_layers == self.source_layers == self.my_layers


@dataclass(frozen=True, slots=True)
class HeadPiece:
    """`num_heads` heads of each row, from one source rank's pool to ours.

    They begin with head `source_head` of the `source_heads` there, and go to those from `my_head`
    on of the `my_heads` here. `layers`: whose rows; None: a block has the same rows at both ends.
    """

    source_rank: int
    source_head: int
    my_head: int
    num_heads: int
    source_heads: int
    my_heads: int
    layers: LayerPiece | None = None

    @property
    def is_whole(self) -> bool:
        """Whether a block there is a block here."""
        has_all_layers = self.layers is None or self.layers.is_whole
        return has_all_layers and self.num_heads == self.source_heads == self.my_heads


def pieces_of(sources: Sequence[HeadRange], mine: HeadRange, my_rank: int) -> list[HeadPiece]:
    """What rank `my_rank`, with the heads and layers of `mine`, pulls: all of them, each once.

    Raises FingerprintMismatch if one lies on no rank of the source.
    """
    ranks = list(range(len(sources)))
    if mine.layers is None:
        return _pieces_of_heads(sources, ranks, mine, my_rank)
    pieces: list[HeadPiece] = []
    first, num_layers = mine.layers
    layer = first
    while layer < first + num_layers:
        ends = {rank: end for rank in ranks if (end := _end_behind(sources[rank], layer))}
        if not ends:
            raise FingerprintMismatch(f"pipeline parallelism: no rank there has layer {layer}")
        end = min(first + num_layers, *ends.values())
        for piece in _pieces_of_heads(sources, list(ends), mine, my_rank):
            there, count = sources[piece.source_rank].layers or (0, 0)
            layers = LayerPiece(layer - there, layer - first, end - layer, count, num_layers)
            pieces.append(replace(piece, layers=layers))
        layer = end
    return pieces


def _end_behind(source: HeadRange, layer: int) -> int | None:
    """Where the source's layers end, if it has this one."""
    assert source.layers is not None, "a side that names layers, and one that does not"
    first, count = source.layers
    return first + count if first <= layer < first + count else None


def _pieces_of_heads(
    sources: Sequence[HeadRange], ranks: Sequence[int], mine: HeadRange, my_rank: int
) -> list[HeadPiece]:
    """All heads of `mine`, each from one of these ranks of the source."""
    pieces = []
    head, end = mine.first_kv_head, mine.first_kv_head + mine.num_kv_heads
    while head < end:
        replicas = _holders(sources, ranks, head)
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


def _holders(sources: Sequence[HeadRange], ranks: Sequence[int], head: int) -> list[int]:
    """Those of the ranks that hold `head`; if some hold more of what follows, those alone."""
    ends = {
        rank: end
        for rank in ranks
        if sources[rank].first_kv_head
        <= head
        < (end := sources[rank].first_kv_head + sources[rank].num_kv_heads)
    }
    if not ends:
        raise FingerprintMismatch(f"tensor parallelism: no rank there has KV head {head}")
    return [rank for rank, end in ends.items() if end == max(ends.values())]


@dataclass(frozen=True, slots=True)
class BlockCut:
    """A piece of each block in bytes: `num_rows` rows, `width` bytes of each.

    The first lies `source_offset` into a block of `source_block_bytes` there, and goes `offset`
    into one of `block_bytes` here; the others follow `source_pitch` and `pitch` bytes apart. A row
    is never wider than either, and begins in one as the first does.
    """

    num_rows: int
    width: int
    source_pitch: int
    source_offset: int
    pitch: int
    offset: int
    source_block_bytes: int
    block_bytes: int

    @classmethod
    def of(cls, piece: HeadPiece | None, num_rows: int, block_bytes: int) -> BlockCut:
        """Of blocks that have `block_bytes` and `num_rows` rows here; None is all of a block."""
        if piece is None or piece.is_whole:
            return cls.whole(block_bytes)
        head_bytes, rest = divmod(block_bytes, num_rows * piece.my_heads)
        assert not rest, "a block that does not consist of its rows' heads"
        pitch, source_pitch = piece.my_heads * head_bytes, piece.source_heads * head_bytes
        width = piece.num_heads * head_bytes
        offset, source_offset = piece.my_head * head_bytes, piece.source_head * head_bytes
        source_block_bytes = num_rows * source_pitch
        if (layers := piece.layers) is not None:
            num_rows, source_block_bytes = 2 * layers.num_layers, 2 * layers.source_layers
            source_block_bytes *= source_pitch
            offset += 2 * layers.my_layer * pitch
            source_offset += 2 * layers.source_layer * source_pitch
        if width == pitch == source_pitch:  # one row behind the other at both ends
            num_rows, width = 1, num_rows * width
            pitch, source_pitch = block_bytes, source_block_bytes
        ends = (source_block_bytes, block_bytes)
        return cls(num_rows, width, source_pitch, source_offset, pitch, offset, *ends)

    @classmethod
    def whole(cls, block_bytes: int) -> BlockCut:
        """All of a block, as one row."""
        size = block_bytes
        return cls(1, size, size, 0, size, 0, size, size)

    @property
    def is_whole(self) -> bool:
        return self.width == self.source_block_bytes == self.block_bytes

    @property
    def piece_bytes(self) -> int:
        """What is copied of one block."""
        return self.num_rows * self.width

    def of_source(self, block: bytes) -> bytes:
        """The piece of a source's block, row behind row."""
        return self._rows(block, self.source_offset, self.source_pitch)

    def of_mine(self, block: bytes) -> bytes:
        """The same of a block here."""
        return self._rows(block, self.offset, self.pitch)

    def _rows(self, block: bytes, offset: int, pitch: int) -> bytes:
        starts = range(offset, offset + self.num_rows * pitch, pitch)
        return b"".join(block[start : start + self.width] for start in starts)
