"""The ways to copy blocks out of mapped peer memory, and the choice between them by measurement.

    kernel    one Triton kernel reads all blocks over the link: fastest, but uses multiprocessors
    engine    one cudaMemcpyBatchAsync for all pieces: uses copy engines, no multiprocessors
    staged    through pinned host memory: for GPUs without peer access

        source GPU ──stream there──► slot 0   slot 1   slot 2 ...  ──stream here──► local GPU
                     fills slot i+1             while slot i is emptied

Knows addresses and block ids; cuda_window.py has the generations and threads.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...core.errors import HandoffFailed
from ...engine.kv import cuda_memory
from ...engine.kv.cuda_memory import batch_copy, find_runs, forget_error, runtime
from ...kernels.kv.kv_blocks_triton import pull_blocks, pull_heads
from ...kernels.upload import upload
from ..window.block_pairs import Ids
from ..window.block_pieces import BlockCut, BlockPiece

MAX_BLOCKS = 1024  # per launch
_ANY_DIRECTION = 4  # cudaMemcpyDefault
_KERNEL_MUST_BE_FASTER_BY = 1.1  # otherwise decode steps keep all multiprocessors
_NUM_SLOTS = 4
_SLOT_BYTES = 8 << 20


class CopyMethod(Protocol):
    """Copies blocks [n, block_bytes] of one mapped pool, or a piece of each."""

    name: str
    launches_at_once: bool  # False: launching takes about as long as the copy

    def prepare(self, ids: Ids, pool: Tensor, stream: torch.cuda.Stream) -> Callable[[], None]:
        """Returns a function that starts the copy of the source's blocks ids[0] to blocks ids[1] of
        `pool` [blocks, ...] on `stream`; at most MAX_BLOCKS.

        It is called at most once. Both raise HandoffFailed.
        """


class KernelCopy:
    """One kernel on the pool's GPU reads all blocks."""

    name = "kernel"
    launches_at_once = True

    def __init__(self, address: int, device: torch.device, piece: BlockPiece | None = None) -> None:
        self._address = address
        self._device = device
        self._piece = None if piece is None or piece.is_whole else piece

    def prepare(self, ids: Ids, pool: Tensor, stream: torch.cuda.Stream) -> Callable[[], None]:
        with torch.cuda.stream(stream):
            there, here = upload(ids, self._device)

        def start() -> None:
            with torch.cuda.stream(stream):
                self.copy(there, here, pool)

        return start

    def copy(self, there: Tensor, here: Tensor, pool: Tensor) -> None:
        """Copy blocks `there` to blocks `here`, [n] int64 on the device, on the current stream."""
        piece = self._piece
        if piece is None:
            pull_blocks(self._address, pool, there, here)
        else:
            heads, layers = piece.heads, piece.layers
            pull_heads(
                *(self._address, heads.num_there, heads.there, pool, heads.here, heads.count),
                *(there, here),
                layers=(layers.num_there, layers.there, layers.here, layers.count),
            )


class DmaCopy:
    """The copy engines copy runs of blocks, all submitted in one call."""

    name = "copy-engine"
    launches_at_once = True

    def __init__(self, address: int, device: torch.device, piece: BlockPiece | None = None) -> None:
        self._address = address
        self._piece = piece

    def prepare(self, ids: Ids, pool: Tensor, stream: torch.cuda.Stream) -> Callable[[], None]:
        cut = BlockCut.of(self._piece, pool[0].nbytes)
        if cut.is_whole:
            runs, size = find_runs(ids), cut.block_bytes
            there, here, sizes = runs.sources * size, runs.destinations * size, runs.lengths * size
        else:
            rows, blocks = np.arange(cut.num_rows), ids[:, :, None]
            there = (blocks[0] * cut.source_block_bytes + rows * cut.source_pitch).ravel()
            here = (blocks[1] * cut.block_bytes + rows * cut.pitch).ravel()
            there, here = there + cut.source_offset, here + cut.offset
            sizes = np.full(there.size, cut.width)
        copy = batch_copy(self._address + there, pool.data_ptr() + here, sizes, stream)
        return lambda: _check(copy())


