"""Blocks between two GPUs through staging buffers and the pair's communicator, in parts.

    source   pool ─gather─► slot 0  slot 1 ... ─send─►  ~  ─receive─► slot 0  slot 1 ... ─scatter─►
             copy stream                     wire stream                        copy stream    pool

While one part is on the wire, the next is gathered and the previous one is scattered. The streams
wait for each other; the host only launches CUDA graphs, some parts ahead. Waits for a peer have a
deadline: then the pair is aborted, and all that was launched has ended before that is reported.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...core.errors import HandoffFailed
from ...engine.kv.kv_memory import CudaKvMemory
from ..cuda_ipc.cuda_ipc_copy import KernelCopy, copy_piece
from ..cuda_ipc.launch_graph import LaunchGraph, give_back_stream, take_stream
from ..network.data_wire import MAX_REQUEST_BLOCKS
from ..network.stream import Deadline
from ..window.block_pairs import Ids
from ..window.block_pieces import BlockCut, BlockPiece, Span
from .nccl_pair import PULLER_RANK, SOURCE_RANK, NcclPair

_NUM_SLOTS = 2
_ID_BYTES = 8
_NUM_AHEAD = 6  # parts launched and not over: bounds what is launched while the peer stalls

_MOST_BYTES, _MOST_BLOCKS = 192 << 20, 1024  # at 360 GB/s 0.56 ms
_SPARE_BYTES = 2 << 20  # padding of the last part: takes less time than another part
_MOST_SPARE = 16  # the same, as a divisor of the largest part
_SMALL = 4  # first and last part: a divisor of the largest

# Compiling, allocating and recording graphs disturb each other.
_one_at_a_time = threading.Lock()


class RequestParts:
    """How a request for many blocks is cut into parts of a few sizes.

    Both ends must cut alike, so it belongs to the protocol (data_wire.py has the version). The
    first part is small since the wire is idle until it is gathered, the last since the pull waits
    until it is scattered; in between each part has at most twice the size of the previous one.
    `sizes`: in blocks, ascending.
    """

    def __init__(self, piece_bytes: int) -> None:
        most = max(1, min(_MOST_BYTES // piece_bytes, _MOST_BLOCKS))
        self._spare = min(_SPARE_BYTES // piece_bytes, most // _MOST_SPARE)
        sizes = (size for power in itertools.count() for size in (2 << power, 3 << power))
        upto = [1, *itertools.takewhile(lambda size: size <= most, sizes)]
        self.sizes = upto[bisect.bisect_right(upto, self._spare + 1) - 1 :]

    def cut(self, num_blocks: int) -> Iterator[tuple[int, int]]:
        """Each part's first block and size; the last part may have more blocks than are left."""
        small = self.sizes[-1] // _SMALL
        begin, limit = 0, small
        while (left := num_blocks - begin) > 0:
            if left <= small:
                size = self._fitting(left)
            else:
                size = self._at_most(min(limit, max(small, left * 2 // 3)))
            yield begin, size
            begin, limit = begin + size, 2 * size

    def _fitting(self, num_blocks: int) -> int:
        """The smallest size for all of them, if it needs little padding; otherwise the largest size
        that they fill."""
        index = bisect.bisect_left(self.sizes, num_blocks)
        if index < len(self.sizes) and self.sizes[index] - num_blocks <= self._spare:
            return self.sizes[index]
        return self.sizes[max(0, index - 1)]

    def _at_most(self, num_blocks: int) -> int:
        return self.sizes[max(0, bisect.bisect_right(self.sizes, num_blocks) - 1)]


class _Slot:
    """Staging for one part, and this end's work on it: gather and send, or receive and scatter.

    `piece`: from the pool `kv` to staging, where it is contiguous, or from staging to the pool.
    `blocks` [most, layers, 2, heads, block_size, dim]: the pieces of the blocks of `kv`.
    """

    def __init__(
        self,
        kv: CudaKvMemory,
        piece: BlockPiece,
        most: int,
        pair: NcclPair,
        copying: torch.cuda.Stream,
    ) -> None:
        """Raises RuntimeError if there is no memory for staging."""
        _, two, _, block_size, dim = kv.layout.block_shape
        pool, device = kv.tensor, kv.tensor.device
        self._pair, self._copying = pair, copying
        shape = (most, piece.layers.count, two, piece.heads.count, block_size, dim)
        self.blocks = pool.new_empty(shape)
        self._ids = torch.zeros(most, dtype=torch.int64, device=device)  # of the pool
        self._ids_address = self._ids.data_ptr()
        self._places = torch.arange(most, device=device)  # of this slot
        self._is_full, self._is_empty = _events(2)
        self._copies: dict[int, LaunchGraph] = {}  # by number of blocks, as these:
        self._transfers: dict[int, LaunchGraph] = {}
        if pair.sends:
            address, self._target = kv.address, self.blocks
            unused = self.blocks
        else:
            address, self._target = self.blocks.data_ptr(), pool
            unused = torch.empty_like(pool[:1])
        self._kernel = KernelCopy(address, device, piece)
        self._copy(1, unused)  # which compiles it

    def _copy(self, num_blocks: int, target: Tensor) -> None:
        there, here = self._places[:num_blocks], self._ids[:num_blocks]
        if self._pair.sends:
            there, here = here, there
        self._kernel.copy(there, here, target)

    def record(self, sizes: Iterable[int]) -> None:
        """Record graphs for parts of these sizes. The pair must have transferred something before.

        Raises HandoffFailed or RuntimeError.
        """
        for size in sizes:
            self._copies[size] = LaunchGraph(self._copying, partial(self._copy, size, self._target))
            self._transfers[size] = self._pair.record_transfer(self.blocks[:size])

    def launch(self, size: int, ids: int | None, is_over: torch.cuda.Event) -> None:
        """Launch a part of `size` blocks of the pool; `ids`: the address of their ids in pinned
        memory, which must stay until it is over. None: only the transfer."""
        if self._pair.sends:
            self._launch_copy(size, ids, self._is_empty, self._is_full)
            self._launch_transfer(size, self._is_full, self._is_empty)
            is_over.record(self._pair.stream)
        else:
            self._launch_transfer(size, self._is_empty, self._is_full)
            self._launch_copy(size, ids, self._is_full, self._is_empty)
            is_over.record(self._copying)

    def _launch_copy(
        self, size: int, ids: int | None, after: torch.cuda.Event, when_done: torch.cuda.Event
    ) -> None:
        stream = self._copying
        if ids is not None:
            copy_piece(ids, self._ids_address, size * _ID_BYTES, stream)
        stream.wait_event(after)
        if ids is not None:
            self._copies[size].launch()
        when_done.record(stream)

    def _launch_transfer(
        self, size: int, after: torch.cuda.Event, when_done: torch.cuda.Event
    ) -> None:
        stream = self._pair.stream
        stream.wait_event(after)
        self._transfers[size].launch()
        when_done.record(stream)

    def close(self) -> None:
        """Free the copies' graphs, when none of them runs; the pair frees those of transfers."""
        for graph in self._copies.values():
            graph.close()
        self._copies.clear()


class NcclLane:
    """One end of a pair that transfers a piece of blocks."""

    def __init__(self, kv: CudaKvMemory, piece: BlockPiece, pair: NcclPair) -> None:
        """`piece`: see `_Slot`. `connect` must follow. Raises RuntimeError if there is no memory
        for staging."""
        self._pair = pair
        self._is_open = True
        self._device = kv.tensor.device
        num_heads = 2 * piece.layers.count * piece.heads.count  # of K and V
        self._parts = RequestParts(num_heads * kv.layout.head_bytes)
        self._most = self._parts.sizes[-1]
        with torch.cuda.device(self._device), _one_at_a_time:
            self._copying = take_stream(self._device)
            make_slot = partial(_Slot, kv, piece, self._most, pair, self._copying)
            self._slots = [make_slot() for _ in range(_NUM_SLOTS)]
            self._over = _events(_NUM_AHEAD)  # of the last parts, used in turn
            # A last part may have padding.
            most_ids = MAX_REQUEST_BLOCKS + self._most
            self._pinned = torch.empty(most_ids, dtype=torch.int64, pin_memory=True)
            self._ids, self._ids_address = self._pinned.numpy(), self._pinned.data_ptr()
            # The allocations must be complete before other streams use them.
            torch.cuda.current_stream(self._device).synchronize()

    def connect(self, deadline: Deadline) -> None:
        """Transfer something, which connects further; record all graphs; wait until the peer has
        done the same. Raises HandoffFailed."""
        with self._aborting():
            self._pair.transfer(self._slots[0].blocks[:1], deadline)
            self._over[0].record(self._pair.stream)
            self._pair.wait(self._over[0], deadline)
            with _one_at_a_time:
                for slot in self._slots:
                    slot.record(self._parts.sizes)
            self._slots[0].launch(self._parts.sizes[0], None, self._over[0])
            self._pair.wait(self._over[0], deadline)

    def send(self, block_ids: Ids, deadline: Deadline) -> None:
        """Returns when the peer has the blocks and the pool is not read any more. Raises
        HandoffFailed."""
        self._carry(len(block_ids), block_ids, deadline)

    def receive(self, num_blocks: int, block_ids: Ids | None, deadline: Deadline) -> None:
        """Receive into these blocks (None: into staging only); returns when that is complete.

        Raises HandoffFailed, after which nothing writes to them.
        """
        self._carry(num_blocks, block_ids, deadline)

    def first_piece(self) -> bytes:
        """The first piece of the last `receive`, if its blocks fit into one part."""
        piece: bytes = self._slots[0].blocks[0].view(torch.uint8).cpu().numpy().tobytes()
        return piece

    def close(self) -> None:
        """Abort: faster than an orderly end, which needs both ends."""
        self._pair.abort()
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(RuntimeError):  # a dead device: nothing runs there
                self._copying.synchronize()
            for slot in self._slots:
                slot.close()
            give_back_stream(self._copying)

    def _carry(self, num_blocks: int, block_ids: Ids | None, deadline: Deadline) -> None:
        """Launch all parts in order; without ids only the transfers."""
        with self._aborting():
            if block_ids is not None:
                self._ids[:num_blocks] = block_ids
                self._ids[num_blocks:][: self._most] = block_ids[-1]  # padding repeats a block
            slots, events = itertools.cycle(self._slots), itertools.cycle(self._over)
            for begin, size in self._parts.cut(num_blocks):
                is_over = next(events)
                self._pair.wait(is_over, deadline)
                of_part = None if block_ids is None else self._ids_address + begin * _ID_BYTES
                next(slots).launch(size, of_part, is_over)
            for is_over in self._over:
                self._pair.wait(is_over, deadline)

    @contextlib.contextmanager
    def _aborting(self) -> Iterator[None]:
        """If the body raises, abort the pair; what was launched has ended before that is raised."""
        try:
            with torch.cuda.device(self._device):
                yield
        except (HandoffFailed, RuntimeError) as error:
            self.close()
            if isinstance(error, HandoffFailed):
                raise
            raise HandoffFailed(f"the GPU refused a transfer: {error}") from error


def _events(count: int) -> list[torch.cuda.Event]:
    return [torch.cuda.Event() for _ in range(count)]  # type: ignore[no-untyped-call]


def open_source_lane(
    kv: CudaKvMemory, cut: BlockCut, unique_id: bytes, deadline: Deadline
) -> NcclLane:
    """Open the source's end, for the piece `cut` of its blocks. Raises HandoffFailed."""
    return _open_lane(kv, _piece_of(cut, kv), unique_id, SOURCE_RANK, deadline)


def _piece_of(cut: BlockCut, kv: CudaKvMemory) -> BlockPiece:
    """From the source's pool to staging."""
    head_bytes, row_bytes = kv.layout.head_bytes, kv.layout.num_kv_heads * kv.layout.head_bytes
    num_rows, width = cut.num_rows, cut.width
    if num_rows == 1 and width % row_bytes == 0:  # contiguous whole rows
        num_rows, width = width // row_bytes, row_bytes
    row, begin = divmod(cut.source_offset, row_bytes)
    is_of_rows = cut.source_pitch in (row_bytes, cut.source_block_bytes)
    if not is_of_rows or (row | num_rows) % 2 or (begin | width) % head_bytes:
        raise HandoffFailed("the piece does not consist of layers and KV heads")
    num_heads, num_layers = width // head_bytes, num_rows // 2
    heads = Span(begin // head_bytes, 0, num_heads, kv.layout.num_kv_heads, num_heads)
    layers = Span(row // 2, 0, num_layers, kv.layout.num_layers, num_layers)
    return BlockPiece(0, heads, layers)


def open_puller_lane(
    kv: CudaKvMemory, piece: BlockPiece | None, unique_id: bytes, deadline: Deadline
) -> NcclLane:
    """Open the puller's end, for `piece` of the local blocks. Raises HandoffFailed."""
    num_heads, num_layers = kv.layout.num_kv_heads, kv.layout.num_layers
    heads = piece.heads if piece else Span(0, 0, num_heads, num_heads, num_heads)
    layers = piece.layers if piece else Span(0, 0, num_layers, num_layers, num_layers)
    staged = [replace(span, there=0, num_there=span.count) for span in (heads, layers)]
    return _open_lane(kv, BlockPiece(0, *staged), unique_id, PULLER_RANK, deadline)


def _open_lane(
    kv: CudaKvMemory, piece: BlockPiece, unique_id: bytes, rank: int, deadline: Deadline
) -> NcclLane:
    try:
        with contextlib.ExitStack() as opened:  # on any error the peer must not be left waiting
            pair = NcclPair(unique_id, rank, kv.tensor.device)
            opened.callback(pair.abort)
            pair.wait_ready(deadline)
            lane = NcclLane(kv, piece, pair)
            opened.callback(lane.close)
            lane.connect(deadline)
            opened.pop_all()
            return lane
    except RuntimeError as error:
        raise HandoffFailed(f"the GPU refuses a lane: {error}") from error
