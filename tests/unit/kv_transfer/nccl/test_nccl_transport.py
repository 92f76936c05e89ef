"""The protocol of `nccl` with simulated lanes: pairs, verdicts, stalls, new pairs."""

from __future__ import annotations

import contextlib
import itertools
import queue
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
from fakes.access import ENGINE_KEY, access
from fakes.handoff import block_pairs
from fakes.handoff.block_pairs import BlockPair, BlockRef
from fakes.handoff.pieces import of_heads
from fakes.host_pool import HostPool
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import HandoffFailed
from baton.engine.kv.generations import GenerationsReader
from baton.kv_transfer.export.pool_address import PoolDescription
from baton.kv_transfer.nccl.nccl import NcclOutlet, NcclTransport
from baton.kv_transfer.nccl.nccl_lane import RequestParts
from baton.kv_transfer.network import data_wire as wire
from baton.kv_transfer.network.data_server import DataServer, ServedPool
from baton.kv_transfer.network.remote_window import RemoteWindow
from baton.kv_transfer.network.stream import Deadline
from baton.kv_transfer.network.tcp import HostBlockBytes
from baton.kv_transfer.window.block_pairs import Ids
from baton.kv_transfer.window.block_pieces import BlockCut, BlockPiece
from baton.kv_transfer.window.network_address import RemotePool
from baton.kv_transfer.window.transport import PullOutcome

SOURCE = "5" * 32
BLOCK_BYTES, NUM_BLOCKS, NUM_ROWS = 768, 12, 4


@dataclass
class Fabric:
    """Queues between ends with the same id. `break_next`: the next send fails."""

    wires: dict[bytes, queue.Queue[bytes]] = field(default_factory=dict)
    ids: Iterator[int] = field(default_factory=itertools.count)
    num_open: int = 0
    break_next: bool = False
    before_send: list[object] = field(default_factory=list)

    def new_id(self) -> bytes:
        return next(self.ids).to_bytes(wire.PAIR_ID_BYTES, "little")

    def wire(self, pair_id: bytes) -> queue.Queue[bytes]:
        assert len(pair_id) == wire.PAIR_ID_BYTES
        return self.wires.setdefault(pair_id, queue.Queue())


class FakeLane:
    """`nccl_lane.NcclLane` over a queue."""

    def __init__(self, fabric: Fabric, pool: HostPool, cut: BlockCut, pair_id: bytes) -> None:
        self._fabric, self._wire = fabric, fabric.wire(pair_id)
        self._blocks, self._cut = HostBlockBytes(pool, cut), cut
        self._last = b""
        self._is_open = True
        fabric.num_open += 1

    def send(self, block_ids: Ids, deadline: Deadline) -> None:
        deadline.remaining_s()
        if self._fabric.before_send:
            self._fabric.before_send.pop()()  # type: ignore[operator]
        if self._fabric.break_next:
            self._fabric.break_next = False
            raise HandoffFailed("NCCL: the pair failed")
        self._wire.put(self._blocks.read(block_ids).tobytes())

    def receive(self, num_blocks: int, block_ids: Ids | None, deadline: Deadline) -> None:
        while True:
            deadline.remaining_s()
            with contextlib.suppress(queue.Empty):
                self._last = self._wire.get(timeout=0.01)
                break
        assert len(self._last) == num_blocks * self._cut.piece_bytes
        if block_ids is not None:
            self._blocks.write(block_ids, np.frombuffer(self._last, np.uint8))

    def first_piece(self) -> bytes:
        return self._last[: self._cut.piece_bytes]

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._fabric.num_open -= 1


@dataclass
class World:
    fabric: Fabric
    source: HostPool
    ours: HostPool
    remote: RemotePool

    @contextlib.contextmanager
    def window(self, piece: BlockPiece | None = None) -> Iterator[RemoteWindow]:
        def open_lane(piece: BlockPiece | None, pair_id: bytes, deadline: Deadline) -> FakeLane:
            return FakeLane(
                self.fabric, self.ours, BlockCut.of(piece, self.ours.block_bytes), pair_id
            )

        transport = NcclTransport(open_lane, self.ours.block_bytes, self.fabric.new_id)
        window = transport.connect(self.remote, piece)
        try:
            yield window
        finally:
            window.close()
            window.join()

    def pair(self, block_id: int, destination: int) -> BlockPair:
        generation = self.source.generations.read(block_id)
        return BlockPair(BlockRef(block_id, generation), destination)


@contextlib.contextmanager
def world(our_block_bytes: int = BLOCK_BYTES) -> Iterator[World]:
    fabric = Fabric()
    source = HostPool(SOURCE, NUM_BLOCKS, BLOCK_BYTES)
    for block_id in range(2, NUM_BLOCKS):
        source.block(block_id)[:] = secrets.token_bytes(BLOCK_BYTES)
    ours = HostPool("9" * 32, NUM_BLOCKS, our_block_bytes)

    def open_outlet(cut: BlockCut, pair_id: bytes, deadline: Deadline) -> FakeLane:
        return FakeLane(fabric, source, cut, pair_id)

    server = DataServer(
        "127.0.0.1", ["127.0.0.1"], {wire.Mode.NCCL: partial(NcclOutlet, open_outlet)}
    )
    reader = GenerationsReader(source.generations.fd, NUM_BLOCKS, SOURCE)
    server.start(ServedPool(PoolDescription(SOURCE, BLOCK_BYTES, NUM_BLOCKS), reader, ENGINE_KEY))
    yield World(fabric, source, ours, access(SOURCE, server.port))
    server.close()
    while any(thread.name == "newcomer" for thread in threading.enumerate()):
        pass
    assert fabric.num_open == 0  # both ends of every pair were closed, whatever happened
    reader.close()
    source.close()
    ours.close()


