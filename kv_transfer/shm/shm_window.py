"""Copies out of the pool of another CPU engine of this host.

Two things are checked for every block:

    generation before and after    a copy that overlapped a rewrite is stale, however it looks
    copy == source, byte by byte   stands in for a checksum

With both memories mapped, comparing is stronger than any checksum over them, and cheaper than
CRC32 (5-7 against 3 GB/s): it finds a torn or misdirected copy and a writer that forgot to bump.
Like every check on this side it cannot detect that the source computed wrong bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from ...engine.kv.kv_memory import CpuKvMemory
from ..export.pool_address import PoolDescription
from ..window.block_pieces import BlockCut, Rows
from ..window.threaded_window import Pull, PullThread
from ..window.transport import PullOutcome
from .mapped_pool import MappedPool

_log = logging.getLogger(__name__)


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
        sources, destinations = pull.pairs.ids.tolist()
        generations = pull.pairs.generations.tolist()
        for source, generation, ours in zip(sources, generations, destinations, strict=True):
            if pull.is_cancelled:
                return PullOutcome.CANCELLED
            outcome = self._copy(source, generation, self._destination[ours])
            if outcome is not PullOutcome.OK:
                return outcome
        return PullOutcome.OK

    def release(self) -> None:
        del self._destination  # while it exists, the local pool cannot be closed
        self._source.close()

    def _copy(self, block_id: int, generation: int, target: Rows) -> PullOutcome:
        """Copy one block and verify it. The GIL is free during copy and comparison."""
        blocks, generations = self._source.blocks, self._source.generations
        if not 0 <= block_id < len(blocks):
            _log.warning("a manifest names block %d of %d", block_id, len(blocks))
            return PullOutcome.FAILED
        source = blocks[block_id]
        if generations.read(block_id) != generation:
            return PullOutcome.STALE
        target[:] = source
        is_equal = np.array_equal(target, source)
        # x86 keeps loads in order; elsewhere numpy's retaking of the GIL is the fence.
        if generations.read(block_id) != generation:
            return PullOutcome.STALE
        if not is_equal:
            _log.error("block %d changed without a new generation", block_id)
            return PullOutcome.FAILED
        return PullOutcome.OK
