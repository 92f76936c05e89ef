"""Which slot holds which block: whatever is written, read, lost or late, a block entered in host
memory is the requested one, and every host block and slot has one owner.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from effort import examples
from fakes.clock import FakeClock
from fakes.tiers.disk import Fault, MemoryFile, PlayedDisk, memory_disk
from fakes.tiers.host_copier import HostBytes
from hypothesis import given
from hypothesis import strategies as st

from baton.core.engine_config import EngineConfig
from baton.core.errors import StartupFailed
from baton.core.request.token_ids import BlockHash
from baton.engine.kv.disk import disk_tier
from baton.engine.kv.disk.disk_file import open_slots, slot_bytes_of
from baton.engine.kv.disk.disk_thread import DiskJob, DiskThread, JobKind, make_disk
from baton.engine.kv.disk.disk_tier import DiskRead, DiskTier
from baton.engine.kv.host_blocks import HostBlocks

BLOCK = 64


def hash_of(chain: int, n: int) -> BlockHash:
    return BlockHash(bytes([chain, n]).rjust(16, b"."))


def content_of(block_hash: BlockHash) -> bytes:
    return random.Random(block_hash).randbytes(BLOCK)


class Rig:
    """`num_host` host blocks and `num_disk` slots, whose contents are compared with the hashes."""

    def __init__(self, num_host: int = 32, num_disk: int = 40) -> None:
        self.blocks = HostBlocks()
        self.blocks.grow(num_host)
        self.blocks.on_evict = lambda hashes: None
        self.memory = HostBytes(num_host, BLOCK)
        self.file = memory_disk(num_disk, BLOCK)
        self.disk = PlayedDisk(self.file, num_disk, BLOCK, self.memory.view)
        self.clock = FakeClock()
        self.tier = DiskTier(self.disk, self.blocks, self.clock)
        self.reads: list[DiskRead] = []
        self.poll()

    def enter(self, chain: int, length: int) -> None:
        """Enter the first `length` blocks of a chain in host memory, or as many as have room."""
        for n in range(length):
            if self.blocks.match([hash_of(chain, n)]) or self.is_expected(hash_of(chain, n)):
                continue
            for block in self.blocks.take(1, self.blocks.families(self.hashes(chain, length))):
                self.memory[block] = content_of(hash_of(chain, n))
                parent = hash_of(chain, n - 1) if n else None
                self.blocks.enter([block], [hash_of(chain, n)], parent)
                self.tier.entered([hash_of(chain, n)])

    def is_expected(self, block_hash: BlockHash) -> bool:
        return any(block_hash in read.hashes for read in self.reads)

    def hashes(self, chain: int, length: int) -> list[BlockHash]:
        return [hash_of(chain, n) for n in range(length)]

    def read(self, chain: int, length: int) -> DiskRead | None:
        """Read the blocks on disk that follow the chain's blocks in host memory."""
        hashes = self.hashes(chain, length)
        num_here = len(self.blocks.match(hashes))
        rest = hashes[num_here:]
        expected = {each for read in self.reads for each in read.hashes}
        found = len(self.tier.match(rest, expected)[: self.tier.room])
        if not found:
            return None
        spared = self.blocks.families(hashes)
        parent = hashes[num_here - 1] if num_here else None
        read = self.tier.read(rest[:found], parent, spared)
        self.reads.append(read)
        return read

    def poll(self) -> Sequence[DiskRead]:
        ended = self.tier.poll()
        for read in ended:
            self.reads.remove(read)
            assert read.num_good is not None
        self.check()
        return ended

    def check(self) -> None:
        """Every block found has the right content; each block and slot has one owner."""
        for block_hash, block in self.blocks._block_of.items():
            assert self.memory[block] == content_of(block_hash)
        tier, blocks = self.tier, self.blocks
        slots = [*tier._slot_of.values()]
        assert len({*slots, *tier._free}) == len(slots) + len(tier._free), "a slot has two owners"
        assert len(slots) + len(tier._free) + len(tier._writing) == self.disk.num_slots
        free = blocks._free
        assert len({*free, *blocks._block_of.values()}) == len(free) + len(blocks)
        num_reading = sum(len(job.host_blocks) for job in self.held_by_reads())
        num_held = blocks.num_blocks - len(free) - len(blocks)
        assert num_held == num_reading <= blocks.num_blocks // 4, "nothing is held for a write"
        assert len(tier._writing) <= 64

    def held_by_reads(self) -> list[DiskJob]:
        jobs = [*self.disk._reads, *self.disk._ended]
        return [job for job in jobs if job.kind is JobKind.READ]


