"""Choosing a transport, and the in-process transport."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fakes.access import access
from fakes.handoff import block_pairs
from fakes.handoff.block_pairs import BlockPair, BlockRef
from fakes.handoff.handoff import SOURCE
from fakes.handoff.memory_transport import MemoryPool, MemoryTransport, MemoryWindow

from baton.core.errors import HandoffFailed
from baton.kv_transfer.window.block_pieces import BlockPiece
from baton.kv_transfer.window.network_address import RemotePool
from baton.kv_transfer.window.transport import PullOutcome, open_window

BLOCK_BYTES = 8
PAIRS = (BlockPair(BlockRef(2), 3), BlockPair(BlockRef(4), 5))


class Broken:
    """A transport that never connects."""

    def __init__(self, name: str) -> None:
        self.name = name

    def connect(self, source: RemotePool, piece: BlockPiece | None = None) -> MemoryWindow:
        raise HandoffFailed(f"{self.name} is out of order")


class Crashing(Broken):
    """A transport that raises an unexpected error, e.g. if the process is out of descriptors."""

    def connect(self, source: RemotePool, piece: BlockPiece | None = None) -> MemoryWindow:
        raise OSError("too many open files")


@pytest.fixture
def transport() -> MemoryTransport:
    source = MemoryPool(6, BLOCK_BYTES)
    for block_id in range(6):
        source.block(block_id)[:] = bytes([block_id]) * BLOCK_BYTES
    return MemoryTransport(MemoryPool(6, BLOCK_BYTES), {SOURCE: source})


def test_the_first_transport_that_connects_is_taken(transport: MemoryTransport) -> None:
    assert (
        open_window([Broken("nvlink"), transport, Broken("tcp")], access(SOURCE)).transport
        == "memory"
    )


def test_a_transport_that_crashes_is_one_that_does_not_connect(transport: MemoryTransport) -> None:
    """A transport that crashes counts as one that cannot connect: requests get a result."""
    assert open_window([Crashing("nvlink"), transport], access(SOURCE)).transport == "memory"
    with pytest.raises(HandoffFailed, match="nvlink: OSError"):
        open_window([Crashing("nvlink")], access(SOURCE))


@pytest.mark.parametrize(
    ("transports", "words"),
    [
        ([Broken("a"), Broken("b")], ["a: a is out of order", "b: b is out of order", SOURCE]),
        ([], ["none is configured"]),
    ],
)
def test_no_transport_names_all_that_were_tried(
    transports: Sequence[Broken], words: list[str]
) -> None:
    with pytest.raises(HandoffFailed) as raised:
        open_window(transports, access(SOURCE))
    assert all(word in raised.value.message for word in words)


def test_memory_knows_only_its_own_sources(transport: MemoryTransport) -> None:
    with pytest.raises(HandoffFailed, match="no pool"):
        transport.connect(access("6" * 32))


def test_memory_copies_as_far_as_it_is_told(transport: MemoryTransport) -> None:
    window = transport.connect(access(SOURCE))
    outcomes: list[PullOutcome] = []
    pull = window.start_pull(block_pairs.join(*PAIRS), outcomes.append)
    pull.advance(3)
    assert bytes(window.destination.block(3)) == b"\2\2\2" + bytes(5)
    assert outcomes == []
    pull.finish()
    assert bytes(window.destination.block(3)) == b"\2" * BLOCK_BYTES
    assert bytes(window.destination.block(5)) == b"\4" * BLOCK_BYTES
    assert outcomes == [PullOutcome.OK]


@pytest.mark.parametrize("num_bytes", range(1, 2 * BLOCK_BYTES))
def test_memory_finds_a_rewrite_wherever_the_copy_stands(
    transport: MemoryTransport, num_bytes: int
) -> None:
    window = transport.connect(access(SOURCE))
    outcomes: list[PullOutcome] = []
    pull = window.start_pull(block_pairs.join(*PAIRS), outcomes.append)
    for _ in range(num_bytes):
        pull.advance(1)
    window.source.generations.bump([PAIRS[1].source.block_id])
    pull.finish()
    assert outcomes == [PullOutcome.STALE]