def copy_blocks(
    source: int, target: int, ids: Ids, cut: BlockCut, stream: torch.cuda.Stream
) -> None:
    """Copy the piece `cut` of blocks ids[0] at `source` to blocks ids[1] at `target`, run by run or
    block by block. Raises HandoffFailed."""
    if cut.is_whole:
        runs, size = find_runs(ids), cut.block_bytes
        for there, here, length in zip(runs.sources, runs.destinations, runs.lengths, strict=True):
            start, end = source + int(there) * size, target + int(here) * size
            copy_piece(start, end, int(length) * size, stream)
        return
    for there, here in ids.T.tolist():
        status = runtime().cudaMemcpy2DAsync(
            ctypes.c_void_p(target + here * cut.block_bytes + cut.offset),
            ctypes.c_size_t(cut.pitch),
            ctypes.c_void_p(source + there * cut.source_block_bytes + cut.source_offset),
            ctypes.c_size_t(cut.source_pitch),
            ctypes.c_size_t(cut.width),
            ctypes.c_size_t(cut.num_rows),
            _ANY_DIRECTION,
            ctypes.c_void_p(stream.cuda_stream),
        )
        _check(status)


def copy_piece(source: int, target: int, num_bytes: int, stream: torch.cuda.Stream) -> None:
    """Copy between device or host addresses, which need not be torch's. Raises HandoffFailed."""
    _check(cuda_memory.copy_piece(source, target, num_bytes, stream))


def _check(status: int) -> None:
    if status != 0:
        raise HandoffFailed(f"a copy was refused: {forget_error(status)}")


def choose(names: Sequence[str], gbytes_per_s: Sequence[float]) -> int:
    """The index of the method to use: the copy engines, unless another is clearly faster."""
    best = max(gbytes_per_s)
    for index, (name, rate) in enumerate(zip(names, gbytes_per_s, strict=True)):
        if name == DmaCopy.name and best < rate * _KERNEL_MUST_BE_FASTER_BY:
            return index
    return gbytes_per_s.index(best)


@dataclass(frozen=True, slots=True)
class _Slot:
    """Pinned memory for some blocks, with events for when it is full and when it is empty again."""

    memory: Tensor
    is_full: torch.cuda.Event
    is_empty: torch.cuda.Event


class StagedCopy:
    """A `CopyMethod` that needs no peer access; it takes 32 MB of pinned memory, or four blocks.

    Copy engines work in both directions, ordered by events; the host only submits.
    """

    name = "staged"
    launches_at_once = False

    def __init__(self, address: int, source: torch.device, cut: BlockCut) -> None:
        """`address`: of the source's pool on its GPU, `source`."""
        self._address = address
        self._source = source
        tight = {"pitch": cut.width, "offset": 0, "block_bytes": cut.piece_bytes}  # in a slot
        self._fill = replace(cut, **tight)
        self._empty = replace(cut, **{f"source_{name}": value for name, value in tight.items()})
        self._blocks_per_slot = max(1, _SLOT_BYTES // cut.piece_bytes)
        slot_bytes = self._blocks_per_slot * cut.piece_bytes
        slots = []
        with torch.cuda.device(source):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            full = [torch.cuda.Event() for _ in range(_NUM_SLOTS)]  # type: ignore[no-untyped-call]
        for is_full in full:
            memory = torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=True)
            is_empty = torch.cuda.Event()  # type: ignore[no-untyped-call]
            slots.append(_Slot(memory, is_full, is_empty))
        self._slots = itertools.cycle(slots)

    def prepare(self, ids: Ids, pool: Tensor, stream: torch.cuda.Stream) -> Callable[[], None]:
        """See `CopyMethod`."""
        return partial(self._launch, ids, pool, stream)

    def _launch(self, ids: Ids, pool: Tensor, stream: torch.cuda.Stream) -> None:
        for begin in range(0, ids.shape[1], self._blocks_per_slot):
            part = ids[:, begin : begin + self._blocks_per_slot]
            self._launch_slot(next(self._slots), part, pool, stream)

    def _launch_slot(self, slot: _Slot, ids: Ids, pool: Tensor, here: torch.cuda.Stream) -> None:
        places = np.arange(ids.shape[1])
        with torch.cuda.device(self._source), torch.cuda.stream(self._stream):
            self._stream.wait_event(slot.is_empty)
            to_slot = np.stack([ids[0], places])
            copy_blocks(self._address, slot.memory.data_ptr(), to_slot, self._fill, self._stream)
            slot.is_full.record(self._stream)
        here.wait_event(slot.is_full)
        from_slot = np.stack([places, ids[1]])
        copy_blocks(slot.memory.data_ptr(), pool.data_ptr(), from_slot, self._empty, here)
        slot.is_empty.record(here)
