"""The KV pool on a GPU: how large it may be, and its memory.

    gpu_memory_utilization * total  =  context | weights | work of the largest step | pool
The share is this engine's own, as two engines on one GPU want it that start at once; what others
hold already limits the pool by what is left. The rest is for CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..core.config import EngineConfig
from ..core.errors import StartupFailed
from .cuda_memory import CudaAllocation
from .kv_memory import KvLayout, check_num_blocks

_OUTSIDE_TORCH_BYTES = 1 << 30  # of one process: its context, its kernels, the libraries' buffers
_GRAPHS_BYTES = 2 << 30  # captured once the pool is there


class CudaKvMemory:
    """A pool in one cudaMalloc; `address` and `num_bytes` are what an IPC handle is made of."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        """Raises StartupFailed if the device has not got the memory."""
        self.layout = layout
        self.num_blocks = num_blocks
        self._allocation = CudaAllocation(num_blocks * layout.block_bytes, device)
        self.address = self._allocation.address
        flat = self._allocation.tensor().view(layout.dtype)
        # Kernels multiply what they mask by zero: the memory may not begin as NaN.
        self.tensor = flat.zero_().view(num_blocks, *layout.block_shape)

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    def close(self) -> None:
        """Give the memory back, once the device is done with it."""
        del self.tensor
        self._allocation.free()


def choose_num_blocks(
    config: EngineConfig,
    layout: KvLayout,
    max_model_len: int,
    device: torch.device,
    run_largest_step: Callable[[], None],
) -> int:
    """Blocks of a pool on `device`, the reserved ones included; weights are loaded already.

    `run_largest_step` uses as much memory as any step will. Raises StartupFailed if one sequence of
    `max_model_len` tokens would not fit.
    """
    num_blocks = config.num_kv_blocks
    if num_blocks is None:
        pool_bytes = _free_for_pool(config.gpu_memory_utilization, device, run_largest_step)
        num_blocks = max(0, pool_bytes // layout.block_bytes)
    check_num_blocks(
        num_blocks, layout, max_model_len, "--gpu-memory-utilization or --num-kv-blocks"
    )
    return num_blocks


def _free_for_pool(
    utilization: float, device: torch.device, run_largest_step: Callable[[], None]
) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        run_largest_step()
    except torch.OutOfMemoryError as error:
        raise StartupFailed(
            f"the largest step does not fit into GPU memory: {error}",
            hint="lower --prefill-chunk-tokens, --max-num-batched-tokens or --max-num-seqs",
        ) from error
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    work_bytes = peak - torch.cuda.memory_allocated(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return min(
        int(utilization * total_bytes) - _OUTSIDE_TORCH_BYTES - peak,
        free_bytes - work_bytes - _GRAPHS_BYTES,
    )
