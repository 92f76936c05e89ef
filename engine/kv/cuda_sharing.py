"""A GPU's memory in other processes: handed out as a handle, mapped by whoever is given that.

    cudaMalloc ─► IPC handle ──(any channel)──► another process: its own GPU current, open
                                                   │
                                address that kernels and copies of its GPU can read

Opened with the reader's GPU current: opened with the owner's, as torch does it, kernels of the
reader's GPU could not read it. Knows no channel, and not what the memory is for.
"""

from __future__ import annotations

import ctypes

import torch

from ...core.errors import StartupFailed
from .cuda_memory import describe_error, forget_error, runtime

_HANDLE_BYTES = 64  # sizeof(cudaIpcMemHandle_t)
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class MappingFailed(Exception):
    """The runtime's words for a handle that it does not open."""


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * _HANDLE_BYTES)]


def export_handle(address: int, device: torch.device) -> bytes:
    """What opens the allocation at `address`, once all work on `device` is done: who opens it
    finds what was written. Raises StartupFailed."""
    handle = _Handle()
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        status = runtime().cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(address))
    if status != 0:
        forget_error()
        raise StartupFailed(
            f"cannot share memory of {device} with other processes: {describe_error(status)}"
        )
    return bytes(handle.reserved)


class MappedMemory:
    """Another process's memory as `device` sees it at `address`, until `close`."""

    def __init__(self, address: int, device: torch.device) -> None:
        self.address = address
        self._device = device

    def close(self) -> None:
        """Unmap it; nothing on the device may still read it."""
        with torch.cuda.device(self._device):
            if runtime().cudaIpcCloseMemHandle(ctypes.c_void_p(self.address)) != 0:
                forget_error()  # its owner is gone, and the mapping with it


def map_handle(handle: bytes, device: torch.device) -> MappedMemory:
    """Map another process's memory with `device` current. Raises MappingFailed."""
    address = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the device's context, if this is the first use of it
        status = runtime().cudaIpcOpenMemHandle(
            ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
        )
    if status != 0 or address.value is None:
        forget_error()
        raise MappingFailed(describe_error(status))
    return MappedMemory(address.value, device)
