"""One plain cudaMalloc as a tensor, outside torch's caching allocator.

Only such memory can be handed to another process whole and by itself (CUDA IPC). Calls the CUDA
runtime that torch has loaded already.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from ...core.errors import StartupFailed

# A CUDA IPC handle opens whole pages of this size: nothing of others may lie in the last one.
_PAGE_BYTES = 2 << 20


class CudaAllocation:
    """`num_bytes` of the device's memory, until `free`."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises StartupFailed if the device has not got as much."""
        self.num_bytes = num_bytes
        self._device = device
        address = ctypes.c_void_p()
        with torch.cuda.device(device):
            page_bytes = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
            status = runtime().cudaMalloc(ctypes.byref(address), ctypes.c_size_t(page_bytes))
        if status != 0 or address.value is None:
            forget_error()
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
        """Give it back once all work on the device is done. Tensors over it are then invalid."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            runtime().cudaFree(ctypes.c_void_p(self.address))


class _Exported:
    """What numba's array interface asks of a piece of device memory."""

    def __init__(self, memory: CudaAllocation) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (memory.num_bytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }


@functools.cache
def runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded."""
    assert torch.version.cuda is not None, "torch was built without CUDA"
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")


def forget_error() -> None:
    """Behind a call that failed: torch would report it at its next one."""
    runtime().cudaGetLastError()


def describe_error(status: int) -> str:
    """A cudaError_t in words."""
    describe = runtime().cudaGetErrorString
    describe.restype = ctypes.c_char_p
    return f"{describe(status).decode()} (CUDA error {status})"
