"""Which heads are pulled from where, for all pairs of TP sizes, against manually sliced KV."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from fakes.handoff.pieces import of_heads
from msgspec import structs

from baton.core.errors import FingerprintMismatch
from baton.kv_transfer.export.pool_address import PoolPart
from baton.kv_transfer.window.block_pieces import BlockCut, pieces_of

SIZES = (1, 2, 4, 8)
# Layers of each pipeline stage, and ranks per stage.
SIDES = [([5], 1), ([5], 2), ([3, 2], 1), ([2, 3], 2), ([1, 3, 1], 1), ([2, 1, 1, 1], 2)]
NUM_LAYERS, BLOCK_SIZE, HEAD_DIM = 2, 2, 3
CASES = list(itertools.product(SIZES, SIZES, (1, 2, 4, 8, 16)))


def parts_of(size: int, kv_heads: int) -> list[PoolPart]:
    """Heads in order over the ranks; if there are fewer heads, neighbouring ranks share one."""
    if size <= kv_heads:
        each = kv_heads // size
        return [part(rank, (rank * each, each)) for rank in range(size)]
    copies = size // kv_heads
    return [part(rank, (rank // copies, 1)) for rank in range(size)]


def part(rank: int, heads: tuple[int, int], layers: tuple[int, int] = (0, NUM_LAYERS)) -> PoolPart:
    return PoolPart(f"{rank:032x}", heads, layers)


def shard(dense: np.ndarray, part: PoolPart) -> np.ndarray:
    """One rank's block of a dense block [layers, 2, kv_heads, block_size, dim]."""
    first, count = part.heads
    return np.ascontiguousarray(dense[:, :, first : first + count])


def copy_rows(cut: BlockCut, source: bytes, target: bytearray) -> None:
    piece = cut.there(source).tobytes()
    for row in range(cut.num_rows):
        begin = row * cut.pitch + cut.offset
        target[begin : begin + cut.width] = piece[row * cut.width : (row + 1) * cut.width]


@pytest.mark.parametrize(("there", "here", "kv_heads"), CASES)
def test_every_rank_ends_up_with_its_shard(there: int, here: int, kv_heads: int) -> None:
    shape = (NUM_LAYERS, 2, kv_heads, BLOCK_SIZE, HEAD_DIM)
    dense = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    sources = parts_of(there, kv_heads)
    blocks = [shard(dense, part).tobytes() for part in sources]
    for rank, mine in enumerate(parts_of(here, kv_heads)):
        expected = shard(dense, mine).tobytes()
        found = bytearray(b"\xff" * len(expected))
        pieces = pieces_of(sources, mine, rank)
        for piece in pieces:
            cut = BlockCut.of(piece, len(found))
            assert cut.source_block_bytes == len(blocks[piece.source_rank])
            copy_rows(cut, blocks[piece.source_rank], found)
        assert bytes(found) == expected
        assert sum(piece.heads.count for piece in pieces) == mine.heads[1]  # each head once


@pytest.mark.parametrize(("there", "here"), [*itertools.product(SIDES, SIDES)])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_every_rank_of_every_stage_ends_up_with_its_layers(
    there: tuple[list[int], int], here: tuple[list[int], int], kv_heads: int
) -> None:
    shape = (5, 2, kv_heads, BLOCK_SIZE, HEAD_DIM)
    dense = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)

    def parts(side: tuple[list[int], int]) -> list[PoolPart]:
        layers, size = side
        firsts = [sum(layers[:stage]) for stage in range(len(layers))]
        places = itertools.product(zip(firsts, layers, strict=True), parts_of(size, kv_heads))
        return [structs.replace(part, layers=layers) for layers, part in places]

    def block(part: PoolPart) -> bytes:
        first, count = part.layers
        return shard(dense[first : first + count], part).tobytes()

    sources = parts(there)
    for rank, mine in enumerate(parts(here)):
        found = bytearray(b"\xff" * len(block(mine)))
        written = 0
        for piece in pieces_of(sources, mine, rank):
            cut = BlockCut.of(piece, len(found))
            source = block(sources[piece.source_rank])
            assert cut.source_block_bytes == len(source) and cut.block_bytes == len(found)
            copy_rows(cut, source, found)
            assert cut.here(found).tobytes() == cut.there(source).tobytes()
            written += cut.piece_bytes
        assert bytes(found) == block(mine)
        assert written == len(found)  # each byte once


def test_a_layer_that_nobody_has_is_refused_by_name() -> None:
    sources = [part(0, (0, 1), (0, 2)), part(1, (0, 1), (3, 1))]
    with pytest.raises(FingerprintMismatch, match="no rank there has layer 2"):
        pieces_of(sources, part(2, (0, 1), (0, 4)), 0)


@pytest.mark.parametrize(("there", "here", "kv_heads"), CASES)
def test_replicas_share_the_work(there: int, here: int, kv_heads: int) -> None:
    sources = parts_of(there, kv_heads)
    reads: Counter[int] = Counter()
    for rank, mine in enumerate(parts_of(here, kv_heads)):
        for piece in pieces_of(sources, mine, rank):
            reads[piece.source_rank] += piece.heads.count
    for heads in {source.heads for source in sources}:
        replicas = [r for r, source in enumerate(sources) if source.heads == heads]
        loads = [reads[rank] for rank in replicas]
        assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 16])
def test_equal_sides_read_rank_to_rank(size: int, kv_heads: int) -> None:
    parts = parts_of(size, kv_heads)
    for rank, mine in enumerate(parts):
        (piece,) = pieces_of(parts, mine, rank)
        assert piece.source_rank == rank
        assert piece.is_whole


def test_a_head_that_nobody_has_is_named() -> None:
    with pytest.raises(FingerprintMismatch, match="KV head 2"):
        pieces_of(parts_of(1, 2), part(0, (0, 4)), 0)


def test_all_of_a_block_is_one_row() -> None:
    whole = BlockCut.of(None, 96)
    assert whole.is_whole
    assert whole == BlockCut.of(of_heads(0, 0, 2, 2, 2, num_layers=2), 96)
    assert not BlockCut.of(of_heads(1, 0, 1, 2, 2, num_layers=2), 96).is_whole
