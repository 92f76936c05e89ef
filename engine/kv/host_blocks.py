"""The prefix cache in host memory: block hash -> host block, and which blocks are evicted.

A **family** is a run of blocks, each the continuation of the one before it. A block that continues
another block than the last of a family begins a family of its own, which branches off there:

    family 1   [ a0 | a1 | a2 | a3 | a4 ]
    family 2             └─[ b2 | b3 ]            a prompt that differs from block 2 on

Eviction (`take`), until there are as many free blocks as needed:

1. position: a block is evicted before those that it continues. So only the end of a family can be
   evicted, down to where another family branches off.
2. age: candidates are the `NUM_OLDEST` least recently used families whose end can be evicted,
   without those of the chain that needs the room. Loading a block, and writing one behind it, is a
   use of its family and of those it branches off from.
3. size: the largest candidate, the oldest of equal ones, loses as much of its end as is needed and
   can be evicted.

A taken block is in no family until it is entered: it can be written. Its generation changes when it
is taken, before it can be overwritten. Knows no memory and no device.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, KeysView, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from ...core.request.token_ids import BlockHash

NUM_OLDEST = 4


@dataclass(slots=True, eq=False)
class Family:
    """Internal to this file. `branches`: how many families branch off behind each of its blocks, by
    position. `queued`: its age in the queue of families whose end can be evicted."""

    number: int
    parent: Family | None
    position: int  # of the parent's block that it continues
    used: int
    blocks: list[int] = field(default_factory=list)
    branches: Counter[int] = field(default_factory=Counter)
    queued: int | None = None

    @property
    def num_fixed(self) -> int:
        """Its first blocks, which other families continue."""
        return max(self.branches, default=-1) + 1

    @property
    def can_shrink(self) -> bool:
        return len(self.blocks) > self.num_fixed


class HostBlocks:
    """`num_blocks` blocks, of which `num_free` are neither entered nor taken."""

    def __init__(self) -> None:
        self.on_evict: Callable[[list[BlockHash]], None] | None = None
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: list[BlockHash | None] = []
        self._generations: list[int] = []
        self._places: list[tuple[Family, int] | None] = []
        self._free: list[int] = []
        self._queue: list[tuple[int, int, Family]] = []  # by age, some entries out of date
        self._num_families = self._num_numbers = self._now = 0

    def __len__(self) -> int:
        """Entered blocks."""
        return len(self._block_of)

    @property
    def hashes(self) -> KeysView[BlockHash]:
        """A live view of the hashes of all entered blocks."""
        return self._block_of.keys()

    @property
    def num_blocks(self) -> int:
        return len(self._hash_of)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def grow(self, num_blocks: int) -> None:
        """There are `num_blocks` blocks now, no fewer than before."""
        fresh = range(self.num_blocks, num_blocks)
        self._free = [*reversed(fresh), *self._free]
        self._hash_of += [None] * len(fresh)
        self._places += [None] * len(fresh)
        self._generations += [0] * len(fresh)

    def generation(self, block: int) -> int:
        """Changes when the block is taken for other content."""
        return self._generations[block]

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The blocks of the longest entered prefix of `hashes`."""
        return found_prefix(hashes, self._block_of.get)

    def missing(self, hashes: Sequence[BlockHash], but: Container[BlockHash] = ()) -> list[int]:
        """Positions of the hashes that are neither entered nor in `but`."""
        here = self._block_of
        return [n for n, each in enumerate(hashes) if each not in here and each not in but]

    def families(self, hashes: Iterable[BlockHash]) -> AbstractSet[Family]:
        """The families of the entered ones."""
        families: set[Family] = set()
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is not None and (place := self._places[block]) is not None:
                families.add(place[0])
        return families

    def use(self, hashes: Iterable[BlockHash]) -> AbstractSet[Family]:
        """Record a use of the entered ones; returns their families."""
        families = self.families(hashes)
        self._use(families)
        return families

    def room(self, spared: Collection[Family]) -> int:
        """The most blocks that `take` could return; `spared` are the families of a chain."""
        num_spared = sum(len(family.blocks) for family in spared)
        return len(self._free) + len(self._block_of) - num_spared

    def take(self, n: int, spared: Container[Family] = ()) -> list[int]:
        """`n` blocks to write to, or fewer; the families `spared` are not evicted for them."""
        if n > len(self._free):
            self._evict(n - len(self._free), spared)
        taken = self._free[: -n - 1 : -1] if n else []
        del self._free[len(self._free) - len(taken) :]
        for block in taken:
            self._generations[block] += 1
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Free blocks that were taken and not entered."""
        self._free += reversed(blocks)

    def enter(
        self, blocks: Sequence[int], hashes: Sequence[BlockHash], parent: BlockHash | None
    ) -> None:
        """Taken blocks hold these hashes, which are not entered yet: each continues the one before
        it, the first `parent`."""
        assert self._block_of.keys().isdisjoint(hashes), "a block is here twice"
        family = self._family_behind(parent)
        first = len(family.blocks)
        self._block_of.update(zip(hashes, blocks, strict=True))
        family.blocks += blocks
        for position, (block, block_hash) in enumerate(zip(blocks, hashes, strict=True), first):
            self._hash_of[block] = block_hash
            self._places[block] = family, position
        self._use([family])

    # -- families --------------------------------------------------------------------------------

    def _family_behind(self, parent: BlockHash | None) -> Family:
        """The family that a continuation of `parent` joins."""
        above: tuple[Family, int] | None = None
        if parent is not None and (block := self._block_of.get(parent)) is not None:
            above = self._places[block]
        if above is not None:
            family, position = above
            if position == len(family.blocks) - 1 and not family.branches[position]:
                return family
            family.branches[position] += 1
        self._num_families += 1
        self._num_numbers += 1
        parent_family, position = above or (None, 0)
        return Family(self._num_numbers, parent_family, position, self._now)

    def _use(self, families: Iterable[Family]) -> None:
        self._now += 1
        for family in families:
            each: Family | None = family
            while each is not None and each.used != self._now:
                each.used = self._now
                self._enqueue(each)
                each = each.parent

    def _enqueue(self, family: Family) -> None:
        if family.queued != family.used and family.can_shrink:
            family.queued = family.used
            heapq.heappush(self._queue, (family.used, family.number, family))
            if len(self._queue) > 4 * self._num_families + 64:
                self._queue = [entry for entry in self._queue if _is_valid(entry)]
                heapq.heapify(self._queue)

    def _evict(self, n: int, spared: Container[Family]) -> None:
        set_aside: list[tuple[int, int, Family]] = []
        evicted: list[BlockHash] = []
        while n > 0 and (candidates := self._oldest(spared, set_aside)):
            largest = max(candidates, key=lambda entry: len(entry[2].blocks))
            for entry in candidates:
                heapq.heappush(self._queue, entry)
            num_gone = min(n, len(largest[2].blocks) - largest[2].num_fixed)
            evicted += self._shrink(largest[2], num_gone)
            n -= num_gone
        for entry in set_aside:
            heapq.heappush(self._queue, entry)
        if evicted and self.on_evict is not None:
            self.on_evict(evicted)

    def _oldest(
        self, spared: Container[Family], set_aside: list[tuple[int, int, Family]]
    ) -> list[tuple[int, int, Family]]:
        """Remove up to NUM_OLDEST entries from the queue, the oldest first; those of `spared`
        families go to `set_aside`."""
        found: list[tuple[int, int, Family]] = []
        while self._queue and len(found) < NUM_OLDEST:
            entry = heapq.heappop(self._queue)
            if not _is_valid(entry):
                continue
            if entry[2] in spared:
                set_aside.append(entry)
            else:
                found.append(entry)
        return found

    def _shrink(self, family: Family, n: int) -> list[BlockHash]:
        """Evict its last `n` blocks; returns their hashes."""
        gone = family.blocks[len(family.blocks) - n :]
        del family.blocks[len(family.blocks) - n :]
        hashes = []
        for block in gone:
            block_hash = self._hash_of[block]
            assert block_hash is not None
            del self._block_of[block_hash]
            self._hash_of[block] = self._places[block] = None
            hashes.append(block_hash)
        self._free += reversed(gone)  # taken in ascending order: a single run to copy
        if not family.blocks:
            self._num_families -= 1
            if (parent := family.parent) is not None:
                parent.branches[family.position] -= 1
                if not parent.branches[family.position]:
                    del parent.branches[family.position]
                self._enqueue(parent)
        return hashes


def found_prefix(hashes: Iterable[BlockHash], find: Callable[[BlockHash], int | None]) -> list[int]:
    """What `find` returns for each hash, up to the first one that it has nothing for."""
    found: list[int] = []
    for block_hash in hashes:
        if (block := find(block_hash)) is None:
            break
        found.append(block)
    return found


def _is_valid(entry: tuple[int, int, Family]) -> bool:
    """Whether the queue's entry is up to date; if not, its family may get another one."""
    used, _, family = entry
    if family.used == used and family.can_shrink:
        return True
    if family.queued == used:
        family.queued = None
    return False
