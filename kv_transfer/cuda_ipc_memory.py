"""A pool's GPU memory in another process: exported by one, mapped by others.

    source    cudaMalloc ─► IPC handle ──(pool_exporter.py)──► puller    its own GPU current, open
                                                                         │
                                      address that kernels and copies of the puller's GPU can read

Opened with the puller's GPU current: opened with the source's, as torch does it, kernels of the
puller's GPU could not read it. Owns handles and mappings; knows no block and no window.
"""

from __future__ import annotations

import ctypes
import uuid

import torch

from ..core.errors import HandoffFailed, StartupFailed
from ..engine.cuda_kv_memory import CudaKvMemory
from ..engine.cuda_memory import describe_error, forget_error, runtime
from .pool_address import IPC_HANDLE_BYTES, CudaMemory, PoolDescription
from .pool_exporter import PoolExporter

_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class _IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES)]


def export_cuda_pool(incarnation: str, kv: CudaKvMemory, generations_fd: int) -> PoolExporter:
    """Offer `kv` to this host. Raises StartupFailed if the GPU cannot, or it is offered already."""
    device = kv.tensor.device
    handle = _IpcHandle()
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # the canary is written: who opens the memory looks for it
        status = runtime().cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(kv.address))
    if status != 0:
        forget_error()
        raise StartupFailed(f"cannot export the KV pool of {device}: {describe_error(status)}")
    memory = CudaMemory(gpu_uuid(device), bytes(handle.reserved))
    description = PoolDescription(incarnation, kv.block_bytes, kv.num_blocks, memory)
    return PoolExporter(description, [generations_fd])


def gpu_uuid(device: torch.device) -> bytes:
    """What names a GPU in every process."""
    return uuid.UUID(str(torch.cuda.get_device_properties(device).uuid)).bytes


class PeerMapping:
    """Another process's memory as `device` sees it at `address`, until `close`."""

    def __init__(self, memory: CudaMemory, device: torch.device) -> None:
        """Raises HandoffFailed: another host's GPU, no peer access, or a handle that is void."""
        _require_peer_access(memory.gpu_uuid, device)
        self._device = device
        address = ctypes.c_void_p()
        handle = _IpcHandle.from_buffer_copy(memory.ipc_handle)
        with torch.cuda.device(device):
            status = runtime().cudaIpcOpenMemHandle(
                ctypes.byref(address), handle, _LAZY_PEER_ACCESS
            )
        if status != 0 or address.value is None:
            forget_error()
            raise HandoffFailed(f"cannot open the peer's GPU memory: {describe_error(status)}")
        self.address = address.value

    def close(self) -> None:
        """Unmap it; nothing on the device may still read it."""
        with torch.cuda.device(self._device):
            if runtime().cudaIpcCloseMemHandle(ctypes.c_void_p(self.address)) != 0:
                forget_error()  # its owner is gone, and the mapping with it


def _require_peer_access(wanted: bytes, device: torch.device) -> None:
    """Raises HandoffFailed unless kernels of `device` can read the memory of the GPU `wanted`."""
    for index in range(torch.cuda.device_count()):
        if gpu_uuid(torch.device("cuda", index)) == wanted:
            if index == device.index or torch.cuda.can_device_access_peer(device, index):
                return
            raise HandoffFailed(
                f"no peer access from {device} to cuda:{index} (cudaDeviceCanAccessPeer is 0)"
            )
    raise HandoffFailed("the source's GPU is not visible to this process")
