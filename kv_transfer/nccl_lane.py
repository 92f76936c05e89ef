"""Blocks between two GPUs through staging buffers and a communicator of the pair, in parts.

    source   pool ─gather─► slot 0  slot 1 ... ─send─►  ~  ─receive─► slot 0  slot 1 ... ─scatter─►
             copy stream                     wire streams                       copy stream    pool

While one part is on the wire the next is gathered and the last is scattered: the streams wait for
each other, the host only launches, some parts ahead. Both ends cut a request into the same parts.
Nobody waits for a peer longer than to a deadline: then the pair is aborted, and what was launched
has ended before that is told.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from ..core.errors import HandoffFailed
from ..engine.cuda_kv_memory import CudaKvMemory
from .cuda_ipc_copy import MAX_BLOCKS, KernelCopy
from .data_wire import MAX_REQUEST_BLOCKS
from .head_ranges import BlockCut, HeadPiece
from .nccl_pair import PULLER_RANK, SOURCE_RANK, NcclPair
from .runs import Ids
from .stream import Deadline

_NUM_SLOTS = 2
_SLOT_BYTES = 192 << 20  # at 360 GB/s 0.56 ms: to launch a part takes either host up to 0.3
_NUM_AHEAD = 6  # parts launched and not over
_FIRST_PART_SHARE = 2  # of a slot: the wire waits for it, and carries it while we launch the next
_LAST_PART_SHARE = 4  # for its scatter we wait


class Lane(Protocol):
    """One end of a pair, ready to carry blocks."""

    def send(self, block_ids: Ids, deadline: Deadline) -> None:
        """Returns when the peer has them and the pool is read no more. Raises HandoffFailed."""
        ...

    def receive(self, num_blocks: int, block_ids: Ids | None, deadline: Deadline) -> None:
        """Into these blocks, or nowhere; returns when they lie there. Raises HandoffFailed, after
        which nothing writes to them."""
        ...

    def first_piece(self) -> bytes:
        """Of the blocks that were last received, if they were few enough for one part."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Slot:
    """Staging for one part. `blocks` [n, layers, 2, heads of the piece, block_size, dim]."""

    blocks: Tensor
    scatter: KernelCopy
    is_full: torch.cuda.Event
    is_empty: torch.cuda.Event


@dataclass(frozen=True, slots=True)
class _Part:
    """[begin, end) of a request's blocks, on their way through a slot."""

    slot: _Slot
    begin: int
    end: int

    @property
    def blocks(self) -> Tensor:
        return self.slot.blocks[: self.end - self.begin]


_Stage: TypeAlias = tuple[torch.cuda.Stream, Callable[[_Part], None]]


