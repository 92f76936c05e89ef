"""Copies blocks to host memory before the device's pool evicts them, and back when copying them
takes less than computing them.

    write   a copy out of blocks that are held or cached; nothing waits for it. A block that got new
            content before the copy ended, by its generation, is not entered
    load    a copy in, to blocks that a sequence has allocated, held by a fence until it ends. It is
            good up to the first block whose host block has another generation then. A second
            sequence with the same prefix shares the targets and waits for the same copy. Blocks on
            disk (disk/disk_tier.py) are read to host memory first, and copied from there

A chain is written from its end, in the order in which the device's pool evicts. The host's work for
a write is spread: `write` only records the chain, and room for blocks is made as their copy starts.
Used by the engine's thread alone; knows no request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import groupby
from operator import eq, itemgetter
from typing import NamedTuple

from ...core.request.token_ids import BlockHash
from ...core.step_cost import StepCost
from .block_pool import BlockPool, Fence
from .disk.disk_tier import DiskRead, DiskTier
from .generations import Generations
from .host_blocks import Family, HostBlocks
from .host_copies import CopyCost, Direction, DoneCopy, HostCopier, HostCopy, HostCounts
from .prefix_cache import PrefixCache

SLICE_BLOCKS = 64  # of one copy out
MOST_COPIES = 4  # out, on the device at a time: submitting one takes 0.1 ms
_MOST_WRITTEN = 4096  # blocks that wait to be copied out, or are being copied


@dataclass(slots=True, eq=False)
class _Slice:
    """A run of a chain's blocks that is copied out, as many of the first as have a host block.
    `parent`: the hash before the first; `copy`: None if there is nothing to copy; `num_good`: how
    many of the first were unchanged when it ended."""

    parent: BlockHash | None
    hashes: Sequence[BlockHash]
    block_ids: Sequence[int]
    generations: Sequence[int]
    host_blocks: list[int]
    copy: HostCopy | None = None
    num_good: int = 0


@dataclass(slots=True)
class _Write:
    """The write of one chain. `generations`: at its begin; `missing`: positions that wait, started
    from the last to the first, slice by slice; `started` and `ended` with the deepest slice last.
    `spared`: its families in host memory when `num_entered` slices had been entered."""

    hashes: Sequence[BlockHash]
    block_ids: Sequence[int]
    generations: list[int]
    missing: list[int]
    spared: AbstractSet[Family]
    num_entered: int
    started: deque[_Slice] = field(default_factory=deque)
    ended: deque[_Slice] = field(default_factory=deque)
    is_whole: bool = True  # no block of the entered slices was lost


@dataclass(slots=True, eq=False)
class _CopyIn:
    """A copy in, from host blocks that may have to be read from disk first. `num_good`: how many of
    the first blocks were copied, once it has ended; None: it has not."""

    hashes: Sequence[BlockHash]
    fence: Fence  # of the targets
    host_blocks: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    copy: HostCopy = DoneCopy(0.0)  # noqa: RUF009 (frozen): not started
    num_good: int | None = None


class HostMatch(NamedTuple):
    """The blocks that follow the cached ones of a prompt: first `coming`, on the device, which a
    copy for another sequence fills; then `host_blocks`; then the slots `on_disk`."""

    coming: list[int]
    host_blocks: list[int]
    on_disk: list[int]

    @property
    def num_blocks(self) -> int:
        return len(self.coming) + len(self.host_blocks) + len(self.on_disk)


@dataclass(slots=True)
class BlockLoad:
    """The copies that one sequence waits for, each with the range of its blocks, in the order of
    the sequence's. Those of the first `num_shared` blocks may have been started for others."""

    num_blocks: int
    num_shared: int
    parts: list[tuple[_CopyIn, int, int]]

    @property
    def num_good(self) -> int | None:
        """How many of the first blocks were copied; None: some copy has not ended."""
        num_good, is_whole = 0, True
        for copy, first, last in self.parts:
            if copy.num_good is None:
                return None
            if is_whole:
                num_good += max(0, min(copy.num_good, last) - first)
                is_whole = copy.num_good >= last
        return num_good


