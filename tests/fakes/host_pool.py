"""A KV pool in shared host memory without tensors: as much as `shm` needs, and quick to create."""

from __future__ import annotations

import os
from collections.abc import Sequence

from baton.engine.kv import memfd
from baton.engine.kv.block_pool import CANARY_BLOCK
from baton.engine.kv.generations import SharedGenerations
from baton.engine.kv.kv_memory import canary_bytes
from baton.kv_transfer.export.pool_address import PoolDescription, PoolExporter, PoolPart

from .access import ENGINE_KEY


class HostPool:
    """Blocks in a sealed memfd with their generation page; the canary is written."""

    def __init__(self, incarnation: str, num_blocks: int, block_bytes: int) -> None:
        self.incarnation = incarnation
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.fd, self._memory = memfd.create("fake-pool", num_blocks * block_bytes)
        self.view = memoryview(self._memory)
        self.generations = SharedGenerations(num_blocks, incarnation)
        self.block(CANARY_BLOCK)[:] = canary_bytes(incarnation, block_bytes)

    def block(self, block_id: int) -> memoryview:
        return self.view[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]

    def close(self) -> None:
        """Raises BufferError if there are still references to the memory."""
        self.view.release()
        self._memory.close()
        os.close(self.fd)
        self.generations.close()


def export_host_pool(
    incarnation: str, pool: HostPool, generations_fd: int, parts: Sequence[PoolPart] = ()
) -> PoolExporter:
    """Export `pool` under this id, as an engine does."""
    shape = (pool.block_bytes, pool.num_blocks)
    description = PoolDescription(incarnation, *shape, parts=tuple(parts))
    return PoolExporter(description, [pool.fd, generations_fd], ENGINE_KEY)
