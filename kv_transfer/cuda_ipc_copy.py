"""Two ways to copy blocks out of mapped peer memory, and the choice between them by measurement.

    kernel    one Triton kernel reads all blocks over the link: fastest, but takes multiprocessors
    engine    one cudaMemcpyBatchAsync for all pieces: the copy engines work, the processors do not

Knows addresses and block ids; generations and threads are cuda_ipc.py's.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..core.errors import HandoffFailed
from ..engine.cuda_memory import describe_error, forget_error, runtime
from ..kernels.kv_blocks_triton import pull_blocks, pull_heads
from .head_ranges import BlockCut, HeadPiece
from .runs import Ids, Runs, find_runs

MAX_BLOCKS = 1024  # of one launch
_NUM_PLANS = 8
_ANY_DIRECTION = 4  # cudaMemcpyDefault
_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
_BATCH_SINCE = 13  # the major version of the runtime whose cudaMemcpyBatchAsync we call
_KERNEL_MUST_BE_FASTER_BY = 1.1  # or decode steps keep all their multiprocessors


class CopyMethod(Protocol):
    """Copies blocks of one mapped pool, or a piece of each, [n, block_bytes] at some address."""

    name: str
    launches_at_once: bool  # False: to launch takes about as long as to copy

    def launch(self, ids: Ids, pool: Tensor) -> None:
        """Start on the current stream: ids[0] there to ids[1] of `pool` [blocks, ...].

        At most MAX_BLOCKS of them. `ids` may be changed afterwards. Raises HandoffFailed.
        """
        ...


class KernelCopy:
    """One kernel on the pool's GPU reads all blocks."""

    name = "kernel"
    launches_at_once = True

    def __init__(self, address: int, device: torch.device, piece: HeadPiece | None = None) -> None:
        self._address = address
        self._piece = None if piece is None or piece.is_whole else piece
        self._plans = itertools.cycle([_Plan(device) for _ in range(_NUM_PLANS)])

    def launch(self, ids: Ids, pool: Tensor) -> None:
        plan, n = next(self._plans), ids.shape[1]
        device_ids = plan.upload(ids)
        there, here, piece = device_ids[:n], device_ids[n:], self._piece
        if piece is None:
            pull_blocks(self._address, pool, there, here)
        else:
            heads = (piece.source_head, pool, piece.my_head, piece.num_heads)
            pull_heads(self._address, piece.source_heads, *heads, there, here)
        plan.is_free.record()


class _Plan:
    """Room for one launch's ids at both ends, taken once: no launch allocates or waits."""

    def __init__(self, device: torch.device) -> None:
        self._host = torch.empty(2 * MAX_BLOCKS, dtype=torch.int64, pin_memory=True)
        self._array = self._host.numpy()
        self._device = torch.empty_like(self._host, device=device)
        self.is_free = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def upload(self, ids: Ids) -> Tensor:
        """[2 * n] on the device: sources, then destinations."""
        self.is_free.synchronize()  # long ago, unless launches come thick and fast
        size = ids.size
        self._array[:size] = ids.ravel()
        device = self._device[:size]
        device.copy_(self._host[:size], non_blocking=True)
        return device


class EngineCopy:
    """The copy engines move runs of blocks, all submitted in one call."""

    name = "copy-engine"
    launches_at_once = True

    def __init__(self, address: int, device: torch.device, piece: HeadPiece | None = None) -> None:
        self._address = address
        self._piece = piece

    @staticmethod
    def is_available() -> bool:
        """Whether this CUDA runtime has the batched call in the form that we know."""
        version = ctypes.c_int()
        runtime().cudaRuntimeGetVersion(ctypes.byref(version))
        return version.value // 1000 >= _BATCH_SINCE

    def launch(self, ids: Ids, pool: Tensor) -> None:
        stream = torch.cuda.current_stream()
        cut = BlockCut.of(self._piece, 2 * pool.shape[1], pool[0].nbytes)
        if cut.is_whole:
            copy_batch(self._address, pool.data_ptr(), find_runs(ids), pool[0].nbytes, stream)
        else:
            copy_rows_batch(self._address, pool.data_ptr(), ids, cut, stream)