@examples(80, 600)
@given(st.randoms(use_true_random=False), st.booleans())
def test_every_block_is_what_it_should_be(rng: random.Random, is_faulty: bool) -> None:
    rig = Rig(rng.choice([8, 16, 32]), rng.choice([1, 5, 40]))
    faults = [*Fault, *[Fault.NONE] * 10] if is_faulty else [Fault.NONE]
    rig.file.draw = lambda: rng.choice(faults)
    rig.disk.draw = lambda: rng.randrange(3)
    for _ in range(60):
        match rng.randrange(5):
            case 0 | 1:
                rig.enter(rng.randrange(5), rng.randrange(1, 8))
            case 2:
                rig.read(rng.randrange(5), rng.randrange(1, 8))
            case 3:
                rig.clock.advance(rng.choice([0.0, 0.1, 5.0]))
            case _:
                rig.poll()
    rig.disk.draw = lambda: 1000
    rig.file.draw = lambda: Fault.NONE
    for _ in range(5):
        rig.poll()
    assert not rig.reads and not rig.tier._writing and not rig.tier._num_overdue
    assert rig.tier._num_reading == 0
    if not is_faulty:
        assert not rig.tier.counts.num_failures


def test_the_oracle_of_hits() -> None:
    """With room for all blocks and a disk that keeps up, every evicted block is found."""
    rig = Rig(num_host=32, num_disk=500)
    for chain in range(40):
        rig.enter(chain, 3)
        rig.poll()
        rig.poll()
    num_found = 0
    for chain in range(40):
        hashes = rig.hashes(chain, 3)
        in_host = len(rig.blocks.match(hashes))
        assert in_host + len(rig.tier.match(hashes[in_host:], ())) == 3
        num_found += 3 - in_host
    assert num_found > 80 and rig.tier.counts.bytes_out >= num_found * BLOCK


def test_what_is_used_stays_longest() -> None:
    rig = Rig(num_host=16, num_disk=24)
    for chain in range(5):
        rig.enter(chain, 4)
        for _ in range(3):
            rig.poll()
    first, second = rig.hashes(0, 4), rig.hashes(1, 4)
    rig.tier.use(first)
    for chain in (5, 6):
        rig.enter(chain, 4)
        for _ in range(3):
            rig.poll()
    slots = rig.tier._slot_of
    assert all(each in slots for each in first) and not all(each in slots for each in second)


def test_what_is_evicted_before_its_turn_is_dropped() -> None:
    rig = Rig(num_host=160, num_disk=500)
    rig.disk.draw = lambda: 0
    for chain in range(80):
        rig.enter(chain, 6)
        rig.poll()
    assert len(rig.tier._writing) == 64 and rig.tier.counts.num_blocks == 0
    rig.disk.draw = lambda: 1000
    for _ in range(20):
        rig.poll()
    assert rig.tier.counts.num_blocks == 160, "what is in host memory; the first 64 were torn"
    assert not rig.tier.counts.num_failures


def test_the_backlog_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "_MOST_BACKLOG", 10)
    rig = Rig(num_host=160, num_disk=500)
    rig.disk.draw = lambda: 0
    for chain in range(30):
        rig.enter(chain, 4)
    rig.disk.draw = lambda: 1000
    for _ in range(20):
        rig.poll()
    assert rig.tier.counts.num_blocks == 10


def test_what_is_on_disk_is_not_written_again() -> None:
    rig = Rig(num_host=32, num_disk=500)
    for _ in range(6):
        for chain in range(10):
            rig.read(chain, 4)
            rig.poll()
            rig.enter(chain, 4)
            rig.poll()
    assert rig.tier.counts.bytes_out <= 40 * BLOCK


def test_no_room_in_host_memory_is_told_like_a_failed_read() -> None:
    rig = Rig(num_host=16, num_disk=50)
    for chain in range(12):
        rig.enter(chain, 3)
        rig.poll()
        rig.poll()
    hashes = rig.hashes(0, 3)
    assert len(rig.tier.match(hashes, ())) == 3
    everything = {*rig.blocks.families([*rig.blocks._block_of])}
    read = rig.tier.read(rig.hashes(0, 3), None, everything)
    rig.reads.append(read)
    assert [one.num_good for one in rig.poll()] == [0]


def test_a_slot_that_is_not_whole_is_free_again() -> None:
    rig = Rig(num_host=32, num_disk=100)
    for chain in range(20):
        rig.enter(chain, 3)
        rig.poll()
        rig.poll()
    first, second, third = rig.hashes(0, 3)
    slots = rig.tier._slot_of
    rig.file.content[slots[second] * slot_bytes_of(BLOCK)] ^= 1
    read = rig.read(0, 3)
    assert rig.poll() == [read] and read is not None and read.num_good == 1
    assert first in slots and second not in slots and third in slots
    assert rig.blocks.match([first]) and not rig.blocks.match([second])
    assert rig.tier.counts.num_failures == 1


