"""Memory that the GPUs of one engine read each other's through, and the sums made with it.

    cudaMalloc ─► IPC handle ─► store ─► every other rank maps it        once, when ranks connect

The sum itself is kernels/peer_reduce_triton.py. No NVLink multicast.
"""

from __future__ import annotations

import datetime
import logging

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from ..core.errors import StartupFailed
from ..kernels.peer_reduce_triton import (
    EXCHANGE_BYTES,
    MAX_BYTES,
    MAX_RANKS,
    MAX_ROW_BYTES,
    MAX_ROWS,
    peer_add_rms_norm,
    peer_sum,
)
from .cuda_memory import CudaAllocation
from .cuda_sharing import MappedMemory, MappingFailed, export_handle, map_handle

log = logging.getLogger(__name__)

# That a rank reads from its peers; above, sums go in parts. On four H200s: 512 KiB in 10.1 us at
# once and 11.3 in parts, 1 MiB in 15.7 and 13.7; NCCL takes 18.7 and 22.4.
_LARGEST_AT_ONCE_BYTES = 2 << 20
_FEWEST_ROWS = 8  # of one kernel for sum and norm: it has a program a row
_TIMEOUT = datetime.timedelta(seconds=60)


class PeerReduce:
    """Sums of small tensors over the ranks, launched on the current stream of `device`."""

    def __init__(self, store: TCPStore, rank: int, size: int, device: torch.device) -> None:
        """All ranks at once. Raises StartupFailed if a peer's memory cannot be mapped."""
        self._rank = rank
        self._own = CudaAllocation(EXCHANGE_BYTES, device)
        self._own.tensor().zero_()  # before a peer has the handle: it may signal at once
        store.set(f"exchange/{rank}", export_handle(self._own.address, device).hex())
        self._mapped = {
            peer: _map(store.get(f"exchange/{peer}"), device)
            for peer in range(size)
            if peer != rank
        }
        memories = [self._mapped.get(peer, self._own) for peer in range(size)]
        addresses = [memory.address for memory in memories]
        self._bases = torch.tensor(addresses, dtype=torch.int64, device=device)

    def can_reduce(self, x: Tensor) -> bool:
        """Whether x is small enough to be worth it, and lies so that it can be read at once."""
        return x.nbytes <= MAX_BYTES and x.is_contiguous()

    def can_reduce_rows(self, x: Tensor) -> bool:
        """Whether add_rms_norm is the way: x [rows, dim] has neither few rows nor many or long."""
        num_rows, dim = x.shape
        has_rows = _FEWEST_ROWS <= num_rows <= MAX_ROWS and dim * x.itemsize <= MAX_ROW_BYTES
        return has_rows and self.can_reduce(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, a new tensor."""
        return self.sum(x, in_parts=self._goes_in_parts(x))

    def sum(self, x: Tensor, *, in_parts: bool) -> Tensor:
        """`all_reduce` in one way or the other: see peer_reduce_triton.py."""
        return peer_sum(x, self._bases, self._rank, in_parts=in_parts)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add the sum over all ranks to `residual` in place; the norm of that."""
        in_parts = self._goes_in_parts(x)
        return peer_add_rms_norm(
            x, residual, weight, eps, self._bases, self._rank, in_parts=in_parts
        )

    def _goes_in_parts(self, x: Tensor) -> bool:
        num_peers = len(self._bases) - 1
        return num_peers > 1 and x.nbytes * num_peers > _LARGEST_AT_ONCE_BYTES

    def close(self) -> None:
        """Unmap and free; no sum may be in flight on any rank."""
        for memory in self._mapped.values():
            memory.close()
        self._own.free()


def connect_peers(store: TCPStore, rank: int, size: int, device: torch.device) -> PeerReduce | None:
    """None where small sums must go through NCCL too: all ranks come to the same answer."""
    store.set(f"reads_peers/{rank}", "yes" if _reads_all_peers(device) else "no")
    names = [f"reads_peers/{peer}" for peer in range(size)]
    store.wait(names, _TIMEOUT)
    if size & (size - 1) or size > MAX_RANKS or any(store.get(name) == b"no" for name in names):
        log.info("sums over %d GPUs go through NCCL alone", size)
        return None
    return PeerReduce(store, rank, size, device)


def _reads_all_peers(device: torch.device) -> bool:
    """Whether this GPU reads all others that this process sees; the ranks' are among them."""
    others = (index for index in range(torch.cuda.device_count()) if index != device.index)
    return all(torch.cuda.can_device_access_peer(device, other) for other in others)


def _map(handle_hex: bytes, device: torch.device) -> MappedMemory:
    """A peer's memory."""
    try:
        return map_handle(bytes.fromhex(handle_hex.decode()), device)
    except MappingFailed as error:
        raise StartupFailed(f"cannot map a rank's GPU memory: {error}") from error
