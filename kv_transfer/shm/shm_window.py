"""The pool of another CPU engine of this host, mapped read-only, and the thread that copies it.

Two things are checked for every block:

    generation before and after    a copy that overlapped a rewrite is stale, however it looks
    copy == source, byte by byte   stands in for a checksum

With both memories in reach, comparing is stronger than any checksum over them, and cheaper than
CRC32 (5-7 against 3 GB/s): it finds a torn or misdirected copy and a writer that forgot to bump.
Like every check on this side it cannot know whether the source computed the right bytes.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence

import numpy as np

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
    """The source's pool and generation page, mapped read-only, and the thread that copies."""

    transport = "shm"

    def __init__(
        self,
        description: PoolDescription,
        fds: Sequence[int],
        pool: CpuKvMemory,
        cut: BlockCut,
    ) -> None:
        """Map `fds` (they stay the caller's) and check the canary; raises HandoffFailed."""
        pool_fd, generations_fd = fds
        num_blocks, block_bytes = description.num_blocks, description.block_bytes
        with contextlib.ExitStack() as mapped:
            memory = memfd.map_read_only(pool_fd, num_blocks * block_bytes)
            mapped.enter_context(memory)
            self._generations = GenerationsReader(generations_fd, num_blocks, description.engine)
            mapped.callback(self._generations.close)
            self._blocks = cut.there(memory, num_blocks)
            mapped.callback(delattr, self, "_blocks")  # or the memory could not be closed
            cut.require_canary(self._blocks[CANARY_BLOCK].tobytes(), description.incarnation)
            self.gbytes_per_s = self._measure(cut.piece_bytes)
            self._mapped = mapped.pop_all()
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

    def let_go(self) -> None:
        del self._destination  # or the pool could not be closed
        self._mapped.close()

    def _measure(self, block_bytes: int) -> float:
        """GB/s of copying out of this pool; the better of two rounds, as the first faults pages."""
        num_blocks = min(len(self._blocks), max(1, _MEASURED_BYTES // block_bytes))
        scratch = np.empty_like(self._blocks[0])
        best_s = float("inf")
        for _ in range(2):
            start_s = time.perf_counter()
            for block in self._blocks[:num_blocks]:
                scratch[:] = block
            best_s = min(best_s, time.perf_counter() - start_s)
        return num_blocks * block_bytes / best_s / 1e9

    def _copy(self, block_id: int, generation: int, target: Rows) -> PullOutcome:
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
