"""The transport `shm`: between CPU engines of one host, whose pools lie in shared memory."""

from __future__ import annotations

from ...core.errors import HandoffFailed
from ...engine.kv.kv_memory import CpuKvMemory
from ..export.pool_address import received
from ..window.block_pieces import BlockCut, BlockPiece
from ..window.network_address import RemotePool
from .shm_window import ShmWindow


class ShmTransport:
    """Opens windows onto the pools of other engines of this user on this host."""

    name = "shm"

    def __init__(self, pool: CpuKvMemory) -> None:
        """`pool`: the local pool that blocks are copied to; it must outlive the windows."""
        self._pool = pool

    def connect(self, source: RemotePool, piece: BlockPiece | None = None) -> ShmWindow:
        """Raises HandoffFailed if the pool is not exported, is another user's, or does not fit.

        Blocks for up to a second if the exporter hangs.
        """
        cut = BlockCut.of(piece, self._pool.block_bytes)
        with received(source, cut.source_block_bytes) as (description, fds):
            if description.cuda is not None:
                raise HandoffFailed("its pool lies on a GPU")
            return ShmWindow(description, fds, self._pool, cut)