def test_a_late_read_is_given_up_and_the_rate_that_it_had_counts() -> None:
    rig = Rig(num_host=32, num_disk=100)
    for chain in range(20):
        rig.enter(chain, 3)
        rig.poll()
        rig.poll()
    before_s = rig.tier.seconds(3)
    rig.disk.draw = lambda: 0
    read = rig.read(0, 3)
    assert read is not None
    rig.clock.advance(0.9)
    assert not rig.poll()
    rig.clock.advance(0.2)
    assert rig.poll() == [read] and read.num_good == 0
    assert rig.tier.room == 0 and rig.tier.seconds(3) > before_s
    rig.disk.draw = lambda: 1000
    assert not rig.poll() and rig.tier.room > 0
    assert not rig.blocks.match(rig.hashes(0, 3)), "what came too late is nobody's"
    assert rig.tier.seconds(3) > before_s
    rig.clock.advance(59.0)
    rig.poll()
    assert rig.tier.seconds(3) > before_s
    rig.clock.advance(2.0)
    rig.poll()
    assert rig.tier.seconds(3) == before_s, "one that was late would end all reading"
    rig.clock.advance(61.0)
    rig.poll()
    assert rig.tier.seconds(3) == before_s, "the only one that was measured"


def test_warnings_are_few(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.file.draw = lambda: Fault.NO_ROOM
    for chain in range(30):
        rig.enter(chain, 4)
        rig.poll()
        rig.clock.advance(1.0)
    assert rig.tier.counts.num_failures > 20
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    rig.clock.advance(60.0)
    rig.enter(40, 6)
    rig.poll()
    rig.poll()
    assert len(caplog.records) == 2


def test_a_disk_that_fails_from_the_start_is_not_read(caplog: pytest.LogCaptureFixture) -> None:
    blocks = HostBlocks()
    file = MemoryFile(40 * slot_bytes_of(BLOCK), lambda: Fault.ERROR)
    tier = DiskTier(PlayedDisk(file, 40, BLOCK, HostBytes(1, BLOCK).view), blocks, FakeClock())
    tier.poll()
    assert tier.seconds(1) == float("inf") and "cannot be measured" in caplog.text


# -- the thread -----------------------------------------------------------------------------------


def test_the_thread_writes_and_reads_a_real_file(tmp_path: Path) -> None:
    memory = HostBytes(8, BLOCK)
    disk = DiskThread(
        open_slots(str(tmp_path), 20 * slot_bytes_of(BLOCK), BLOCK, "model"), memory.view
    )
    hashes = [hash_of(0, n) for n in range(4)]
    for n in range(4):
        memory[n] = content_of(hashes[n])
    disk.submit(DiskJob(JobKind.MEASURE))
    disk.submit(DiskJob(JobKind.WRITE, range(4), hashes, range(4)))
    disk.begin()
    [measured, written] = collect(disk, 2)
    assert measured.num_read_bytes and measured.read_s > 0 and not written.failures
    disk.submit(DiskJob(JobKind.READ, range(4), hashes, range(4, 8)))
    [read] = collect(disk, 1)
    assert read.num_read_bytes == 4 * BLOCK
    assert [memory[4 + n] for n in range(4)] == [*map(content_of, hashes)]
    disk.close()
    assert not [one for one in threading.enumerate() if one.name == "kv-disk"]


def collect(disk: DiskThread, n: int) -> list[DiskJob]:
    jobs: list[DiskJob] = []
    done = threading.Event()
    for _ in range(2000):
        if len(jobs := [*jobs, *disk.ended()]) == n:
            return jobs
        done.wait(0.01)
    raise AssertionError("no end")


def test_reads_go_before_writes() -> None:
    rig = Rig()
    order: list[JobKind] = []
    rig.disk.do = lambda job: order.append(job.kind)  # type: ignore[method-assign]
    for kind in (JobKind.WRITE, JobKind.READ):
        rig.disk.submit(DiskJob(kind))
    rig.disk.ended()
    assert order == [JobKind.READ, JobKind.WRITE]


def test_whatever_happens_in_a_job_it_comes_back() -> None:
    rig = Rig()
    rig.disk._view = lambda host_block: 1 / 0  # type: ignore[assignment, return-value]
    rig.disk.submit(DiskJob(JobKind.WRITE, [0], [hash_of(0, 0)], [0]))
    [job] = rig.disk.ended()
    assert job.failures == {0: "division by zero"}


# -- flags ----------------------------------------------------------------------------------------


def test_without_host_memory_there_is_no_disk(tmp_path: Path) -> None:
    config = EngineConfig(kv_disk_path=str(tmp_path))
    with pytest.raises(StartupFailed, match="host memory") as caught:
        make_disk(config, None, "f")
    assert "--swap-space" in caught.value.hint
    assert make_disk(EngineConfig(), None, "f") is None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"swap_space": 0.0}, "--swap-space"),
        ({"swap_space": 1.0, "tensor_parallel_size": 2}, "--tensor-parallel-size 2"),
        ({"swap_space": 1.0, "pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
        ({"swap_space": 1.0, "kv_disk_space": 0.0}, "--kv-disk-space"),
    ],
)
def test_flags_that_do_not_go_together(options: dict[str, float], why: str) -> None:
    with pytest.raises(StartupFailed, match=why):
        EngineConfig(kv_disk_path="/tmp", **options)  # type: ignore[arg-type]
