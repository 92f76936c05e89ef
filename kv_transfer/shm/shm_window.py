"""Copies out of the pool of another CPU engine of this host.

Two things are checked for every block of a pull:

    generation before and after    a copy that overlapped a rewrite is stale, however it looks
    copy == source, byte by byte   stands in for a checksum

With both memories mapped, comparing is stronger than any checksum over them, and cheaper than
CRC32 (5-7 against 3 GB/s): it finds a torn or misdirected copy and a writer that forgot to bump.
Like every check on this side it cannot detect that the source computed wrong bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.errors import HandoffFailed
from ...engine.kv.kv_memory import CpuKvMemory
from ..export.pool_address import PoolDescription
from ..window.block_pieces import BlockCut
from ..window.threaded_window import Pull, PullThread
from ..window.transport import PullOutcome
from .mapped_pool import MappedPool


class ShmWindow(PullThread):
    """A source's mapped pool and the thread that copies out of it."""

    transport = "shm"

    def __init__(
        self, description: PoolDescription, fds: Sequence[int], pool: CpuKvMemory, cut: BlockCut
    ) -> None:
        """Map `fds`, which the caller closes; raises HandoffFailed."""
        self._source = MappedPool(description, fds, cut)
        self.gbytes_per_s = self._source.gbytes_per_s
        self._destination = cut.here(pool.view, pool.num_blocks)
        super().__init__(description.incarnation)

    def copy_blocks(self, pull: Pull) -> PullOutcome:
        """The GIL is free during copies and comparisons."""
        blocks, generations, pairs = self._source.blocks, self._source.generations, pull.pairs
        sources, destinations = pairs.ids.tolist()
        if not 0 <= min(sources) <= max(sources) < len(blocks):
            raise HandoffFailed(f"a manifest names a block outside the {len(blocks)} of its pool")
        if not generations.match(pairs.ids[0], pairs.generations):
            return PullOutcome.STALE
        torn = []
        for source, ours in zip(sources, destinations, strict=True):
            if pull.is_cancelled:
                return PullOutcome.CANCELLED
            target = self._destination[ours]
            target[:] = blocks[source]
            if not np.array_equal(target, blocks[source]):
                torn.append(source)
        # x86 keeps loads in order; elsewhere numpy's retaking of the GIL is the fence.
        if not generations.match(pairs.ids[0], pairs.generations):
            return PullOutcome.STALE
        if torn:
            raise HandoffFailed(f"blocks {torn} changed without new generations")
        return PullOutcome.OK

    def release(self) -> None:
        del self._destination  # while it exists, the local pool cannot be closed
        self._source.close()
