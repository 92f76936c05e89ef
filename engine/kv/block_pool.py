"""Allocates KV blocks and counts their references; keeps unreferenced cached blocks until evicted.

    reserved     blocks 0 (padding) and 1 (canary): never allocated
    free         no reference, no content
    held         referenced by a request, a lease or a fence
    cached       no reference, content in the prefix cache; evicted least recently used first

            allocate               release, content kept
      free ───────────► held ─────────────────────────► cached
        ▲                │ ▲            acquire            │
        └────────────────┘ └───────────────────────────────┤
            release                                        │
        ▲                       eviction                   │
        └──────────────────────────────────────────────────┘

Knows no request and no memory. Used by the scheduler's thread alone.
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
_AHEAD_SHARE, _MOST_AHEAD = 1 / 64, 32  # of the pool to be free; blocks evicted at once


class BlockRefs(msgspec.Struct, frozen=True):
    """Consecutive blocks of a sequence, as they are sent to a peer: columns of little-endian
    numbers, since a long prompt has thousands.

    `hashes` of the full blocks, 16 bytes each; a partial block is last and has none.
    """

    packed_ids: bytes = b""  # uint32 [n]
    packed_generations: bytes = b""  # uint64 [n]
    hashes: bytes = b""

    @classmethod
    def pack(
        cls, block_ids: Iterable[int], generations: Iterable[int], hashes: Iterable[BlockHash] = ()
    ) -> BlockRefs:
        ids, drawn = np.fromiter(block_ids, _ID), np.fromiter(generations, _GENERATION)
        return cls(ids.tobytes(), drawn.tobytes(), b"".join(hashes))

    def __post_init__(self) -> None:
        """Raises ValueError if the columns do not match: a peer may have sent them."""
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
    """Blocks for KV that is pulled: [num_cached_blocks, num_known_blocks) are to be filled.

    Those before are cached already, those behind are room to grow. `block_ids[i]` is for logical
    block i of the request `key`.
    """

    key: str
    block_ids: tuple[int, ...]
    num_cached_blocks: int
    num_known_blocks: int


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks of a pool by state."""

    free: int
    cached: int
    held: int
    reserved: int


@dataclass(slots=True, eq=False)
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
        self.capacity = num_blocks - NUM_RESERVED_BLOCKS  # blocks that can be allocated at most
        self.num_releases = 0  # if unchanged, what did not fit still does not
        self._generations = generations
        self._num_refs = [0] * num_blocks
        self._is_kept = bytearray(num_blocks)
        self._free = list(range(num_blocks - 1, NUM_RESERVED_BLOCKS - 1, -1))  # a stack
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.open_fences: set[Fence] = set()
        self.on_evict: Callable[[Sequence[int]], None] | None = None  # called with ids

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could return now: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def counts(self) -> BlockCounts:
        held = self.capacity - self.num_available
        return BlockCounts(len(self._free), len(self._cached), held, NUM_RESERVED_BLOCKS)

    def num_refs(self, block_id: int) -> int:
        return self._num_refs[block_id]

    def refs(self, block_ids: Sequence[int], hashes: Iterable[BlockHash]) -> BlockRefs:
        """These blocks with their current generations, for a peer to copy."""
        return BlockRefs.pack(block_ids, map(self._generations.read, block_ids), hashes)

    def allocate(self, n: int) -> list[int] | None:
        """`n` blocks with one reference each, or None if there are too few.

        Cached blocks are evicted if too few are free. Generations change before the ids are used,
        so a peer that reads an unchanged generation has read the old content.
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
        """If few blocks are free, evict some that the next long prompt would: called when there is
        nothing else to do. Keeps no block of a small pool free."""
        missing = int(self.capacity * _AHEAD_SHARE) - len(self._free)
        if missing > 0:
            self._evict(min(missing, len(self._cached), _MOST_AHEAD))

    def acquire(self, ids: Iterable[int]) -> None:
        """Add a reference to each; a free block cannot be acquired (KeyError)."""
        num_refs = self._num_refs
        for block_id in ids:
            if num_refs[block_id] == 0:
                del self._cached[block_id]
            num_refs[block_id] += 1

    def release(self, ids: Sequence[int]) -> None:
        """Drop a reference to each, from the last to the first.

        So the last block of a sequence becomes the oldest cached one: a chain is evicted from its
        end, and the rest of it can still be matched.
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
        """Mark held blocks, whose content is final, to be cached once they are unreferenced."""
        num_refs, is_kept = self._num_refs, self._is_kept
        for block_id in block_ids:
            assert num_refs[block_id] > 0, f"block {block_id} is nobody's"
            is_kept[block_id] = True

    def open_fence(self, ids: Sequence[int]) -> Fence:
        """Keep `ids` from being allocated again until the fence is closed."""
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
