"""A pool's GPU memory in other processes: exported by the source, mapped by pullers.

    source    cudaMalloc ─► handle ──(PoolExporter)──► puller    readable from its GPU? map it

engine/kv/cuda_memory.py owns handles and mappings. Knows no block and no window.
"""

from __future__ import annotations

import ctypes
import uuid

import torch

from ...core.errors import HandoffFailed
from ...engine.kv.cuda_memory import MappedMemory, MappingFailed, export_handle, map_handle
from ...engine.kv.kv_memory import CudaKvMemory
from ..export.pool_address import CudaMemory


def memory_of(kv: CudaKvMemory) -> CudaMemory:
    """The memory of `kv`, for other processes. Raises StartupFailed if the GPU cannot export it."""
    device = kv.tensor.device
    return CudaMemory(gpu_uuid(device), export_handle(kv.address, device))


def gpu_uuid(device: torch.device) -> bytes:
    """The GPU's UUID, the same in all processes."""
    return uuid.UUID(str(torch.cuda.get_device_properties(device).uuid)).bytes


def map_memory(memory: CudaMemory, num_bytes: int, device: torch.device) -> MappedMemory:
    """Map a peer's memory for `device`, which can then read it.

    Raises HandoffFailed if the handle is invalid or the memory is smaller than `num_bytes`.
    """
    try:
        mapped = map_handle(memory.ipc_handle, device)
    except MappingFailed as error:
        raise HandoffFailed(f"cannot open the peer's GPU memory: {error}") from error
    with torch.cuda.device(device):
        size = _allocation_bytes(mapped.address)
    if size < num_bytes:
        mapped.close()
        raise HandoffFailed(f"the peer's memory has {size} bytes, not the {num_bytes} announced")
    return mapped


def _allocation_bytes(address: int) -> int:
    """The size of the allocation that begins at `address`; 0 if there is none."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    query = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2
    status = query(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    return size.value if status == 0 and base.value == address else 0


def find_gpu(wanted: bytes) -> torch.device:
    """The GPU with this UUID. Raises HandoffFailed if this process cannot use it."""
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if gpu_uuid(device) == wanted:
            return device
    raise HandoffFailed("the source's GPU is not visible to this process")


def require_peer_access(wanted: bytes, device: torch.device) -> None:
    """Raises HandoffFailed unless kernels of `device` can read the memory of the GPU `wanted`."""
    source = find_gpu(wanted)
    if source != device and not torch.cuda.can_device_access_peer(device, source):
        raise HandoffFailed(
            f"no peer access from {device} to {source} (cudaDeviceCanAccessPeer is 0)"
        )
