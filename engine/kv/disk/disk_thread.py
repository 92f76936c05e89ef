"""The thread that copies blocks between host memory and slots on disk, so that the engine's thread
never waits for a disk. It takes jobs and returns them, reads before writes: prompts wait for reads.

Until a job is returned the thread owns its slots, and the host blocks that it reads to; those that
it writes may change meanwhile, which the caller checks. Knows no block's place in a prompt.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ....core.engine_config import EngineConfig
from ....core.errors import StartupFailed
from ....core.request.token_ids import HASH_BYTES, BlockHash
from ..host_copies import CpuCopier, CudaCopier
from .disk_file import SlotFile, open_slots

_log = logging.getLogger(__name__)

_MEASURED_BYTES = 64 << 20
_CLOSE_S = 5.0  # a disk may hang
_NOBODY = BlockHash(bytes(HASH_BYTES))


class JobKind(enum.Enum):
    MEASURE = "measure"
    READ = "read"
    WRITE = "write"


@dataclass(slots=True, eq=False)
class DiskJob:
    """Slots, hashes and host blocks, index by index. Once returned: `failures`, reasons by index; a
    read ends with its first. `num_read_bytes` took `read_s`. `is_cancelled` ends it early."""

    kind: JobKind
    slots: Sequence[int] = ()
    hashes: Sequence[BlockHash] = ()
    host_blocks: Sequence[int] = ()
    is_cancelled: bool = False
    failures: dict[int, str] = field(default_factory=dict)
    num_read_bytes: int = 0
    read_s: float = 0.0

    def blocks(self) -> Iterator[tuple[int, BlockHash, int]]:
        return zip(self.slots, self.hashes, self.host_blocks, strict=True)


class DiskThread:
    """`view(host_block)`: its memory, while the thread owns it."""

    def __init__(self, slots: SlotFile, view: Callable[[int], memoryview]) -> None:
        self.num_slots = slots.num_slots
        self.block_bytes = slots.block_bytes
        self._slots = slots
        self._view = view
        self._changed = threading.Condition()
        self._reads: deque[DiskJob] = deque()
        self._writes: deque[DiskJob] = deque()
        self._ended: deque[DiskJob] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)

    def begin(self) -> None:
        """Start the thread; jobs may have been submitted already."""
        self._thread.start()

    def submit(self, job: DiskJob) -> None:
        with self._changed:
            (self._writes if job.kind is JobKind.WRITE else self._reads).append(job)
            self._changed.notify()

    def ended(self) -> list[DiskJob]:
        """The jobs that ended since the last call. Never waits."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def close(self) -> None:
        """It touches no memory any more, but if the disk hangs."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._slots.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._reads or self._writes)
                if self._is_closed:
                    return
                job = (self._reads or self._writes).popleft()
            self.do(job)

    def do(self, job: DiskJob) -> None:
        """Run a job on the thread; it is returned whatever happens."""
        kinds = {
            JobKind.MEASURE: self._measure,
            JobKind.READ: self._read,
            JobKind.WRITE: self._write,
        }
        try:
            kinds[job.kind](job)
        except Exception as error:  # or it would be lost, and a prompt may wait for the job
            _log.exception("a job of the KV tier on disk failed")
            job.failures |= dict.fromkeys(range(len(job.slots)), str(error))
        self._ended.append(job)

    def _read(self, job: DiskJob) -> None:
        began_s = time.monotonic()
        for n, (slot, block_hash, host_block) in enumerate(job.blocks()):
            if job.is_cancelled or self._is_closed:
                return
            if (failure := self._slots.read(slot, block_hash, self._view(host_block))) is not None:
                job.failures[n] = failure
                break
            job.num_read_bytes += self.block_bytes
        self._slots.settle()
        job.read_s = time.monotonic() - began_s

    def _write(self, job: DiskJob) -> None:
        for n, (slot, block_hash, host_block) in enumerate(job.blocks()):
            if (failure := self._slots.write(slot, block_hash, self._view(host_block))) is not None:
                job.failures[n] = failure
        if (failure := self._slots.settle()) is not None:
            job.failures = dict.fromkeys(range(len(job.slots)), failure)

    def _measure(self, job: DiskJob) -> None:
        """Measure how fast blocks are read, with some slots that are still empty."""
        block = memoryview(bytearray(os.urandom(self.block_bytes)))
        slots = range(min(self.num_slots, max(1, _MEASURED_BYTES // self.block_bytes)))
        failures = [self._slots.write(slot, _NOBODY, block) for slot in slots]
        failures.append(self._slots.settle())
        began_s = time.monotonic()
        failures += [self._slots.read(slot, _NOBODY, block) for slot in slots]
        failures.append(self._slots.settle())
        job.read_s = time.monotonic() - began_s
        job.num_read_bytes = len(slots) * self.block_bytes
        job.failures = {n: each for n, each in enumerate(failures) if each is not None}


def make_disk(
    config: EngineConfig, copier: CpuCopier | CudaCopier | None, fingerprint: str
) -> DiskThread | None:
    """The disk of `--kv-disk-path`; None without it. Raises StartupFailed."""
    if config.kv_disk_path is None:
        return None
    if copier is None:
        raise StartupFailed(
            "--kv-disk-path needs host memory for KV blocks, and there is none",
            hint="--swap-space above 0, with --enable-prefix-caching",
        )
    num_bytes = int(config.kv_disk_space * 2**30)
    slots = open_slots(config.kv_disk_path, num_bytes, copier.block_bytes, fingerprint)
    return DiskThread(slots, copier.view)
