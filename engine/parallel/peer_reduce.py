"""All-reduces of small tensors: the GPUs of one engine write to each other's memory.

    cudaMalloc ─► IPC handle ─► channels ─► every other rank maps it     once, when ranks connect

The kernels are in kernels/peer_reduce_triton.py. No NVLink multicast.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.errors import StartupFailed
from ...kernels.layers.ops_triton import send_product
from ...kernels.peer_reduce_triton import (
    EXCHANGE_BYTES,
    MAX_BYTES,
    MAX_RANKS,
    MAX_ROW_BYTES,
    MAX_ROWS,
    Exchange,
    peer_add_rms_norm,
    peer_sum,
    prepare_exchange,
)
from ..kv.cuda_memory import CudaAllocation, MappedMemory, MappingFailed, map_handle

log = logging.getLogger(__name__)

# Bytes that a rank sends at once; above this, sums go in parts. On four H100s both take equally
# long at 384 KiB, and parts half as long at 1.5 MiB (python -m baton.bench.allreduce --ranks 4).
_LARGEST_AT_ONCE_BYTES = 512 << 10
_FEWEST_ROWS = 8  # for the fused sum and norm, which runs one program per row


class PeerReduce:
    """Sums of small tensors over the ranks, launched on the current stream of `device`."""

    def __init__(
        self, own: CudaAllocation, handles: Sequence[bytes], rank: int, device: torch.device
    ) -> None:
        """`own`: this rank's exchange memory, which this object takes over; `handles`: of all
        ranks' exchange memories. Raises StartupFailed if a peer's memory cannot be mapped."""
        self._own = own
        self._mapped = {
            peer: _map(handle, device) for peer, handle in enumerate(handles) if peer != rank
        }
        memories = [self._mapped.get(peer, own) for peer in range(len(handles))]
        addresses = [memory.address for memory in memories]
        bases = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.exchange = Exchange(bases, rank)
        self._sent_bytes = 0  # of a sent product that no add_rms_norm has read yet

    def can_reduce(self, x: Tensor) -> bool:
        """Whether x is contiguous, of 2- or 4-byte floats, and small enough to be worth it."""
        is_number = x.is_floating_point() and x.itemsize in (2, 4)
        return is_number and x.nbytes <= MAX_BYTES and x.is_contiguous()

    def can_reduce_rows(self, x: Tensor) -> bool:
        """Whether to use add_rms_norm for x [rows, dim], by the number and size of rows."""
        num_rows, dim = x.shape
        has_rows = _FEWEST_ROWS <= num_rows <= MAX_ROWS and dim * x.itemsize <= MAX_ROW_BYTES
        return has_rows and self.can_reduce(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, a new tensor."""
        return self.sum(x, in_parts=self._goes_in_parts(x.nbytes))

    def sum(self, x: Tensor, *, in_parts: bool) -> Tensor:
        """`all_reduce`, in parts or at once: see peer_reduce_triton.py."""
        assert not self._sent_bytes, "its words lie where this sum's would"
        return peer_sum(x, self.exchange, in_parts=in_parts)

    def send_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Launch a GEMM that sends its result to all ranks for the `add_rms_norm` that must follow;
        False if no kernel supports it. x [rows, inputs], weight [outputs, inputs]."""
        assert not self._sent_bytes, "its words lie where this one's would"
        if len(weight) * x.itemsize > MAX_ROW_BYTES:
            return False
        num_bytes = len(x) * len(weight) * x.itemsize
        in_parts = self._goes_in_parts(num_bytes)
        if not send_product(x, weight, bias, self.exchange, in_parts=in_parts):
            return False
        self._sent_bytes = num_bytes
        return True

    def add_rms_norm(
        self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        """Add the sum of x over all ranks to `residual` in place; returns the norm of the result.
        x is None after `send_product`, whose products are then summed."""
        assert self._sent_bytes == (residual.nbytes if x is None else 0)
        self._sent_bytes = 0
        in_parts = self._goes_in_parts(residual.nbytes)
        return peer_add_rms_norm(x, residual, weight, eps, self.exchange, in_parts=in_parts)

    def _goes_in_parts(self, num_bytes: int) -> bool:
        num_peers = self.exchange.num_ranks - 1
        return num_peers > 1 and num_bytes * num_peers > _LARGEST_AT_ONCE_BYTES

    def close(self) -> None:
        """Unmap and free, once the other ranks have ended: until then they write to this memory,
        also after the last sum here is over."""
        for memory in self._mapped.values():
            memory.close()
        self._own.free()


def allocate_exchange(size: int, device: torch.device) -> CudaAllocation | None:
    """Exchange memory of one of `size` ranks; None where sums must go through NCCL alone."""
    if size & (size - 1) or size > MAX_RANKS or not _reads_all_peers(device):
        return None
    own = CudaAllocation(EXCHANGE_BYTES, device)
    prepare_exchange(own.tensor().zero_())  # before a peer has its handle: it may write at once
    return own


def connect_peers(
    own: CudaAllocation | None, handles: Sequence[bytes], rank: int, device: torch.device
) -> PeerReduce | None:
    """None if a rank has no exchange memory, and so no handle: all ranks decide alike."""
    if own is not None and all(handles):
        return PeerReduce(own, handles, rank, device)
    if own is not None:
        own.free()
    log.info("sums over %d GPUs go through NCCL alone", len(handles))
    return None


def _reads_all_peers(device: torch.device) -> bool:
    """Whether this GPU can access all other visible GPUs, which include those of the ranks."""
    others = (index for index in range(torch.cuda.device_count()) if index != device.index)
    return all(torch.cuda.can_device_access_peer(device, other) for other in others)


def _map(handle: bytes, device: torch.device) -> MappedMemory:
    """Map a peer's memory. Raises StartupFailed."""
    try:
        return map_handle(handle, device)
    except MappingFailed as error:
        raise StartupFailed(f"cannot map a rank's GPU memory: {error}") from error