def pull(window: RemoteWindow, *pairs: BlockPair) -> PullOutcome:
    done: queue.SimpleQueue[PullOutcome] = queue.SimpleQueue()
    window.start_pull(block_pairs.join(*pairs), done.put)
    return done.get(timeout=10)


def test_blocks_travel_beside_the_connection() -> None:
    with world() as w, w.window() as window:
        assert window.transport == "nccl"
        assert pull(window, w.pair(5, 3), w.pair(2, 11)) is PullOutcome.OK
        assert w.ours.block(3) == w.source.block(5)
        assert w.ours.block(11) == w.source.block(2)


def test_heads_travel_alone() -> None:
    with (
        world(BLOCK_BYTES // 2) as w,
        w.window(of_heads(1, 0, 2, 4, 2, num_layers=NUM_ROWS // 2)) as window,
    ):
        assert pull(window, w.pair(5, 3)) is PullOutcome.OK
        rows = np.frombuffer(w.source.block(5), np.uint8).reshape(NUM_ROWS, 4, -1)
        assert bytes(w.ours.block(3)) == rows[:, 1:3].tobytes()
        del rows


def test_a_rewrite_while_it_is_sent_is_stale() -> None:
    with world() as w, w.window() as window:
        w.fabric.before_send.append(lambda: w.source.generations.bump([5]))
        assert pull(window, w.pair(5, 3)) is PullOutcome.STALE
        assert pull(window, w.pair(5, 3)) is PullOutcome.OK


def test_a_reallocated_block_is_stale_and_its_pair_goes_on() -> None:
    """A reallocated block is still sent, as both ends launch before they can notice."""
    with world() as w, w.window() as window:
        announced = w.pair(5, 3)
        w.source.generations.bump([5])
        assert pull(window, announced) is PullOutcome.STALE
        assert pull(window, w.pair(5, 3)) is PullOutcome.OK
        assert len(w.fabric.wires) == 1
        assert all(wire.empty() for wire in w.fabric.wires.values())


def test_a_block_outside_the_pool_costs_the_pair() -> None:
    with world() as w, w.window() as window:
        beyond = BlockPair(BlockRef(NUM_BLOCKS, 0), 3)
        assert pull(window, beyond) is PullOutcome.FAILED
        assert pull(window, w.pair(5, 3)) is PullOutcome.OK
        assert len(w.fabric.wires) == 2


def test_a_pair_that_breaks_fails_its_pull_alone_and_the_next_makes_a_new_one() -> None:
    with world() as w, w.window() as window, w.window() as neighbour:
        w.fabric.break_next = True
        assert pull(window, w.pair(5, 3)) is PullOutcome.FAILED
        assert pull(neighbour, w.pair(5, 4)) is PullOutcome.OK
        assert pull(window, w.pair(5, 3)) is PullOutcome.OK
        assert len(w.fabric.wires) == 3


def test_a_connection_that_ends_fails_its_pull_at_once() -> None:
    with world() as w, w.window() as window:
        begin_s = time.monotonic()
        w.fabric.break_next = True
        assert pull(window, w.pair(5, 3)) is PullOutcome.FAILED
        assert time.monotonic() - begin_s < 1  # long before the stall time-out


def test_a_transfer_that_stalls_is_given_up() -> None:
    with world() as w, w.window() as window:
        gone_on = threading.Event()
        w.fabric.before_send.append(gone_on.wait)
        begin_s = time.monotonic()
        assert pull(window, w.pair(5, 3)) is PullOutcome.FAILED
        assert 1 < time.monotonic() - begin_s < 5  # longer on a busy machine
        gone_on.set()
        assert pull(window, w.pair(5, 3)) is PullOutcome.OK


def test_a_source_without_a_port_is_refused() -> None:
    with world() as w:
        w.remote = replace(w.remote, port=0)
        with pytest.raises(HandoffFailed, match="no port"), w.window():
            pass


@given(num_blocks=st.integers(1, wire.MAX_REQUEST_BLOCKS), piece_bytes=st.integers(1, 400 << 20))
def test_parts_cover_a_request(num_blocks: int, piece_bytes: int) -> None:
    parts = RequestParts(piece_bytes)
    cut = list(parts.cut(num_blocks))
    covered = [block for begin, size in cut for block in range(begin, begin + size)]
    assert covered == list(range(len(covered)))
    assert all(size in parts.sizes for _, size in cut)
    num_spare = len(covered) - num_blocks
    assert 0 <= num_spare < cut[-1][1]
    assert num_spare * piece_bytes <= 2 << 20
    assert all(after <= 2 * before for (_, before), (_, after) in itertools.pairwise(cut))


@given(piece_bytes=st.integers(1, 400 << 20))
def test_parts_have_few_sizes(piece_bytes: int) -> None:
    sizes = RequestParts(piece_bytes).sizes
    assert list(sizes) == sorted(set(sizes))
    assert 1 <= len(sizes) <= 16
    assert sizes[-1] == 1 or sizes[-1] * piece_bytes <= 192 << 20
