"""Pulls between engines of unequal numbers of ranks, over real exporters: every byte compared."""

from __future__ import annotations

import contextlib
import itertools
import queue
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from fakes.access import access
from fakes.handoff import block_pairs
from fakes.handoff.block_pairs import BlockPair, BlockRef
from fakes.host_pool import HostPool, export_host_pool

from baton.core.errors import HandoffFailed
from baton.engine.kv.block_pool import NUM_RESERVED_BLOCKS
from baton.kv_transfer.export.pool_address import PoolPart
from baton.kv_transfer.protocol.events import OpenWindow
from baton.kv_transfer.ranks.ranked import SourcePiece, WindowOpener, open_pieces
from baton.kv_transfer.shm.shm import ShmTransport
from baton.kv_transfer.window.block_pieces import pieces_of
from baton.kv_transfer.window.transport import PoolWindow, PullOutcome

NUM_BLOCKS, NUM_ROWS, HEAD_BYTES = 6, 4, 24  # two layers; 3 positions of 8 bytes
SOURCE_IDS, BLOCK_IDS = (4, 2, 5), (2, 5, 3)
SIZES = (1, 2, 4, 8)


def parts_of(size: int, kv_heads: int) -> list[PoolPart]:
    each, copies = max(1, kv_heads // size), max(1, size // kv_heads)
    return [part((rank // copies * each, each)) for rank in range(size)]


def part(heads: tuple[int, int]) -> PoolPart:
    return PoolPart(secrets.token_hex(16), heads, (0, NUM_ROWS // 2))


def shard(dense: np.ndarray, part: PoolPart) -> np.ndarray:
    """[blocks, rows, kv_heads, bytes] -> the heads of one rank."""
    first, count = part.heads
    return dense[:, :, first : first + count]


@dataclass
class Engine:
    """The pools of all ranks, with rank 0's page of generations for all."""

    parts: list[PoolPart]
    pools: list[HostPool]

    def array(self, rank: int) -> np.ndarray:
        shape = (NUM_BLOCKS, NUM_ROWS, self.parts[rank].heads[1], HEAD_BYTES)
        return np.frombuffer(self.pools[rank].view, np.uint8).reshape(shape)

    def pairs(self) -> list[BlockPair]:
        read = self.pools[0].generations.read
        return [
            BlockPair(BlockRef(there, read(there)), here)
            for there, here in zip(SOURCE_IDS, BLOCK_IDS, strict=True)
        ]


@contextlib.contextmanager
def engine(size: int, kv_heads: int) -> Iterator[Engine]:
    parts = parts_of(size, kv_heads)
    sizes = [NUM_ROWS * part.heads[1] * HEAD_BYTES for part in parts]
    pools = [HostPool(p.pool, NUM_BLOCKS, size) for p, size in zip(parts, sizes, strict=True)]
    yield Engine(parts, pools)
    for thread in threading.enumerate():
        if thread.name.startswith("kv-pull-"):
            thread.join(5)  # a closed window releases its pool by itself
    for pool in pools:
        pool.close()


@contextlib.contextmanager
def exported(source: Engine, dense: np.ndarray) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for rank, (part, pool) in enumerate(zip(source.parts, source.pools, strict=True)):
            source.array(rank)[NUM_RESERVED_BLOCKS:] = shard(dense, part)[NUM_RESERVED_BLOCKS:]
            fd = source.pools[0].generations.fd
            stack.callback(export_host_pool(part.pool, pool, fd, source.parts).close)
        yield


@contextlib.contextmanager
def window(source: Engine, puller: Engine, rank: int) -> Iterator[PoolWindow]:
    pieces = pieces_of(source.parts, puller.parts[rank], rank)
    named = [SourcePiece(access(source.parts[piece.source_rank].pool), piece) for piece in pieces]
    opened = open_pieces([ShmTransport(puller.pools[rank])], named)
    try:
        yield opened
    finally:
        opened.close()
        for each in getattr(opened, "_windows", [opened]):
            each.join()


def pull(opened: PoolWindow, pairs: list[BlockPair]) -> PullOutcome:
    done: queue.SimpleQueue[PullOutcome] = queue.SimpleQueue()
    opened.start_pull(block_pairs.join(*pairs), done.put)
    return done.get(timeout=10)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("there", "here"), list(itertools.product(SIZES, SIZES)))
def test_all_ranks_hold_what_one_would(there: int, here: int, kv_heads: int) -> None:
    shape = (NUM_BLOCKS, NUM_ROWS, kv_heads, HEAD_BYTES)
    dense = np.random.default_rng(7).integers(0, 256, shape, np.uint8)
    with (
        engine(there, kv_heads) as source,
        engine(here, kv_heads) as puller,
        exported(source, dense),
    ):
        for rank, part in enumerate(puller.parts):
            with window(source, puller, rank) as opened:
                assert pull(opened, source.pairs()) is PullOutcome.OK
            found = puller.array(rank)[list(BLOCK_IDS)]
            assert np.array_equal(found, shard(dense[list(SOURCE_IDS)], part))
            assert not puller.array(rank)[[0, 4]].any()


@pytest.mark.parametrize(("there", "here"), [(4, 1), (1, 4), (4, 2)])
def test_a_generation_that_moved_makes_every_rank_s_pull_stale(there: int, here: int) -> None:
    dense = np.zeros((NUM_BLOCKS, NUM_ROWS, 4, HEAD_BYTES), np.uint8)
    with engine(there, 4) as source, engine(here, 4) as puller, exported(source, dense):
        pairs = source.pairs()
        source.pools[0].generations.bump([SOURCE_IDS[-1]])
        for rank in range(here):
            with window(source, puller, rank) as opened:
                assert pull(opened, pairs) is PullOutcome.STALE


def test_a_source_that_has_not_said_where_its_pools_are() -> None:
    opener = WindowOpener([], [part((0, 4))], None, bytes(16))
    with pytest.raises(HandoffFailed, match="has not sent how its pools are reached"):
        opener.open(OpenWindow("f" * 32))


def test_one_rank_that_cannot_be_reached_fails_the_whole() -> None:
    dense = np.zeros((NUM_BLOCKS, NUM_ROWS, 4, HEAD_BYTES), np.uint8)
    with engine(4, 4) as source, engine(1, 4) as puller, exported(source, dense):
        pieces = pieces_of(source.parts, puller.parts[0], 0)
        named = [
            SourcePiece(access(source.parts[piece.source_rank].pool), piece) for piece in pieces
        ]
        named[-1] = SourcePiece(access("f" * 32), pieces[-1])
        with pytest.raises(HandoffFailed, match="f" * 32):
            open_pieces([ShmTransport(puller.pools[0])], named)


def test_heads_of_another_size_are_refused() -> None:
    dense = np.zeros((NUM_BLOCKS, NUM_ROWS, 4, HEAD_BYTES), np.uint8)
    with engine(2, 4) as source, exported(source, dense):
        other = HostPool(secrets.token_hex(16), NUM_BLOCKS, 2 * NUM_ROWS * 4 * HEAD_BYTES)
        pieces = pieces_of(source.parts, part((0, 4)), 0)
        with pytest.raises(HandoffFailed, match="a block has"):
            ShmTransport(other).connect(access(source.parts[0].pool), pieces[0])
        other.close()
