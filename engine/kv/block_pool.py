"""Who refers to which KV block: counts references, hands out ids, remembers unreferenced content.

    reserved     blocks 0 (padding) and 1 (canary): never handed out
    free         no reference, content worthless
    held         referenced by a request, a lease or a fence
    cached       no reference, content worth keeping; the least recently used goes first

            allocate               release, content kept
      free ───────────► held ─────────────────────────► cached
        ▲                │ ▲            acquire            │
        └────────────────┘ └───────────────────────────────┤
            release                                        │
        ▲                       eviction                   │
        └──────────────────────────────────────────────────┘

Knows no request and no memory. Belongs to the scheduler's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np
import numpy.typing as npt

from ...core.request.token_ids import HASH_BYTES, BlockHash
from .generations import Generations

PADDING_BLOCK = 0
CANARY_BLOCK = 1
NUM_RESERVED_BLOCKS = 2
_ID, _GENERATION = np.dtype("<u4"), np.dtype("<u8")
_AHEAD_SHARE, _MOST_AHEAD = 1 / 64, 32  # of the pool free, so many blocks at a time


class BlockRefs(msgspec.Struct, frozen=True):
    """Blocks of a sequence, one behind the other, and where they lie: columns of little-endian
    numbers, since a long prompt has thousands and a peer is sent them as they are.

    `hashes` are those of the full blocks, 16 bytes each; a partial one, which has none, is last.
    """

    packed_ids: bytes = b""  # uint32 [n]
    packed_generations: bytes = b""  # uint64 [n]
    hashes: bytes = b""

    @classmethod
    def pack(
        cls,
        block_ids: Iterable[int],
        generations: Iterable[int],
        hashes: Iterable[BlockHash] = (),
    ) -> BlockRefs:
        ids, drawn = np.fromiter(block_ids, _ID), np.fromiter(generations, _GENERATION)
        return cls(ids.tobytes(), drawn.tobytes(), b"".join(hashes))

    def __post_init__(self) -> None:
        """Raises ValueError where columns do not fit: a peer may have sent them."""
        num_blocks, rest = divmod(len(self.packed_ids), _ID.itemsize)
        num_hashes, more = divmod(len(self.hashes), HASH_BYTES)
        num_generations = len(self.packed_generations) / _GENERATION.itemsize
        if rest or more or num_generations != num_blocks or num_hashes > num_blocks:
            raise ValueError("columns of blocks do not fit each other")

    def __len__(self) -> int:
        return len(self.packed_ids) // _ID.itemsize

    @property
    def block_ids(self) -> npt.NDArray[np.uint32]:
        """[n], to be read only."""
        return np.frombuffer(self.packed_ids, _ID)

    @property
    def generations(self) -> npt.NDArray[np.uint64]:
        """[n], to be read only."""
        return np.frombuffer(self.packed_generations, _GENERATION)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks for KV that comes from elsewhere: [num_cached_blocks, num_known_blocks) to be filled.

    Those before are cached here already, those behind are room to grow. `block_ids[i]` takes
    logical block i of the request `key`.
    """

    key: str
    block_ids: tuple[int, ...]
    num_cached_blocks: int
    num_known_blocks: int


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Every block of a pool is in exactly one of these states."""

    free: int
    cached: int
    held: int
    reserved: int


@dataclass(frozen=True, slots=True, eq=False)
class Fence:
    """References held by work on the device (a step, a copy) until it has completed."""

    block_ids: tuple[int, ...]
    _pool: BlockPool

    def close(self) -> None:
        """The work has completed. A second call does nothing."""
        if self in self._pool.open_fences:
            self._pool.open_fences.remove(self)
            self._pool.release(self.block_ids)


class BlockPool:
    """`num_blocks` blocks, the reserved ones included. Every operation is O(1) a block."""

    def __init__(self, num_blocks: int, generations: Generations) -> None:
        assert num_blocks > NUM_RESERVED_BLOCKS
        self.num_blocks = num_blocks
        self.num_releases = 0  # while it stands still, what did not fit does not fit
        self._generations = generations
        self._num_refs = [0] * num_blocks
        self._is_kept = bytearray(num_blocks)
        self._free = list(range(num_blocks - 1, NUM_RESERVED_BLOCKS - 1, -1))  # a stack
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.open_fences: set[Fence] = set()
        self.on_evict: Callable[[Sequence[int]], None] | None = None  # of kept blocks, before

    @property
    def capacity(self) -> int:
        """Blocks that can be handed out at most."""
        return self.num_blocks - NUM_RESERVED_BLOCKS

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def counts(self) -> BlockCounts:
        held = self.capacity - self.num_available
        return BlockCounts(len(self._free), len(self._cached), held, NUM_RESERVED_BLOCKS)

    def num_refs(self, block_id: int) -> int:
        return self._num_refs[block_id]

    def refs(self, block_ids: Sequence[int], hashes: Iterable[BlockHash]) -> BlockRefs:
        """These blocks with their content of now, for whoever copies it."""
        return BlockRefs.pack(block_ids, map(self._generations.read, block_ids), hashes)

    def allocate(self, n: int) -> list[int] | None:
        """`n` blocks with one reference each, or None if there are not as many.

        Cached blocks are evicted when `free` runs out. Generations move before the ids are known
        to anybody, so whoever reads an unmoved generation has read the old content.
        """
        missing = n - len(self._free)
        if missing > 0:
            if missing > len(self._cached):
                return None
            self._evict(missing)
        free, num_refs = self._free, self._num_refs
        ids = free[: -n - 1 : -1]
        del free[len(free) - n :]
        self._generations.bump(ids)
        for block_id in ids:
            num_refs[block_id] = 1
        return ids

    def evict_ahead(self) -> None:
        """Evict a few of the blocks that the next long prompt would, if few are free: for a thread
        that has nothing else to do. Of so few blocks as small pools have this keeps none free."""
        missing = int(self.capacity * _AHEAD_SHARE) - len(self._free)
        if missing > 0:
            self._evict(min(missing, len(self._cached), _MOST_AHEAD))

    def acquire(self, ids: Iterable[int]) -> None:
        """One more reference to each; a block that is free cannot be acquired (KeyError)."""
        num_refs = self._num_refs
        for block_id in ids:
            if num_refs[block_id] == 0:
                del self._cached[block_id]
            num_refs[block_id] += 1

    def release(self, ids: Sequence[int]) -> None:
        """One reference less to each, from the last to the first.

        Of a sequence's blocks the deepest so becomes the oldest cached one: a chain is evicted from
        its end, and what remains of it can still be matched.
        """
        self.num_releases += 1
        num_refs, is_kept = self._num_refs, self._is_kept
        for block_id in reversed(ids):
            count = num_refs[block_id] - 1
            assert count >= 0, f"block {block_id} released more often than acquired"
            num_refs[block_id] = count
            if count == 0:
                if is_kept[block_id]:
                    self._cached[block_id] = None
                else:
                    self._free.append(block_id)

    def keep(self, block_ids: Iterable[int]) -> None:
        """The held blocks' content is final and worth keeping once nobody refers to it."""
        num_refs, is_kept = self._num_refs, self._is_kept
        for block_id in block_ids:
            assert num_refs[block_id] > 0, f"block {block_id} is nobody's"
            is_kept[block_id] = True

    def open_fence(self, ids: Sequence[int]) -> Fence:
        """Keep `ids` from being handed out anew until the fence is closed."""
        fence = Fence(tuple(ids), self)
        self.acquire(fence.block_ids)
        self.open_fences.add(fence)
        return fence

    def _evict(self, n: int) -> None:
        ids = [*islice(self._cached, n)]
        for block_id in ids:
            del self._cached[block_id]
            self._is_kept[block_id] = False
        if self.on_evict is not None:
            self.on_evict(ids)
        self._free += ids