@dataclass(eq=False)
class HostTier:
    """The host memory of one engine. `cost`: the measured cost of copies."""

    _copier: HostCopier
    _blocks: HostBlocks
    _pool: BlockPool
    _cache: PrefixCache
    _generations: Generations
    _step_cost: Callable[[], StepCost | None]
    _block_size: int
    disk: DiskTier | None = None
    cost: CopyCost = field(default_factory=CopyCost)
    _writes: deque[_Write] = field(default_factory=deque)
    _loads: deque[_CopyIn] = field(default_factory=deque)
    _reads: dict[DiskRead, _CopyIn] = field(default_factory=dict)
    # By hash: the copy, and the block's place in it.
    _coming: dict[BlockHash, tuple[_CopyIn, int]] = field(default_factory=dict)
    _on_their_way: set[BlockHash] = field(default_factory=set)
    _num_entered: int = 0  # slices
    _bytes: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(Direction, 0))
    _num_lost_blocks: int = 0

    @property
    def counts(self) -> HostCounts:
        return HostCounts(
            len(self._blocks),
            self._copier.block_bytes / rate if (rate := self.cost.bytes_per_s) else 0.0,
            self._bytes[Direction.OUT],
            self._bytes[Direction.IN],
            self._num_lost_blocks,
        )

    @property
    def num_writing(self) -> int:
        """Blocks on their way to host memory."""
        return len(self._on_their_way)

    @property
    def has_work(self) -> bool:
        """Whether it has to be polled soon: copies continue when they are polled."""
        return bool(self._loads or self._writes or self._reads)

    # -- out -------------------------------------------------------------------------------------

    def write(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> None:
        """Copy a chain of full, computed blocks, as far as it is not here: as many as there is room
        for, the first blocks first."""
        self._blocks.grow(self._copier.num_blocks)
        missing = self._blocks.missing(hashes, self._on_their_way)
        spared = self._blocks.use(hashes)
        if self.disk is not None:
            self.disk.use(hashes)
        del missing[max(0, min(self._room(spared), _MOST_WRITTEN - self.num_writing)) :]
        self._write(hashes, block_ids, missing, spared)

    def swap_out(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> bool:
        """The same for a preempted sequence: all blocks or none. Returns whether they are, or will
        be, here; not if recomputing them takes less than copying them twice."""
        self._blocks.grow(self._copier.num_blocks)
        missing = self._blocks.missing(hashes, self._on_their_way)
        num_bytes = (len(hashes) + len(missing)) * self._copier.block_bytes
        num_tokens = len(hashes) * self._block_size
        if not hashes or len(hashes) > self._blocks.num_blocks:
            return False
        if not self.cost.pays(num_bytes, num_tokens, 0, self._step_cost()):
            return False
        spared = self._blocks.use(hashes)
        if len(missing) > self._room(spared):
            return False
        self._write(hashes, block_ids, missing, spared)
        return True

    def _room(self, spared: AbstractSet[Family]) -> int:
        """Blocks beside those that wait to be written."""
        return self._blocks.room(spared) - sum(len(write.missing) for write in self._writes)

    def _write(
        self,
        hashes: Sequence[BlockHash],
        block_ids: Sequence[int],
        missing: list[int],
        spared: AbstractSet[Family],
    ) -> None:
        if not missing:
            return
        read = [*map(self._generations.read, block_ids)]
        self._on_their_way.update(map(hashes.__getitem__, missing))
        self._writes.append(_Write(hashes, block_ids, read, missing, spared, self._num_entered))

    def _start_writes(self) -> None:
        """Start as many copies as may be on the device."""
        num_started = sum(len(write.started) for write in self._writes)
        for write in self._writes:
            while write.missing:
                if num_started >= MOST_COPIES:
                    return
                self._start_slice(write)
                num_started += 1

    def _start_slice(self, write: _Write) -> None:
        """Start the last run of consecutive missing blocks, up to SLICE_BLOCKS. Blocks that have
        changed displace nothing."""
        missing = write.missing
        last = missing[-1] + 1
        n = 1
        while n < min(SLICE_BLOCKS, len(missing)) and missing[-n - 1] == last - n - 1:
            n += 1
        del missing[-n:]
        run = slice(last - n, last)
        ids, read = write.block_ids[run], write.generations[run]
        n = self._num_same(ids, read)
        if write.num_entered != self._num_entered:
            write.num_entered = self._num_entered
            write.spared = self._blocks.families(write.hashes)
        host_blocks = self._blocks.take(n, write.spared)
        n = len(host_blocks)
        parent = write.hashes[run.start - 1] if run.start else None
        one = _Slice(parent, write.hashes[run], ids[:n], read[:n], host_blocks)
        if n:
            one.copy = self._copier.start(Direction.OUT, one.block_ids, host_blocks)
        write.started.append(one)

    def _num_same(self, block_ids: Sequence[int], generations: Sequence[int]) -> int:
        """How many of the first blocks still have these generations."""
        is_same = map(eq, map(self._generations.read, block_ids), generations)
        return [*is_same, False].index(False)

    # -- in --------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The host blocks of the longest prefix of `hashes`."""
        return self._blocks.match(hashes)

    def match_coming(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The device's blocks that copies are filling with the longest prefix of `hashes`."""
        block_ids: list[int] = []
        for block_hash in hashes:
            if (found := self._coming.get(block_hash)) is None:
                break
            copy, place = found
            block_ids.append(copy.fence.block_ids[place])
        return block_ids

    def match_disk(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The slots of the longest prefix of `hashes` that is only on disk."""
        return [] if self.disk is None else self.disk.match(hashes, self._on_their_way)

    def pays(self, match: HostMatch, num_before: int) -> bool:
        """Whether copying these takes less than computing them behind `num_before` blocks."""
        num_bytes, size = match.num_blocks * self._copier.block_bytes, self._block_size
        read_s = 0.0 if self.disk is None else self.disk.seconds(len(match.on_disk))
        num_tokens, context = match.num_blocks * size, num_before * size
        return self.cost.pays(num_bytes, num_tokens, context, self._step_cost(), read_s)

    def load(
        self,
        hashes: Sequence[BlockHash],
        match: HostMatch,
        block_ids: Sequence[int],
        parent: BlockHash | None = None,
    ) -> BlockLoad:
        """Wait for the blocks that are coming, and copy those behind them to `block_ids`, which are
        referenced; `hashes` are of both, and continue `parent`."""
        num_shared, num_own = len(match.coming), len(match.host_blocks)
        spared = self._blocks.use(hashes)
        places = map(self._coming.__getitem__, hashes[:num_shared])
        parts = list[tuple[_CopyIn, int, int]]()
        for copy, run in groupby(places, key=itemgetter(0)):
            taken = [place for _, place in run]
            parts.append((copy, taken[0], taken[-1] + 1))
        if match.host_blocks:
            own = self._open(hashes[num_shared:][:num_own], block_ids[:num_own])
            self._copy_in(own, match.host_blocks)
            parts.append((own, 0, num_own))
        if self.disk is not None and match.on_disk:
            own = self._open(hashes[num_shared + num_own :], block_ids[num_own:])
            before = [parent, *hashes][num_shared + num_own]
            self._reads[self.disk.read(own.hashes, before, spared)] = own
            self._on_their_way.update(own.hashes)
            parts.append((own, 0, len(match.on_disk)))
        return BlockLoad(match.num_blocks, num_shared, parts)

    def _open(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> _CopyIn:
        load = _CopyIn(hashes, self._pool.open_fence(block_ids))
        for place, block_hash in enumerate(hashes):
            self._coming.setdefault(block_hash, (load, place))
        return load

    def _copy_in(self, load: _CopyIn, host_blocks: list[int]) -> None:
        n = len(host_blocks)
        assert self._blocks.match(load.hashes[:n]) == host_blocks, "what was found is not here"
        load.host_blocks = host_blocks
        load.generations = [*map(self._blocks.generation, host_blocks)]
        if n:
            load.copy = self._copier.start(Direction.IN, load.fence.block_ids[:n], host_blocks)
        self._loads.append(load)

    # -- ends ------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Process copies that have ended; returns whether a load was among them. Never waits.
        Raises EngineFailed when the device is lost."""
        self._poll_disk()
        num_entered = 0
        while self._writes and self._end_slices(write := self._writes[0]):
            while write.ended and num_entered < MOST_COPIES:
                self._enter(write, write.ended.popleft())
                num_entered += 1
            if write.ended:
                break  # a step waits: the rest is entered before the next one
            self._writes.popleft()
        self._start_writes()
        has_loaded = False
        while self._loads and self._end_load(self._loads[0]):
            self._loads.popleft()
            has_loaded = True
        return has_loaded

    def _poll_disk(self) -> None:
        for read in () if self.disk is None else self.disk.poll():
            n = read.num_good or 0
            self._on_their_way.difference_update(read.hashes)
            self._cache.entered_host(read.hashes[:n])
            self._copy_in(self._reads.pop(read), read.host_blocks[:n])

    def _end_slices(self, write: _Write) -> bool:
        """Whether all slices have ended."""
        while write.started:
            one = write.started[0]
            if one.copy is not None:
                if (seconds := one.copy.seconds()) is None:
                    return False
                self._count(Direction.OUT, len(one.block_ids), seconds)
                one.num_good = self._num_same(one.block_ids, one.generations)
            write.ended.appendleft(write.started.popleft())
        return not write.missing

    def _enter(self, write: _Write, one: _Slice) -> None:
        """Enter its unchanged blocks; none behind a lost one, which could not be matched."""
        n = one.num_good if write.is_whole else 0
        write.is_whole &= n == len(one.hashes)
        self._on_their_way.difference_update(one.hashes)
        self._num_lost_blocks += len(one.hashes) - n
        self._blocks.give_back(one.host_blocks[n:])
        if n:
            self._num_entered += 1
            self._blocks.enter(one.host_blocks[:n], one.hashes[:n], one.parent)
            self._cache.entered_host(one.hashes[:n])
            if self.disk is not None:
                self.disk.entered(one.hashes[:n])

    def _end_load(self, load: _CopyIn) -> bool:
        if (seconds := load.copy.seconds()) is None:
            return False
        self._count(Direction.IN, len(load.host_blocks), seconds)
        load.fence.close()
        for block_hash in load.hashes:
            if self._coming.get(block_hash, (None,))[0] is load:
                del self._coming[block_hash]
        now = map(self._blocks.generation, load.host_blocks)
        is_same = [*map(eq, now, load.generations), False]
        load.num_good = is_same.index(False)
        self._num_lost_blocks += len(load.host_blocks) - load.num_good
        return True

    def _count(self, direction: Direction, num_blocks: int, seconds: float) -> None:
        num_bytes = num_blocks * self._copier.block_bytes
        self._bytes[direction] += num_bytes
        if num_bytes:
            self.cost.observe(num_bytes, seconds)
