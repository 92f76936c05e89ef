"""The prefix cache on disk, for blocks that host memory evicts: block hash -> slot.

    write   while host memory is more than half full: the blocks that were entered there first, as
            they are evicted first. Nothing is held for it: a block that got new content before its
            write ended, by its generation, is not entered. Blocks evicted before are dropped
    read    to host blocks that are taken first, all or none. The longest valid prefix is entered in
            host memory; an invalid slot is dropped. A read that misses its deadline fails, and its
            host blocks are freed once the thread has returned them
    forget  the slowest read, after a minute without one: it may be the reason for that

The least recently used slot is evicted first, of one chain the last. Reading a slot keeps it.
Used by the engine's thread; the disk by disk_thread.py.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from ....core.ports import Clock
from ....core.request.token_ids import BlockHash
from ..host_blocks import Family, HostBlocks, found_prefix
from ..host_copies import CopyCost
from .disk_thread import DiskJob, DiskThread, JobKind

_log = logging.getLogger(__name__)

_READ_SHARE = 4  # at most one in so many host blocks is being read
_MOST_READ = 2048
_MOST_WRITING = 64
_JOB_BLOCKS = 16  # of one write, which a read may have to wait for
_MOST_BACKLOG = 1 << 16  # hashes of blocks to write
_MOST_LOOKED_AT = 256  # of them at a time
_LEAST_WAIT_S = 1.0
_PATIENCE = 3.0  # times the estimate of a read
_QUIET_S = 60.0  # between two warnings
_FORGET_S = 60.0  # without a read, until the slowest one is forgotten


@dataclass(frozen=True, slots=True)
class DiskCounts:
    """Counters since the tier was created, except `num_blocks`: those entered now.

    `num_hit_blocks` were read for a prompt. `num_failures`: blocks that could not be written or
    read, or differed from what was written.
    """

    num_blocks: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    num_hit_blocks: int = 0
    num_failures: int = 0


@dataclass(slots=True, eq=False)
class DiskRead:
    """`num_good`: how many of the first blocks were read, once it has ended; None: it has not."""

    hashes: Sequence[BlockHash]
    parent: BlockHash | None
    began_s: float
    deadline_s: float
    host_blocks: list[int] = field(default_factory=list)
    num_good: int | None = None


class DiskTier:
    """The disk behind the host memory of one engine."""

    def __init__(self, disk: DiskThread, blocks: HostBlocks, clock: Clock) -> None:
        self.cost = CopyCost()  # of reads
        self._disk = disk
        self._blocks = blocks
        self._clock = clock
        self._slot_of: dict[BlockHash, int] = {}  # least recently used first
        self._free = [*reversed(range(disk.num_slots))]
        self._backlog: deque[BlockHash] = deque(maxlen=_MOST_BACKLOG)  # the oldest are dropped
        self._writing: dict[BlockHash, int] = {}  # its host block's generation
        self._reads: dict[DiskJob, DiskRead] = {}
        self._num_reading = 0  # blocks
        self._refused: list[DiskRead] = []
        self._num_overdue = 0
        self._quiet_until_s = -math.inf
        self._forget_at_s = clock.monotonic_s() + _FORGET_S
        self._num_blocks_out = self._num_blocks_in = self._num_failures = 0
        disk.submit(DiskJob(JobKind.MEASURE))

    @property
    def counts(self) -> DiskCounts:
        size = self._disk.block_bytes
        return DiskCounts(
            len(self._slot_of),
            self._num_blocks_out * size,
            self._num_blocks_in * size,
            self._num_blocks_in,
            self._num_failures,
        )

    def match(self, hashes: Iterable[BlockHash], but: Container[BlockHash]) -> list[int]:
        """The slots of the longest prefix of `hashes` that is on disk, and neither in host memory
        nor in `but`."""
        here = self._blocks.hashes
        on_disk = takewhile(lambda each: each not in here and each not in but, hashes)
        return found_prefix(on_disk, self._slot_of.get)

    @property
    def room(self) -> int:
        """How many blocks may be read now."""
        if self._num_overdue:
            return 0
        most = min(_MOST_READ, self._blocks.num_blocks // _READ_SHARE)
        return max(0, most - self._num_reading)

    def seconds(self, num_blocks: int) -> float:
        """The time until `num_blocks` are read, after those that are being read."""
        if not num_blocks or self.cost.bytes_per_s is None:
            return math.inf if num_blocks else 0.0
        return self.cost.seconds((self._num_reading + num_blocks) * self._disk.block_bytes)

    def read(
        self,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        spared: Collection[Family],
    ) -> DiskRead:
        """Read blocks that continue `parent`; families `spared` are not evicted for them. `poll`
        returns the read once it has ended, also if there was no room."""
        now_s, wait_s = self._clock.monotonic_s(), self.seconds(len(hashes))
        deadline_s = now_s + max(_LEAST_WAIT_S, _PATIENCE * wait_s)
        read = DiskRead(hashes, parent, now_s, deadline_s)
        taken = self._blocks.take(len(hashes), spared)
        if len(taken) < len(hashes):
            self._blocks.give_back(taken)
            self._refused.append(read)
            return read
        self.use(hashes)
        slots = [self._slot_of[each] for each in hashes]
        job = DiskJob(JobKind.READ, slots, hashes, taken)
        read.host_blocks = taken
        self._reads[job] = read
        self._num_reading += len(hashes)
        self._disk.submit(job)
        return read

    def poll(self) -> list[DiskRead]:
        """Process ended jobs and start writes; returns the reads that ended. Never waits."""
        ended, self._refused = self._refused, []
        for read in ended:
            read.num_good = 0
        for job in self._disk.ended():
            if job.kind is JobKind.WRITE:
                self._end_write(job)
            elif job.kind is JobKind.READ:
                ended += self._end_read(job)
            elif job.failures:
                why = next(iter(job.failures.values()))
                self._warn(f"its speed cannot be measured, and it is not read: {why}")
            else:
                self._observe(job.num_read_bytes, job.read_s)
        ended += self._give_up()
        if self._clock.monotonic_s() >= self._forget_at_s and not self._num_overdue:
            self._forget_at_s = self._clock.monotonic_s() + _FORGET_S
            self.cost.forget_slowest()
        self._write()
        return ended

    # -- out -------------------------------------------------------------------------------------

    def entered(self, hashes: Sequence[BlockHash]) -> None:
        """The blocks were copied to host memory from the device."""
        self.use(hashes)
        self._backlog += hashes

    def use(self, hashes: Sequence[BlockHash]) -> None:
        """Record a use of a chain, of which the last block is evicted first."""
        for each in reversed(hashes):
            if (slot := self._slot_of.pop(each, None)) is not None:
                self._slot_of[each] = slot

    def _write(self) -> None:
        """Write the blocks that were entered in host memory first, if that is half full."""
        if 2 * self._blocks.num_free > self._blocks.num_blocks:
            return
        most, found = min(_JOB_BLOCKS, _MOST_WRITING - len(self._writing)), dict[BlockHash, None]()
        for _ in range(min(len(self._backlog), _MOST_LOOKED_AT)):
            if len(found) >= most:
                break
            each = self._backlog.popleft()
            if (
                each in self._blocks.hashes
                and each not in self._slot_of
                and each not in self._writing
            ):
                found[each] = None
        hashes = [*found]
        while len(self._free) < len(hashes) and self._slot_of:
            self._drop(next(iter(self._slot_of)))
        del hashes[len(self._free) :]  # all slots are being written
        if hashes:
            self._start_write(hashes)

    def _start_write(self, hashes: Sequence[BlockHash]) -> None:
        slots = [self._free.pop() for _ in hashes]
        host_blocks = [self._blocks.match([each])[0] for each in hashes]
        generations = map(self._blocks.generation, host_blocks)
        self._writing.update(zip(hashes, generations, strict=True))
        self._disk.submit(DiskJob(JobKind.WRITE, slots, hashes, host_blocks))

    def _end_write(self, job: DiskJob) -> None:
        for n, (slot, block_hash, host_block) in enumerate(job.blocks()):
            failure = job.failures.get(n)
            is_same = self._blocks.generation(host_block) == self._writing.pop(block_hash)
            if failure is None and is_same:
                self._slot_of[block_hash] = slot
                self._num_blocks_out += 1
            else:
                self._free.append(slot)
            if failure is not None:
                self._fail(failure)

    # -- in --------------------------------------------------------------------------------------

    def _end_read(self, job: DiskJob) -> list[DiskRead]:
        """The read that has ended, unless it missed its deadline before."""
        for n, failure in job.failures.items():
            self._fail(failure)
            self._drop(job.hashes[n])
        read = self._reads.pop(job, None)
        if read is None:
            self._num_overdue -= 1
            self._blocks.give_back(job.host_blocks)
            return []
        if job.num_read_bytes:
            self._observe(job.num_read_bytes, job.read_s)
        self._num_reading -= len(job.hashes)
        n = read.num_good = job.num_read_bytes // self._disk.block_bytes
        self._num_blocks_in += n
        if n:
            self._blocks.enter(job.host_blocks[:n], job.hashes[:n], read.parent)
        self._blocks.give_back(job.host_blocks[n:])
        return [read]

    def _give_up(self) -> list[DiskRead]:
        """Fail the reads that missed their deadlines."""
        now_s = self._clock.monotonic_s()
        late = [(job, read) for job, read in self._reads.items() if now_s > read.deadline_s]
        for job, read in late:
            del self._reads[job]
            job.is_cancelled = True
            self._num_overdue += 1
            self._num_reading -= len(job.hashes)
            self._observe(len(job.hashes) * self._disk.block_bytes, now_s - read.began_s)
            read.num_good = 0
            self._warn(
                f"{len(job.hashes)} blocks were not read within {now_s - read.began_s:.1f} s"
            )
        return [read for _, read in late]

    def _observe(self, num_bytes: int, seconds: float) -> None:
        self.cost.observe(num_bytes, seconds)
        self._forget_at_s = self._clock.monotonic_s() + _FORGET_S

    # -- slots -----------------------------------------------------------------------------------

    def _drop(self, block_hash: BlockHash) -> None:
        if (slot := self._slot_of.pop(block_hash, None)) is not None:
            self._free.append(slot)

    def _fail(self, why: str) -> None:
        self._num_failures += 1
        self._warn(f"a block is dropped ({self._num_failures} so far): {why}")

    def _warn(self, what: str) -> None:
        if (now_s := self._clock.monotonic_s()) >= self._quiet_until_s:
            self._quiet_until_s = now_s + _QUIET_S
            _log.warning("--kv-disk-path: %s", what)
