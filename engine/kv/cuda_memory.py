"""GPU memory outside torch's caching allocator: one cudaMalloc as a tensor, since only that can be
passed to another process as a whole and without other tensors (CUDA IPC).

    cudaMalloc ─► IPC handle ──(any channel)──► another process: its own GPU current, open
                                                   │
                                address that kernels and copies of its GPU can read

It is opened with the reader's GPU current: opened with the owner's, as torch does, kernels of the
reader's GPU could not read it. Also copies by the copy engines, many pieces in one call, between
any addresses that the driver knows. Calls the CUDA runtime that torch has loaded.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...core.errors import StartupFailed

# A CUDA IPC handle opens whole pages of this size: the last one must contain nothing else.
_PAGE_BYTES = 2 << 20
_HANDLE_BYTES = 64  # sizeof(cudaIpcMemHandle_t)
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_ANY_DIRECTION = 4  # cudaMemcpyDefault
_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
_BATCH_SINCE = 13  # the major version of the runtime whose cudaMemcpyBatchAsync we call

Ids: TypeAlias = npt.NDArray[np.int64]


class CudaAllocation:
    """`num_bytes` of the device's memory, until `free`."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises StartupFailed if the device does not have as much."""
        self.num_bytes = num_bytes
        self._device = device
        address = ctypes.c_void_p()
        with torch.cuda.device(device):
            page_bytes = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
            status = runtime().cudaMalloc(ctypes.byref(address), ctypes.c_size_t(page_bytes))
        if status != 0 or address.value is None:
            forget_error(status)
            free_bytes, _ = torch.cuda.mem_get_info(device)
            raise StartupFailed(
                f"cannot take {num_bytes / 1e9:.1f} GB of GPU memory for the KV pool "
                f"({free_bytes / 1e9:.1f} GB are free)",
                hint="lower --gpu-memory-utilization, or give --num-kv-blocks",
            )
        self.address = address.value

    def tensor(self) -> Tensor:
        """The memory as flat uint8; it is not kept alive by the tensor."""
        return torch.as_tensor(_Exported(self), device=self._device)

    def free(self) -> None:
        """Free it once all work on the device is done. Tensors over it are then invalid."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            runtime().cudaFree(ctypes.c_void_p(self.address))


class _Exported:
    """Device memory by the CUDA array interface."""

    def __init__(self, memory: CudaAllocation) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (memory.num_bytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }


class MappingFailed(Exception):
    """A handle cannot be opened; with the runtime's message."""


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * _HANDLE_BYTES)]


def export_handle(address: int, device: torch.device) -> bytes:
    """The IPC handle of the allocation at `address`. Waits for all work on `device`, so that
    readers find what was written. Raises StartupFailed."""
    handle = _Handle()
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        status = runtime().cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(address))
    if status != 0:
        raise StartupFailed(
            f"cannot share memory of {device} with other processes: {forget_error(status)}"
        )
    return bytes(handle.reserved)


@dataclass(frozen=True, slots=True)
class MappedMemory:
    """Another process's memory as a device sees it at `address`, until `close`."""

    address: int
    _device: torch.device

    def close(self) -> None:
        """Unmap it; nothing on the device may still read it."""
        with torch.cuda.device(self._device):
            if status := runtime().cudaIpcCloseMemHandle(ctypes.c_void_p(self.address)):
                forget_error(status)  # its owner has ended, and the mapping with it


def map_handle(handle: bytes, device: torch.device) -> MappedMemory:
    """Map another process's memory with `device` current. Raises MappingFailed."""
    address = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the device's context, if this is the first use of it
        status = runtime().cudaIpcOpenMemHandle(
            ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
        )
    if status != 0 or address.value is None:
        raise MappingFailed(forget_error(status))
    return MappedMemory(address.value, device)


class Runs(NamedTuple):
    """Blocks that are consecutive at both ends of a copy, as one piece: `lengths[i]` blocks from
    `sources[i]` on are copied to `destinations[i]` on.

    source       7  8  9  4  5           runs (7 -> 2, 3 blocks), (4 -> 5, 1), (5 -> 9, 1)
    destination  2  3  4  5  9
    """

    sources: Ids
    destinations: Ids
    lengths: Ids


def find_runs(ids: Ids, blocks_per_slice: int = 0) -> Runs:
    """The fewest pieces of the copy [2, pairs], in its order; if the memory of ids[1] is in slices,
    no piece crosses from one to the next."""
    is_break = (np.diff(ids, axis=1) != 1).any(axis=0)
    if blocks_per_slice:
        is_break |= ids[1, 1:] % blocks_per_slice == 0
    starts = np.flatnonzero(np.concatenate(([True], is_break)))
    lengths = np.diff(np.append(starts, ids.shape[1]))
    return Runs(ids[0, starts], ids[1, starts], lengths)


def has_batches() -> bool:
    """Whether this CUDA runtime has the batched call in the form used here."""
    version = ctypes.c_int()
    runtime().cudaRuntimeGetVersion(ctypes.byref(version))
    return version.value // 1000 >= _BATCH_SINCE


def copy_piece(source: int, target: int, num_bytes: int, stream: torch.cuda.Stream) -> int:
    """Submit a copy to `stream`, unknown to torch. Returns a cudaError_t."""
    status: int = runtime().cudaMemcpyAsync(
        ctypes.c_void_p(target),
        ctypes.c_void_p(source),
        ctypes.c_size_t(num_bytes),
        _ANY_DIRECTION,
        ctypes.c_void_p(stream.cuda_stream),
    )
    return status


def batch_copy(
    sources: Ids, targets: Ids, lengths: Ids, stream: torch.cuda.Stream
) -> Callable[[], int]:
    """A function that copies all pieces, addresses and bytes [n], and returns a cudaError_t. Needs
    `has_batches`."""
    arrays = [each.astype(np.uint64) for each in (targets, sources, lengths)]
    attributes = _CopyAttributes(srcAccessOrder=_STREAM_ORDER)
    first = ctypes.c_size_t(0)  # the attributes hold from the first piece on
    arguments = (
        ctypes.c_size_t(len(lengths)),
        ctypes.byref(attributes),
        ctypes.byref(first),
        ctypes.c_size_t(1),
        ctypes.c_void_p(stream.cuda_stream),
    )

    def copy() -> int:
        # Numpy's own pointers are reference cycles: hundreds of them for each long prompt.
        pointers = (ctypes.c_void_p(array.ctypes.data) for array in arrays)
        status: int = runtime().cudaMemcpyBatchAsync(*pointers, *arguments)
        return status

    return copy


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


@functools.cache
def runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded."""
    assert torch.version.cuda is not None, "torch was built without CUDA"
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")


def require(status: int) -> None:
    """Raises RuntimeError unless the call that returned this cudaError_t succeeded."""
    if status != 0:
        raise RuntimeError(forget_error(status))


def forget_error(status: int) -> str:
    """The error's message; clears it, since torch would report it with its next call."""
    runtime().cudaGetLastError()
    describe = runtime().cudaGetErrorString
    describe.restype = ctypes.c_char_p
    return f"{describe(status).decode()} (CUDA error {status})"