class NcclLane:
    """See `Lane`. Of the blocks of `kv`, `count` KV heads travel, from head `first` on."""

    def __init__(self, kv: CudaKvMemory, first: int, count: int, pair: NcclPair) -> None:
        self._pair = pair
        self._pool = kv.tensor
        self._device = kv.tensor.device
        layers, two, num_row_heads, block_size, dim = kv.layout.block_shape
        piece_bytes = kv.block_bytes // num_row_heads * count
        most = max(1, min(_SLOT_BYTES // piece_bytes, MAX_BLOCKS))
        self._most = most
        gathered = HeadPiece(0, first, 0, count, num_row_heads, count)
        scattered = HeadPiece(0, 0, first, count, count, num_row_heads)
        with torch.cuda.device(self._device):
            self._gather = KernelCopy(kv.address, self._device, gathered)
            self._copying = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
            self._wire = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
            self._slots = []
            for _ in range(_NUM_SLOTS):
                shape = (most, layers, two, count, block_size, dim)
                blocks = kv.tensor.new_empty(shape)
                scatter = KernelCopy(blocks.data_ptr(), self._device, scattered)
                self._slots.append(_Slot(blocks, scatter, *_events(2)))
            self._places = torch.arange(most, device=self._device)  # of blocks in a slot
            self._ids = self._places.new_empty(MAX_REQUEST_BLOCKS)
            self._pinned = torch.empty(MAX_REQUEST_BLOCKS, dtype=torch.int64, pin_memory=True)
            self._over = _events(_NUM_AHEAD)  # of the last parts, taken in turn
            torch.cuda.synchronize(self._device)  # the memory is ours before other streams use it

    def send(self, block_ids: Ids, deadline: Deadline) -> None:
        """See `Lane`."""
        with self._aborting():
            ids = self._upload(block_ids)

            def gather(part: _Part) -> None:
                there = ids[part.begin : part.end]
                self._gather.copy(there, self._places[: len(there)], part.slot.blocks)

            def send(part: _Part) -> None:
                self._pair.send(part.blocks, deadline)

            self._run(len(block_ids), deadline, (self._copying, gather), (self._wire, send))

    def receive(self, num_blocks: int, block_ids: Ids | None, deadline: Deadline) -> None:
        """See `Lane`."""
        with self._aborting():
            ids = None if block_ids is None else self._upload(block_ids)

            def receive(part: _Part) -> None:
                self._pair.receive(part.blocks, deadline)

            def scatter(part: _Part) -> None:
                if ids is not None:
                    here = ids[part.begin : part.end]
                    part.slot.scatter.copy(self._places[: len(here)], here, self._pool)

            self._run(num_blocks, deadline, (self._wire, receive), (self._copying, scatter))

    def first_piece(self) -> bytes:
        piece: bytes = self._slots[0].blocks[0].view(torch.uint8).cpu().numpy().tobytes()
        return piece

    def close(self) -> None:
        self._pair.abort()  # quicker than an orderly end, for which both ends would have to be here

    def _upload(self, block_ids: Ids) -> Tensor:
        """The same on the device, for copies of this request: all of the one before are over."""
        pinned, ids = (each[: len(block_ids)] for each in (self._pinned, self._ids))
        pinned.copy_(torch.from_numpy(block_ids))
        with torch.cuda.stream(self._copying):
            return ids.copy_(pinned, non_blocking=True)

    def _run(self, num_blocks: int, deadline: Deadline, first: _Stage, second: _Stage) -> None:
        """Both stages of all parts, one part after the other.

        Waits for a part some parts before: without a peer that goes on, little more is launched.
        """
        is_over: torch.cuda.Event | None = None
        for part, is_over in zip(self._parts(num_blocks), itertools.cycle(self._over)):
            self._pair.wait(is_over, deadline)
            self._launch(first, part, part.slot.is_empty, part.slot.is_full)
            self._launch(second, part, part.slot.is_full, part.slot.is_empty)
            is_over.record(second[0])
        assert is_over is not None
        self._pair.wait(is_over, deadline)

    @staticmethod
    def _launch(
        stage: _Stage, part: _Part, after: torch.cuda.Event, when_done: torch.cuda.Event
    ) -> None:
        stream, work = stage
        with torch.cuda.stream(stream):
            stream.wait_event(after)
            work(part)
            when_done.record(stream)

    def _parts(self, num_blocks: int) -> Iterator[_Part]:
        begins, ends = cut_parts(num_blocks, self._most)
        return map(_Part, itertools.cycle(self._slots), begins, ends)

    @contextlib.contextmanager
    def _aborting(self) -> Iterator[None]:
        """Whatever goes wrong ends the pair; what was launched has ended when that is told."""
        try:
            with torch.cuda.device(self._device):
                yield
        except (HandoffFailed, RuntimeError) as error:
            self._pair.abort()
            with contextlib.suppress(RuntimeError):  # a dead device: nothing runs there
                self._wire.synchronize()  # an aborted transfer ends by itself
                self._copying.synchronize()
            if isinstance(error, HandoffFailed):
                raise
            raise HandoffFailed(f"the GPU refused a transfer: {error}") from error


def _events(count: int) -> list[torch.cuda.Event]:
    return [torch.cuda.Event() for _ in range(count)]  # type: ignore[no-untyped-call]


def cut_parts(num_blocks: int, most: int) -> tuple[list[int], list[int]]:
    """Where the parts of a request begin and end: the same at both ends, so a part of the protocol
    (data_wire.py has its version)."""
    begins, size = [0], max(1, most // _FIRST_PART_SHARE)
    while begins[-1] + size < num_blocks:
        begins.append(begins[-1] + size)
        size = most
    last = max(1, most // _LAST_PART_SHARE)
    if len(begins) > 1 and num_blocks - begins[-1] > 2 * last:
        begins.append(num_blocks - last)
    return begins, [*begins[1:], num_blocks]


def open_source_lane(kv: CudaKvMemory, cut: BlockCut, unique_id: bytes, deadline: Deadline) -> Lane:
    """The source's end, for the heads that `cut` takes of its blocks. Raises HandoffFailed."""
    layout = kv.layout
    first, count = 0, layout.num_kv_heads
    if not cut.is_whole:
        head_bytes = layout.block_size * layout.head_dim * layout.dtype.itemsize
        first, count = cut.source_offset // head_bytes, cut.width // head_bytes
        if cut.num_rows != 2 * layout.num_layers or (cut.source_offset | cut.width) % head_bytes:
            raise HandoffFailed("the piece does not consist of KV heads")
    return _open_lane(kv, first, count, unique_id, SOURCE_RANK, deadline)


def open_puller_lane(
    kv: CudaKvMemory, piece: HeadPiece | None, unique_id: bytes, deadline: Deadline
) -> Lane:
    """The puller's end, for the heads that `piece` fills of ours. Raises HandoffFailed."""
    first, count = 0, kv.layout.num_kv_heads
    if piece is not None:
        first, count = piece.my_head, piece.num_heads
    return _open_lane(kv, first, count, unique_id, PULLER_RANK, deadline)


def _open_lane(
    kv: CudaKvMemory, first: int, count: int, unique_id: bytes, rank: int, deadline: Deadline
) -> Lane:
    try:
        pair = NcclPair(unique_id, rank, kv.tensor.device)
        try:
            pair.wait_ready(deadline)
            return NcclLane(kv, first, count, pair)
        except BaseException:  # whatever it is, the peer must not wait for us
            pair.abort()
            raise
    except RuntimeError as error:  # no memory for staging
        raise HandoffFailed(f"no staging on the GPU: {error}") from error
