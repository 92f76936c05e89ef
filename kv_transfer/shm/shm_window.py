"""The pool of another CPU engine of this host, mapped read-only, and the thread that copies it.

Two things are checked for every block:

    generation before and after    a copy that overlapped a rewrite is stale, however it looks
    copy == source, byte by byte   stands in for a checksum

With both memories in reach, comparing is stronger than any checksum over them, and cheaper than
CRC32 (5-7 against 3 GB/s): it finds a torn or misdirected copy and a writer that forgot to bump.
Like every check on this side it cannot know whether the source computed the right bytes.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Sequence

import numpy as np

from ...core.errors import HandoffFailed
from ...engine.kv import memfd
from ...engine.kv.block_pool import CANARY_BLOCK
from ...engine.kv.generations import GenerationsReader
from ...engine.kv.kv_memory import CpuKvMemory
from ..export.pool_address import PoolDescription
from ..window.block_pieces import BlockCut, Rows
from ..window.threaded_window import Pull, PullThread
from ..window.transport import PullOutcome

_log = logging.getLogger(__name__)
_MEASURED_BYTES = 4 << 20


class ShmWindow(PullThread):
    """A mapped pool, and the thread that copies from it."""

    transport = "shm"

    def __init__(
        self,
        description: PoolDescription,
        fds: Sequence[int],
        pool: CpuKvMemory,
        cut: BlockCut,
    ) -> None:
        """Map `fds` (they stay the caller's) and check the canary; raises HandoffFailed."""
        self._mapping = _SourceMapping(description, fds, cut)
        try:
            self._mapping.check_canary()
            self.gbytes_per_s = self._mapping.measure()
        except HandoffFailed:
            self._mapping.close()
            raise
        self._destination = cut.here(pool.view, pool.num_blocks)
        super().__init__(description.incarnation)

    def copy_blocks(self, pull: Pull) -> PullOutcome:
        sources, destinations = pull.pairs.ids.tolist()
        generations = pull.pairs.generations.tolist()
        for source, generation, ours in zip(sources, generations, destinations, strict=True):
            if pull.is_cancelled:
                return PullOutcome.CANCELLED
            outcome = self._mapping.copy(source, generation, self._destination[ours])
            if outcome is not PullOutcome.OK:
                return outcome
        return PullOutcome.OK

    def let_go(self) -> None:
        del self._destination  # or the pool could not be closed
        self._mapping.close()


class _SourceMapping:
    """The source's pool and generation page, mapped read-only."""

    def __init__(self, description: PoolDescription, fds: Sequence[int], cut: BlockCut) -> None:
        self._cut = cut
        self._description = description
        pool_fd, generations_fd = fds
        num_blocks, block_bytes = description.num_blocks, description.block_bytes
        self._memory: mmap.mmap = memfd.map_read_only(pool_fd, num_blocks * block_bytes)
        try:
            self._generations = GenerationsReader(generations_fd, num_blocks, description.engine)
        except HandoffFailed:
            self._memory.close()
            raise
        self._blocks = cut.there(self._memory, num_blocks)

    def check_canary(self) -> None:
        """Raises HandoffFailed if this is not the memory, or not the layout, that we think."""
        found = self._blocks[CANARY_BLOCK].tobytes()
        self._cut.require_canary(found, self._description.incarnation)

    def measure(self) -> float:
        """GB/s of copying out of this pool; the better of two rounds, as the first faults pages."""
        block_bytes = self._cut.piece_bytes
        num_blocks = min(len(self._blocks), max(1, _MEASURED_BYTES // block_bytes))
        scratch = np.empty_like(self._blocks[0])
        best_s = float("inf")
        for _ in range(2):
            start_s = time.perf_counter()
            for block in self._blocks[:num_blocks]:
                scratch[:] = block
            best_s = min(best_s, time.perf_counter() - start_s)
        return num_blocks * block_bytes / best_s / 1e9

    def copy(self, block_id: int, generation: int, target: Rows) -> PullOutcome:
        """Copy one block and verify it. The GIL is free during copy and comparison."""
        if not 0 <= block_id < len(self._blocks):
            _log.warning("a manifest names block %d of %d", block_id, len(self._blocks))
            return PullOutcome.FAILED
        source = self._blocks[block_id]
        if self._generations.read(block_id) != generation:
            return PullOutcome.STALE
        target[:] = source
        is_equal = np.array_equal(target, source)
        # x86 keeps loads in order; elsewhere numpy's retaking of the GIL is the fence.
        if self._generations.read(block_id) != generation:
            return PullOutcome.STALE
        if not is_equal:
            _log.error("block %d changed without a new generation", block_id)
            return PullOutcome.FAILED
        return PullOutcome.OK

    def close(self) -> None:
        del self._blocks
        self._memory.close()
        self._generations.close()
