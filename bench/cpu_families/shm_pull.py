"""The hand-off's copy on a CPU: a pull over `shm` beside a plain copy of the same bytes."""

from __future__ import annotations

import os
import queue
import secrets

import numpy as np

from baton.engine.kv import memfd
from baton.engine.kv.block_pool import CANARY_BLOCK, BlockRefs
from baton.engine.kv.generations import SharedGenerations
from baton.engine.kv.kv_memory import canary_bytes
from baton.kv_transfer.export.pool_address import PoolDescription, PoolExporter
from baton.kv_transfer.shm.shm import ShmTransport
from baton.kv_transfer.shm.shm_window import ShmWindow
from baton.kv_transfer.window.block_pairs import BlockPairs
from baton.kv_transfer.window.network_address import KEY_BYTES, RemotePool, pair_key
from baton.kv_transfer.window.transport import PullOutcome

from ..floors.figures import Figure, time_s

_INCARNATION = "b" * 32
_TOTAL_BYTES = 64 << 20
# The bundled model's block in float32, and that of an 8B model in bf16.
_BLOCK_BYTES = {"96 KiB": 96 << 10, "2 MiB": 2 << 20}
_REPEATS = 9


class _Pool:
    """Shared memory laid out as a KV pool."""

    def __init__(self, block_bytes: int, num_blocks: int) -> None:
        self.block_bytes = block_bytes
        self.num_blocks = num_blocks
        self.fd, self.memory = memfd.create("baton-bench", num_blocks * block_bytes)
        self.view = memoryview(self.memory)
        np.frombuffer(self.view, np.uint8)[:] = 7  # touches every page

    def close(self) -> None:
        self.view.release()
        self.memory.close()
        os.close(self.fd)


def measure() -> list[Figure]:
    """GB/s by block size. Both ends are in this process, which does not affect the copy."""
    return [_pull(name, block_bytes) for name, block_bytes in _BLOCK_BYTES.items()]


def _pull(name: str, block_bytes: int) -> Figure:
    num_pulled = _TOTAL_BYTES // block_bytes
    source, target = (_Pool(block_bytes, num_pulled + 2) for _ in range(2))
    canary = canary_bytes(_INCARNATION, block_bytes)
    source.view[CANARY_BLOCK * block_bytes : (CANARY_BLOCK + 1) * block_bytes] = canary
    generations = SharedGenerations(source.num_blocks, _INCARNATION)
    key, puller = secrets.token_bytes(KEY_BYTES), secrets.token_hex(16)
    description = PoolDescription(_INCARNATION, block_bytes, source.num_blocks)
    exporter = PoolExporter(description, [source.fd, generations.fd], key)
    access = RemotePool(_INCARNATION, "", 0, pair_key(key, puller), False, puller)
    window = ShmTransport(target).connect(access)
    block_ids = range(2, num_pulled + 2)
    refs = BlockRefs.pack(block_ids, map(generations.read, block_ids))
    pairs = BlockPairs.join(refs, block_ids)
    num_bytes = num_pulled * block_bytes
    try:
        _pull_all(window, pairs)
        samples = tuple(
            num_bytes / time_s(lambda: _pull_all(window, pairs)) / 1e9 for _ in range(_REPEATS)
        )
        ceiling = num_bytes / _copy_s(source, target) / 1e9
    finally:
        window.close()
        window.join()
        exporter.close()
        generations.close()
        source.close()
        target.close()
    return Figure(
        f"shm pull, {name} blocks, verified", "GB/s", samples, ceiling, "one memcpy, unverified"
    )


def _pull_all(window: ShmWindow, pairs: BlockPairs) -> None:
    done: queue.SimpleQueue[PullOutcome] = queue.SimpleQueue()
    window.start_pull(pairs, done.put)
    assert done.get() is PullOutcome.OK


def _copy_s(source: _Pool, target: _Pool) -> float:
    """The best time of one plain copy of all pulled blocks, in seconds."""
    skip = 2 * source.block_bytes
    theirs = np.frombuffer(source.view, np.uint64)[skip // 8 :]
    ours = np.frombuffer(target.view, np.uint64)[skip // 8 :]

    def copy() -> None:
        ours[:] = theirs

    return min(time_s(copy) for _ in range(_REPEATS))
