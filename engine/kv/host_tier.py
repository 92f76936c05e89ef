"""Blocks go to host memory while they are good, so that nothing is lost when the device's pool
evicts them, and come back when they are cheaper copied than computed.

    write   a copy out of blocks that somebody holds or that are cached; nothing waits for it. A
            block that got new content before the copy's end, by its generation, is not entered
    load    a copy in, to blocks that a sequence has taken. At its end those count whose host block
            has the generation that it had before; a fence keeps the targets until then. A second
            sequence that begins alike refers to the same targets and waits for the same copy. What
            is on disk (disk/disk_tier.py) is read to host memory first, and copied from there

Writes are made from the end of a chain, as the device's pool evicts: what is about to go is copied
first. What a write takes of the host is spread: `write` only takes note of the chain, and with each
copy that is started room is made for its blocks, not for those of the others.
Belongs to the engine's thread; knows no request.
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
MOST_COPIES = 4  # out, on the device at a time: to submit one takes a tenth of a millisecond
_MOST_WRITTEN = 4096  # blocks that are to be copied out, or are on their way


@dataclass(slots=True, eq=False)
class _Slice:
    """A run of a chain's blocks that is copied out, from its first to as many as have a host block.
    `parent`: the hash before the first; `copy`: None where there is nothing to copy; `num_good`:
    how many of the first were still the same at its end."""

    parent: BlockHash | None
    hashes: Sequence[BlockHash]
    block_ids: Sequence[int]
    generations: Sequence[int]
    host_blocks: list[int]
    copy: HostCopy | None = None
    num_good: int = 0


@dataclass(slots=True)
class _Write:
    """One chain. `generations` when it was told; `missing`: positions of those that wait, which are
    planned from the last to the first, slice by slice; `started` and `ended` the deepest last.
    `spared`: its families in host memory when `num_entered` slices had been entered."""

    hashes: Sequence[BlockHash]
    block_ids: Sequence[int]
    generations: list[int]
    missing: list[int]
    spared: AbstractSet[Family]
    num_entered: int
    started: deque[_Slice] = field(default_factory=deque)
    ended: deque[_Slice] = field(default_factory=deque)
    is_whole: bool = True  # of those that were entered nothing was lost


@dataclass(slots=True, eq=False)
class _CopyIn:
    """Blocks on their way in, from host blocks that they may have to be read to first. `num_good`:
    how many of the first are in place once it has ended; None: it has not."""

    hashes: Sequence[BlockHash]
    fence: Fence  # of the targets
    host_blocks: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    copy: HostCopy = DoneCopy(0.0)  # noqa: RUF009 (frozen): it has not begun
    num_good: int | None = None


class HostMatch(NamedTuple):
    """What goes on behind the cached blocks of a prompt: `coming` are on the device, where a copy
    for others fills them; `host_blocks` go on behind those, and slots `on_disk` behind these."""

    coming: list[int]
    host_blocks: list[int]
    on_disk: list[int]

    @property
    def num_blocks(self) -> int:
        return len(self.coming) + len(self.host_blocks) + len(self.on_disk)


@dataclass(slots=True)
class Load:
    """What one sequence waits for: of each copy the blocks from one place to another, in the order
    of its own. Others may have begun those of the first `num_shared` blocks."""

    num_blocks: int
    num_shared: int
    parts: list[tuple[_CopyIn, int, int]]

    @property
    def num_good(self) -> int | None:
        """How many of the first are in place; None: some copy has not ended."""
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
    """One engine's. `cost`: what copies take, as measured."""

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
    # And where in the copy.
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
        """Blocks on their way here."""
        return len(self._on_their_way)

    @property
    def has_work(self) -> bool:
        """Whether it is to be polled soon: copies go on as they are polled."""
        return bool(self._loads or self._writes or self._reads)

    # -- out -------------------------------------------------------------------------------------

    def write(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> None:
        """Copy what is not here of a chain of full, computed blocks, as much as there is room for,
        the first blocks first."""
        self._blocks.grow(self._copier.num_blocks)
        missing = self._blocks.missing(hashes, self._on_their_way)
        spared = self._blocks.use(hashes)
        if self.disk is not None:
            self.disk.use(hashes)
        del missing[max(0, min(self._room(spared), _MOST_WRITTEN - self.num_writing)) :]
        self._write(hashes, block_ids, missing, spared)

    def swap_out(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> bool:
        """The same for the blocks of a preempted sequence: all or none. Whether they are here, or
        will be; not if to compute them again takes less than to copy them twice."""
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
        """Beside what waits already."""
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
        """As many as may be on the device."""
        num_started = sum(len(write.started) for write in self._writes)
        for write in self._writes:
            while write.missing:
                if num_started >= MOST_COPIES:
                    return
                self._start_slice(write)
                num_started += 1

    def _start_slice(self, write: _Write) -> None:
        """The last of those that lie side by side, up to SLICE_BLOCKS. What is not the same any
        more displaces nothing."""
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
        """How many of the first have these generations."""
        is_same = map(eq, map(self._generations.read, block_ids), generations)
        return [*is_same, False].index(False)

    # -- in --------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The host blocks of the longest beginning of `hashes`."""
        return self._blocks.match(hashes)

    def match_coming(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The device's blocks that are being filled with the longest beginning of `hashes`."""
        block_ids: list[int] = []
        for block_hash in hashes:
            if (found := self._coming.get(block_hash)) is None:
                break
            copy, place = found
            block_ids.append(copy.fence.block_ids[place])
        return block_ids

    def match_disk(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The slots on disk of the longest beginning of `hashes` that is there alone."""
        return [] if self.disk is None else self.disk.match(hashes, self._on_their_way)

    def pays(self, match: HostMatch, num_before: int) -> bool:
        """Whether to copy these takes less than to compute them behind other blocks."""
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
    ) -> Load:
        """Wait for what is coming, and copy what is behind it to `block_ids`, which somebody holds;
        the hashes are of both, and continue `parent`."""
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
        return Load(match.num_blocks, num_shared, parts)

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
        """Take note of copies that have ended; whether a load was among them. Never waits. Raises
        EngineFailed when the device is lost."""
        self._poll_disk()
        num_entered = 0
        while self._writes and self._end_slices(write := self._writes[0]):
            while write.ended and num_entered < MOST_COPIES:
                self._enter(write, write.ended.popleft())
                num_entered += 1
            if write.ended:
                break  # a step waits: the others in front of the next one
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
        """Whether all of them have ended."""
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
        """What of it is the same; nothing behind a loss, which is of no use."""
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
