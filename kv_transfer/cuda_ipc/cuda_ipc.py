"""The transports between GPUs of one host, best first. Both map the source's pool by its handle.

    cuda_ipc       on the puller's GPU, which reads it over NVLink or PCIe
    cuda_staged    on the source's GPU; copied to pinned host memory and from there to the puller's
                   GPU: slower by an order of magnitude, for pairs without peer access

cuda_window.py copies, checks and reports.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack

from ...core.errors import HandoffFailed
from ...engine.kv.cuda_memory import has_batches
from ...engine.kv.kv_memory import CudaKvMemory
from ..export.pool_address import CudaMemory, received
from ..window.block_pieces import BlockCut, BlockPiece
from ..window.network_address import RemotePool
from .cuda_ipc_copy import CopyMethod, DmaCopy, KernelCopy, StagedCopy
from .cuda_ipc_memory import find_gpu, map_memory, require_peer_access
from .cuda_window import CudaWindow

_LEAST_ENGINE_BYTES = 256 << 10  # smaller pieces are not worth measuring: 78 GB/s at 64 KiB


class _MappingTransport(ABC):
    """Opens windows onto the pools of engines on GPUs of this host."""

    name: str

    def __init__(self, kv: CudaKvMemory) -> None:
        """`kv`: the local pool that blocks are copied to."""
        self._kv = kv

    def connect(self, source: RemotePool, piece: BlockPiece | None = None) -> CudaWindow:
        """Raises HandoffFailed if the pool is not exported, is not on a GPU, or cannot be read.

        Blocks for up to a second, or until the first copy is compiled.
        """
        cut = BlockCut.of(piece, self._kv.block_bytes)
        with received(source, cut.source_block_bytes) as (description, fds):
            return CudaWindow(self.name, description, fds, self._kv, piece, self._reach)

    @abstractmethod
    def _reach(
        self, opened: ExitStack, memory: CudaMemory, num_bytes: int, piece: BlockPiece | None
    ) -> list[CopyMethod]:
        """See `cuda_window.Reach`."""


class CudaIpcTransport(_MappingTransport):
    """For pools that the local GPU can read."""

    name = "cuda_ipc"

    def __init__(self, kv: CudaKvMemory, method: str | None = None) -> None:
        """`method`: "kernel" or "copy-engine"; None measures and chooses, for each window."""
        super().__init__(kv)
        self._method = method

    def _reach(
        self, opened: ExitStack, memory: CudaMemory, num_bytes: int, piece: BlockPiece | None
    ) -> list[CopyMethod]:
        device = self._kv.tensor.device
        require_peer_access(memory.gpu_uuid, device)
        methods: list[type[KernelCopy | DmaCopy]] = [KernelCopy]
        cut = BlockCut.of(piece, self._kv.block_bytes)
        is_worth_it = cut.width >= _LEAST_ENGINE_BYTES or self._method == DmaCopy.name
        if is_worth_it and has_batches():
            methods.append(DmaCopy)
        wanted = [method for method in methods if self._method in (None, method.name)]
        if not wanted:
            raise HandoffFailed(f"this CUDA runtime has no {self._method} for block copies")
        mapping = map_memory(memory, num_bytes, device)
        opened.callback(mapping.close)
        return [method(mapping.address, device, piece) for method in wanted]


class CudaStagedTransport(_MappingTransport):
    """For pools on any GPU of this host; the context there takes some hundred MB."""

    name = "cuda_staged"

    def _reach(
        self, opened: ExitStack, memory: CudaMemory, num_bytes: int, piece: BlockPiece | None
    ) -> list[CopyMethod]:
        source, cut = find_gpu(memory.gpu_uuid), BlockCut.of(piece, self._kv.block_bytes)
        mapping = map_memory(memory, num_bytes, source)
        opened.callback(mapping.close)
        try:
            return [StagedCopy(mapping.address, source, cut)]
        except RuntimeError as error:  # no pinned memory left
            raise HandoffFailed(f"no staging memory: {error}") from error
