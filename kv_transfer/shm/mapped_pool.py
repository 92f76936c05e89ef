"""The pool of another CPU engine of this host: mapped read-only, canary checked, measured."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import numpy as np

from ...engine.kv import memfd
from ...engine.kv.block_pool import CANARY_BLOCK
from ...engine.kv.generations import GenerationsReader
from ..export.pool_address import PoolDescription
from ..window.block_pieces import BlockCut, Rows

_MEASURED_BYTES = 4 << 20


class MappedPool:
    """A source's pool and its generation page, until `close`.

    `blocks`: the piece of each block that `cut` selects. `gbytes_per_s`: of copying them.
    """

    def __init__(self, description: PoolDescription, fds: Sequence[int], cut: BlockCut) -> None:
        """Map `fds`, which the caller closes. Raises HandoffFailed if the canary is wrong."""
        pool_fd, generations_fd = fds
        num_blocks, block_bytes = description.num_blocks, description.block_bytes
        with contextlib.ExitStack() as mapped:
            memory = memfd.map_read_only(pool_fd, num_blocks * block_bytes)
            mapped.enter_context(memory)
            self.generations = GenerationsReader(generations_fd, num_blocks, description.engine)
            mapped.callback(self.generations.close)
            self.blocks = cut.there(memory, num_blocks)
            mapped.callback(delattr, self, "blocks")  # while it exists, the memory cannot be closed
            cut.require_canary(self.blocks[CANARY_BLOCK].tobytes(), description.incarnation)
            self.gbytes_per_s = _measured(self.blocks, cut.piece_bytes)
            self._mapped = mapped.pop_all()

    def close(self) -> None:
        self._mapped.close()


def _measured(blocks: Rows, piece_bytes: int) -> float:
    """GB/s of copying out of `blocks`; the better of two rounds, as the first faults pages."""
    num_blocks = min(len(blocks), max(1, _MEASURED_BYTES // piece_bytes))
    scratch = np.empty_like(blocks[0])
    best_s = float("inf")
    for _ in range(2):
        start_s = time.perf_counter()
        for block in blocks[:num_blocks]:
            scratch[:] = block
        best_s = min(best_s, time.perf_counter() - start_s)
    return num_blocks * piece_bytes / best_s / 1e9
