"""Which KV heads and layers a rank pulls from which rank of a source with another parallelism: pure
arithmetic.

    source, 4 ranks   | 0 1 | 2 3 | 4 5 | 6 7 |      a block of one rank's pool holds its KV heads
    puller, 2 ranks   |  0 1 2 3  |  4 5 6 7  |      alone: some heads are a piece of each row

    row = one layer's K or V of a block:  [ head | head | ... ], head = that of block_size tokens

A pipeline stage has the rows of its layers: a rank copies some rows of a source's stage to some of
its own. If there are fewer KV heads than ranks, several ranks hold each head; neighbouring ranks
read different replicas. Knows no pool and no transport.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ...core.errors import FingerprintMismatch, HandoffFailed
from ...engine.kv.kv_memory import canary_bytes

# [blocks, rows, words]
Rows: TypeAlias = npt.NDArray[np.uint64] | npt.NDArray[np.uint8]
Memory: TypeAlias = bytes | bytearray | memoryview | mmap
Range: TypeAlias = tuple[int, int]  # the first, how many


class Shard(Protocol):
    """The part of a model's KV that lies in one rank's pool."""

    @property
    def heads(self) -> Range: ...

    @property
    def layers(self) -> Range: ...


@dataclass(frozen=True, slots=True)
class Span:
    """`count` consecutive heads or layers: they begin at `there` of the `num_there` in the source's
    pool, and at `here` of the `num_here` in the local pool."""

    there: int
    here: int
    count: int
    num_there: int
    num_here: int

    @property
    def is_whole(self) -> bool:
        return self.count == self.num_there == self.num_here


@dataclass(frozen=True, slots=True)
class BlockPiece:
    """The part that is pulled of each block of one source rank's pool."""

    source_rank: int
    heads: Span
    layers: Span

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole block in both pools."""
        return self.heads.is_whole and self.layers.is_whole


def pieces_of(sources: Sequence[Shard], mine: Shard, my_rank: int) -> list[BlockPiece]:
    """The pieces that rank `my_rank` pulls: each head of each layer in `mine` once.

    Raises FingerprintMismatch if no rank of the source has one.
    """
    pieces = []
    layers_there = {rank: source.layers for rank, source in enumerate(sources)}
    for ranks, layers in _runs(mine.layers, layers_there, "pipeline", "layer"):
        heads_there = {rank: sources[rank].heads for rank in ranks}
        for replicas, heads in _runs(mine.heads, heads_there, "tensor", "KV head"):
            rank = replicas[my_rank % len(replicas)]
            of_heads = _span(heads, sources[rank].heads, mine.heads)
            of_layers = _span(layers, sources[rank].layers, mine.layers)
            pieces.append(BlockPiece(rank, of_heads, of_layers))
    return pieces


def _runs(
    mine: Range, theirs: Mapping[int, Range], kind: str, what: str
) -> Iterator[tuple[list[int], Range]]:
    """Split `mine` into runs, each with the source's ranks that hold the longest part of it."""
    at, end = mine[0], sum(mine)
    while at < end:
        ends = {rank: sum(held) for rank, held in theirs.items() if held[0] <= at < sum(held)}
        if not ends:
            raise FingerprintMismatch(f"{kind} parallelism: no rank there has {what} {at}")
        furthest = max(ends.values())
        until = min(end, furthest)
        yield [rank for rank in ends if ends[rank] == furthest], (at, until - at)
        at = until


def _span(run: Range, there: Range, mine: Range) -> Span:
    first, count = run
    return Span(first - there[0], first - mine[0], count, there[1], mine[1])


@dataclass(frozen=True, slots=True)
class BlockCut:
    """A piece of each block in bytes: `num_rows` rows of `width` bytes.

    The first row begins at `source_offset` in the source's block of `source_block_bytes`, and at
    `offset` in the local block of `block_bytes`; the next rows follow at distances of
    `source_pitch` and `pitch` bytes. No row crosses a multiple of its pitch.
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
    def of(cls, piece: BlockPiece | None, block_bytes: int) -> BlockCut:
        """Of local blocks of `block_bytes`; `piece` None: whole blocks."""
        if piece is None or piece.is_whole:
            size = block_bytes
            return cls(1, size, size, 0, size, 0, size, size)  # as one row
        heads, layers = piece.heads, piece.layers
        head_bytes, rest = divmod(block_bytes, 2 * layers.num_here * heads.num_here)
        assert not rest, "a block that does not consist of its rows' heads"
        pitch, source_pitch = heads.num_here * head_bytes, heads.num_there * head_bytes
        offset = 2 * layers.here * pitch + heads.here * head_bytes
        source_offset = 2 * layers.there * source_pitch + heads.there * head_bytes
        source_block_bytes = 2 * layers.num_there * source_pitch
        num_rows, width = 2 * layers.count, heads.count * head_bytes
        if width == pitch == source_pitch:  # contiguous in both blocks
            num_rows, width = 1, num_rows * width
            pitch, source_pitch = block_bytes, source_block_bytes
        ends = (source_block_bytes, block_bytes)
        return cls(num_rows, width, source_pitch, source_offset, pitch, offset, *ends)

    @property
    def is_whole(self) -> bool:
        return self.width == self.source_block_bytes == self.block_bytes

    @property
    def piece_bytes(self) -> int:
        """Bytes copied of each block."""
        return self.num_rows * self.width

    def there(self, memory: Memory, num_blocks: int = 1) -> Rows:
        """The piece of each block in the source's memory."""
        return self._rows(memory, num_blocks, self.source_pitch, self.source_offset)

    def here(self, memory: Memory, num_blocks: int = 1) -> Rows:
        """The piece of each block in local memory."""
        return self._rows(memory, num_blocks, self.pitch, self.offset)

    def _rows(self, memory: Memory, num_blocks: int, pitch: int, offset: int) -> Rows:
        # Words of 8 bytes if they fit: comparing them is faster.
        word = 1 if (pitch | offset | self.width) % 8 else 8
        rows = np.frombuffer(memory, f"u{word}").reshape(num_blocks, -1, pitch // word)
        row, begin = divmod(offset, pitch)
        columns = slice(begin // word, (begin + self.width) // word)
        return rows[:, row : row + self.num_rows, columns]

    def require_canary(self, found: bytes, incarnation: str) -> None:
        """Raises HandoffFailed if `found`, the piece of the source's canary block, is wrong."""
        expected = canary_bytes(incarnation, self.source_block_bytes)
        if found != self.there(expected).tobytes():
            raise HandoffFailed("the canary block is wrong: another layout or another memory")
