"""The KV pool on a GPU: how large it may be, and its memory.

    gpu_memory_utilization * total  =  context | weights | work of the largest step | pool

The share is this engine's own, so that two engines may start on one GPU at once. A pool is never
larger than what others leave free. For the context of a process we allow 1 GiB; graphs and the
buffers of transports come later and are not in the share.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...core.config import EngineConfig
from ...core.errors import StartupFailed
from .cuda_memory import CudaAllocation
from .kv_memory import KvLayout, KvMemory, check_num_blocks

_CONTEXT_BYTES = 1 << 30  # its kernels and the libraries' buffers too
_LATER_BYTES, _LATER_BYTES_A_SEQ = 512 << 20, 4 << 20  # buffers; graphs, 0.9 GB of 256 sequences


class CudaKvMemory(KvMemory):
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

    def close(self) -> None:
        """Give the memory back, once the device is done with it."""
        del self.tensor
        self._allocation.free()


def choose_num_blocks(
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
        used_bytes = torch.cuda.memory_reserved(device)  # stays ours: a step will not find it taken
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        share_bytes = int(config.gpu_memory_utilization * total_bytes) - _CONTEXT_BYTES - used_bytes
        free_bytes -= _LATER_BYTES + max_num_seqs * _LATER_BYTES_A_SEQ
        num_blocks = max(0, min(share_bytes, free_bytes) // layout.block_bytes)
        if free_bytes < share_bytes:
            more = "another GPU, or an end to what else is on this one (nvidia-smi)"
    check_num_blocks(num_blocks, layout, max_model_len, more)
    return num_blocks


def _measure(device: torch.device, run_largest_step: Callable[[], None]) -> None:
    """Have torch reserve what the largest step needs, and no more."""
    torch.cuda.empty_cache()
    try:
        run_largest_step()
    except torch.OutOfMemoryError as error:
        raise StartupFailed(
            f"the largest step does not fit into GPU memory: {error}",
            hint="lower --prefill-chunk-tokens, --max-num-batched-tokens or --max-num-seqs",
        ) from error
    torch.cuda.synchronize(device)
