"""Two ways to copy blocks out of mapped peer memory, and the choice between them by measurement.

    kernel    one Triton kernel reads all blocks over the link: fastest, but takes multiprocessors
    engine    one cudaMemcpyBatchAsync for all pieces: the copy engines work, the processors do not

Knows addresses and block ids; generations and threads are cuda_ipc.py's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..core.errors import HandoffFailed
from ..engine.cuda_memory import describe_error, forget_error, runtime
from ..kernels.kv_blocks_triton import pull_blocks
from .runs import Ids, find_runs

_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
_BATCH_SINCE = 13  # the major version of the runtime whose cudaMemcpyBatchAsync we call
_KERNEL_MUST_BE_FASTER_BY = 1.1  # or decode steps keep all their multiprocessors


class CopyMethod(Protocol):
    """Copies blocks of one mapped pool, [n, block_bytes] at some address."""

    name: str

    def launch(self, ids: Ids, pool: Tensor) -> object:
        """Start on the current stream: ids[0] there to ids[1] of `pool` [blocks, ...].

        Keep what comes back until the copy has completed. Raises HandoffFailed.
        """
        ...


class KernelCopy:
    """One kernel on the pool's GPU reads all blocks."""

    name = "kernel"

    def __init__(self, address: int) -> None:
        self._address = address

    def launch(self, ids: Ids, pool: Tensor) -> object:
        host_ids = torch.from_numpy(ids).pin_memory()
        device_ids = host_ids.to(pool.device, non_blocking=True)
        pull_blocks(self._address, pool, device_ids[0], device_ids[1])
        return host_ids, device_ids


class EngineCopy:
    """The copy engines move runs of blocks, all submitted in one call."""

    name = "copy engine"

    def __init__(self, address: int) -> None:
        self._address = address

    @staticmethod
    def is_available() -> bool:
        """Whether this CUDA runtime has the batched call in the form that we know."""
        version = ctypes.c_int()
        runtime().cudaRuntimeGetVersion(ctypes.byref(version))
        return version.value // 1000 >= _BATCH_SINCE

    def launch(self, ids: Ids, pool: Tensor) -> object:
        runs = find_runs(ids)
        block_bytes = pool[0].nbytes
        sources = (self._address + runs.sources * block_bytes).astype(np.uint64)
        targets = (pool.data_ptr() + runs.destinations * block_bytes).astype(np.uint64)
        sizes = (runs.lengths * block_bytes).astype(np.uint64)
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
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        if status != 0:
            forget_error()
            raise HandoffFailed(f"a batched copy was refused: {describe_error(status)}")
        return None


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