def copy_pieces(
    source: int, target: int, runs: Runs, block_bytes: int, stream: torch.cuda.Stream
) -> None:
    """One call for each run, between addresses of any kind that the driver can tell apart.

    Raises HandoffFailed.
    """
    copy = runtime().cudaMemcpyAsync
    for there, here, length in zip(runs.sources, runs.destinations, runs.lengths, strict=True):
        status = copy(
            ctypes.c_void_p(target + int(here) * block_bytes),
            ctypes.c_void_p(source + int(there) * block_bytes),
            ctypes.c_size_t(int(length) * block_bytes),
            _ANY_DIRECTION,
            ctypes.c_void_p(stream.cuda_stream),
        )
        _check(status)


def copy_batch(
    source: int, target: int, runs: Runs, block_bytes: int, stream: torch.cuda.Stream
) -> None:
    """All runs in one call. Raises HandoffFailed."""
    _copy_batch(
        source + runs.sources * block_bytes,
        target + runs.destinations * block_bytes,
        runs.lengths * block_bytes,
        stream,
    )


def copy_rows_batch(
    source: int, target: int, ids: Ids, cut: BlockCut, stream: torch.cuda.Stream
) -> None:
    """Each row's piece of each block, all in one call. Raises HandoffFailed."""
    rows = np.arange(cut.num_rows)
    there = ids[0][:, None] * cut.source_block_bytes + rows * cut.source_pitch + cut.source_offset
    here = ids[1][:, None] * (cut.num_rows * cut.pitch) + rows * cut.pitch + cut.offset
    sizes = np.full(there.size, cut.width)
    _copy_batch(source + there.ravel(), target + here.ravel(), sizes, stream)


def copy_2d(
    source: int,
    source_pitch: int,
    target: int,
    pitch: int,
    width: int,
    num_rows: int,
    stream: torch.cuda.Stream,
) -> None:
    """`num_rows` pieces of `width` bytes, `pitch` bytes apart. Raises HandoffFailed."""
    status = runtime().cudaMemcpy2DAsync(
        ctypes.c_void_p(target),
        ctypes.c_size_t(pitch),
        ctypes.c_void_p(source),
        ctypes.c_size_t(source_pitch),
        ctypes.c_size_t(width),
        ctypes.c_size_t(num_rows),
        _ANY_DIRECTION,
        ctypes.c_void_p(stream.cuda_stream),
    )
    _check(status)


def _copy_batch(from_: Ids, to: Ids, lengths: Ids, stream: torch.cuda.Stream) -> None:
    sources, targets, sizes = (each.astype(np.uint64) for each in (from_, to, lengths))
    attributes = _CopyAttributes(srcAccessOrder=_STREAM_ORDER)
    first = ctypes.c_size_t(0)  # the attributes hold from the first piece on
    status = runtime().cudaMemcpyBatchAsync(
        targets.ctypes.data_as(ctypes.c_void_p),
        sources.ctypes.data_as(ctypes.c_void_p),
        sizes.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_size_t(len(sizes)),
        ctypes.byref(attributes),
        ctypes.byref(first),
        ctypes.c_size_t(1),
        ctypes.c_void_p(stream.cuda_stream),
    )
    _check(status)


def _check(status: int) -> None:
    if status != 0:
        forget_error()
        raise HandoffFailed(f"a copy was refused: {describe_error(status)}")


def choose(names: Sequence[str], gbytes_per_s: Sequence[float]) -> int:
    """Which of the measured ways to take: the copy engines unless another clearly wins."""
    best = max(gbytes_per_s)
    for index, (name, rate) in enumerate(zip(names, gbytes_per_s, strict=True)):
        if name == EngineCopy.name and best < rate * _KERNEL_MUST_BE_FASTER_BY:
            return index
    return gbytes_per_s.index(best)


class _Location(ctypes.Structure):
    """cudaMemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _CopyAttributes(ctypes.Structure):
    """cudaMemcpyAttributes; the hints are for managed memory alone."""

    _fields_ = [
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", _Location),
        ("dstLocHint", _Location),
        ("flags", ctypes.c_uint),
    ]
