"""The KV pool: one piece of memory, block-major, and how many blocks it has.

    [num_blocks, num_layers, 2, kv_heads, block_size, head_dim]
                             K,V
A block of all layers is contiguous, and is what the hand-off copies; with 8 bits it has the scales
of its tokens too (kernels/kv/kv_8bit.py). On a CPU the pool is a sealed memfd, which a puller on
the same host reads directly. Knows no request and no block's owner. On a GPU:

    gpu_memory_utilization * total  =  context | weights | work of the largest step | pool

The share is that of this engine alone, so that two engines may start on one GPU at once. A pool is
never larger than the free memory. The context of a process counts as 1 GiB; graphs and the buffers
of transports are allocated later and are not in the share.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...core.engine_config import EngineConfig
from ...core.errors import StartupFailed
from ...kernels.kv.kv_8bit import LARGEST, SCALE_BYTES
from . import memfd
from .block_pool import NUM_RESERVED_BLOCKS
from .cuda_memory import CudaAllocation

_CONTEXT_BYTES = 1 << 30  # its kernels and the libraries' buffers too
_LATER_BYTES, _LATER_BYTES_A_SEQ = 512 << 20, 4 << 20  # buffers; graphs, 0.9 GB of 256 sequences


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The layout of one block: `num_layers` and `num_kv_heads` are those of this rank. A `dtype` of
    8 bits is that of the values, which have scales."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_shape(self) -> tuple[int, ...]:
        scale = SCALE_BYTES if self.dtype in LARGEST else 0
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim + scale)

    @property
    def head_bytes(self) -> int:
        """The size of one head's K or V in a layer."""
        return math.prod(self.block_shape[-2:]) * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return math.prod(self.block_shape) * self.dtype.itemsize


class KvMemory:
    """A pool on some device."""

    layout: KvLayout
    num_blocks: int
    tensor: torch.Tensor  # [num_blocks, *layout.block_shape]

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes


class CpuKvMemory(KvMemory):
    """A pool in shared host memory. `fd` is passed to pullers."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        """Raises StartupFailed if the system has not got the memory."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.fd, memory = memfd.create("baton-kv", num_blocks * layout.block_bytes)
        self.view = memoryview(memory)
        flat = torch.frombuffer(memory, dtype=layout.dtype)
        self.tensor = flat.view(num_blocks, *layout.block_shape)

    def close(self) -> None:
        """Close `fd` and release the memory.

        It is unmapped with the last tensor over it, not here: using a tensor over unmapped memory
        would crash.
        """
        os.close(self.fd)
        self.view.release()
        del self.tensor


def choose_num_cpu_blocks(config: EngineConfig, layout: KvLayout, max_model_len: int) -> int:
    """Blocks of a pool on a CPU, the reserved ones included.

    Raises StartupFailed if one sequence of `max_model_len` tokens would not fit.
    """
    num_blocks = config.num_kv_blocks
    if num_blocks is None:
        num_blocks = config.cpu_kv_bytes // layout.block_bytes
    check_num_blocks(num_blocks, layout, max_model_len, "--cpu-kv-bytes or --num-kv-blocks")
    return num_blocks


def check_num_blocks(num_blocks: int, layout: KvLayout, max_model_len: int, more: str) -> None:
    """Raise StartupFailed if the longest sequence would not fit; `more`: how to get more memory."""
    needed = math.ceil(max_model_len / layout.block_size) + NUM_RESERVED_BLOCKS
    if num_blocks < needed:
        fitting_len = max(0, num_blocks - NUM_RESERVED_BLOCKS) * layout.block_size
        raise StartupFailed(
            f"the KV of {max_model_len} tokens needs {needed * layout.block_bytes} bytes "
            f"({needed} blocks), but there are {num_blocks * layout.block_bytes} "
            f"({num_blocks} blocks)",
            hint=(
                f"give it --max-model-len {fitting_len}, or more memory: {more}"
                if fitting_len
                else f"give it more memory: {more}"
            ),
        )


class CudaKvMemory(KvMemory):
    """A pool in one cudaMalloc at `address`, from which an IPC handle can be made."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        """Raises StartupFailed if the device has not got the memory."""
        self.layout = layout
        self.num_blocks = num_blocks
        self._allocation = CudaAllocation(num_blocks * layout.block_bytes, device)
        self.address = self._allocation.address
        flat = self._allocation.tensor()
        # Kernels multiply masked values by zero: the memory must not contain NaN.
        self.tensor = flat.zero_().view(layout.dtype).view(num_blocks, *layout.block_shape)

    def close(self) -> None:
        """Free the memory once the device has completed its work."""
        del self.tensor
        self._allocation.free()


def choose_num_gpu_blocks(
    config: EngineConfig,
    layout: KvLayout,
    max_num_seqs: int,
    max_model_len: int,
    device: torch.device,
    run_largest_step: Callable[[], None],
) -> int:
    """Blocks of a pool on `device`, the reserved ones included; weights are loaded already.

    `run_largest_step` uses as much memory as any step will. At most `max_num_seqs` will
    run at once. Raises StartupFailed if one sequence of `max_model_len` tokens would not fit.
    """
    num_blocks, more = config.num_kv_blocks, "--gpu-memory-utilization or --num-kv-blocks"
    if num_blocks is None:
        _measure(device, run_largest_step)
        used_bytes = torch.cuda.memory_reserved(device)  # stays reserved for steps
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        share_bytes = int(config.gpu_memory_utilization * total_bytes) - _CONTEXT_BYTES - used_bytes
        free_bytes -= _LATER_BYTES + max_num_seqs * _LATER_BYTES_A_SEQ
        num_blocks = max(0, min(share_bytes, free_bytes) // layout.block_bytes)
        if free_bytes < share_bytes:
            more = "another GPU, or stop other processes on this one (nvidia-smi)"
    check_num_blocks(num_blocks, layout, max_model_len, more)
    return num_blocks


def _measure(device: torch.device, run_largest_step: Callable[[], None]) -> None:
    """Let torch reserve what the largest step needs, and no more."""
    torch.cuda.empty_cache()
    try:
        run_largest_step()
    except torch.OutOfMemoryError as error:
        raise StartupFailed(
            f"the largest step does not fit into GPU memory: {error}",
            hint="lower --prefill-chunk-tokens, --max-num-batched-tokens or --max-num-seqs",
        ) from error
    torch.cuda.synchronize(device)


def canary_bytes(incarnation: str, block_bytes: int) -> bytes:
    """The content of the canary block of `incarnation`: every position differs.

    It is written once at start; a puller copies and compares it before it uses its window. A wrong
    offset, stride, length, byte order or process shows as a difference.
    """
    return hashlib.shake_128(f"baton canary {incarnation}".encode()).digest(block_bytes)
