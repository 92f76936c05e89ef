"""Gives blocks to sequences and takes them back: the one writer of `Sequence.block_ids`.

Joins pool, prefix cache and host memory: an admission takes cached blocks first, a computed full
block becomes a cached one, and a block that a step on the device still touches stays fenced. Blocks
go to host memory when a sequence ends, when a second one uses them, and when one is preempted.
Decides nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Row
from itertools import chain, count, repeat

from ...core.request.token_ids import BlockHash
from ..kv.block_pool import BlockPool, BlockRef, Fence
from ..kv.generations import Generations
from ..kv.host_tier import HostMatch, HostTier, Load
from ..kv.prefix_cache import PrefixCache
from .sequence import Sequence

_SLICE_BLOCKS = 64  # hashed at once when a prompt is looked up


class StepFence:
    """Keeps what the step's sequences give back while the step is on the device.

    As long as a sequence holds its blocks itself no fence is needed: a fence over every block of
    every step would cost more host time than a decode step takes. What the step computes for a
    sequence that is no longer in `places`, where each has its place in the step, is of no use.
    """

    def __init__(self, tables: BlockTables, places: dict[Sequence, int]) -> None:
        self._tables = tables
        self._fences: list[Fence] = []
        self.places = places

    def fence_off(self, sequence: Sequence, fence: Fence) -> None:
        """The sequence gives its blocks back: from here on the fence holds them."""
        del self.places[sequence]
        self._fences.append(fence)

    def close(self) -> None:
        """The step has completed."""
        self._tables._steps.remove(self)
        for fence in self._fences:
            fence.close()


class BlockTables:
    """Block tables of all sequences of one engine."""

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        generations: Generations,
        block_size: int,
        host: HostTier | None = None,
    ) -> None:
        self._pool = pool
        self._host = host
        self._cache = cache
        self._generations = generations
        self._block_size = block_size
        self._steps: list[StepFence] = []
        self.num_queried_tokens = 0  # of all that was given blocks
        self.num_hit_tokens = 0  # of them, those in matched blocks, loaded ones too
        self.num_host_hit_tokens = 0  # of these, those that were loaded

    def match(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Cached blocks that hold the beginning of the sequence's first `num_tokens` tokens.

        None of them if it must compute all of its prompt to tell the log-probabilities.
        """
        if not self._cache.is_enabled or sequence.owes_prompt_logprobs:
            return []
        return self._match(sequence, 0, num_tokens, self._cache.match)

    def match_host(self, sequence: Sequence, num_tokens: int, num_matched: int) -> HostMatch | None:
        """What goes on behind `num_matched` cached blocks, if it pays to copy it; limits as of
        `match`. None: nothing."""
        if self._host is None or sequence.owes_prompt_logprobs:
            return None
        coming = self._match(sequence, num_matched, num_tokens, self._host.match_coming)
        num_before = num_matched + len(coming)
        in_host = self._match(sequence, num_before, num_tokens, self._host.match)
        num_before += len(in_host)
        matched = HostMatch(coming, in_host, self._match_disk(sequence, num_before, num_tokens))
        if not matched.num_blocks or not self._host.pays(matched, num_matched):
            return None
        return matched

    def _match_disk(self, sequence: Sequence, num_before: int, num_tokens: int) -> list[int]:
        """The same of what is on disk behind `num_before` blocks: as much as may be read now."""
        if self._host is None or self._host.disk is None or not (room := self._host.disk.room):
            return []
        slots = self._match(sequence, num_before, num_tokens, self._host.match_disk)[:room]
        pays = slots and self._host.pays(HostMatch([], [], slots), num_before)
        return slots if pays else []

    def _match(
        self,
        sequence: Sequence,
        first: int,
        num_tokens: int,
        match: Callable[[list[BlockHash]], list[int]],
    ) -> list[int]:
        """What `match` finds from block `first` on."""
        num_blocks, matched = num_tokens // self._block_size, list[int]()
        for start in range(first, num_blocks, _SLICE_BLOCKS):
            end = min(start + _SLICE_BLOCKS, num_blocks)
            hashes = sequence.block_hashes(end, self._block_size)
            matched += match(hashes[start:])
            if first + len(matched) < end:
                break  # the hashes behind can wait until a step is on the device
        return matched

    def num_to_compute(self, sequence: Sequence) -> int:
        """Tokens that an empty-handed sequence would have to compute, by what is cached now."""
        num_matched = len(self.match(sequence, sequence.num_tokens - 1))
        in_host = self.match_host(sequence, sequence.num_tokens - 1, num_matched)
        if in_host is not None:
            num_matched += in_host.num_blocks
        return sequence.num_tokens - num_matched * self._block_size

    def take(self, sequence: Sequence, matched: Row[int], coming: Row[int] = ()) -> bool:
        """Give an empty-handed sequence blocks for all its slots, or none.

        `matched` come first and count as computed, then those that are `coming` for others too.
        """
        assert not sequence.block_ids
        shared = [*matched, *coming]
        self._pool.acquire(shared)  # first: the allocation could evict them
        sequence.block_ids = array("i", shared)
        if not self.grow(sequence):
            sequence.block_ids = array("i")
            self._pool.release(shared)
            return False
        sequence.num_stored_blocks = len(matched)
        sequence.num_cached_tokens = len(matched) * self._block_size
        self.num_queried_tokens += sequence.num_tokens
        self.num_hit_tokens += sequence.num_cached_tokens
        sequence.num_computed_tokens = sequence.num_cached_tokens
        sequence.num_launched_tokens = sequence.num_cached_tokens
        return True

    def load(self, sequence: Sequence, match: HostMatch) -> Load:
        """Begin to copy what goes on behind its cached blocks; its blocks are taken."""
        assert self._host is not None
        first = sequence.num_stored_blocks
        last = first + match.num_blocks
        hashes = sequence.block_hashes(last, self._block_size)
        own = sequence.block_ids[first + len(match.coming) : last]
        parent = hashes[first - 1] if first else None
        return self._host.load(hashes[first:], match, own, parent)

    def loaded(self, sequence: Sequence, num_blocks: int) -> None:
        """The copy has ended: so many blocks count as computed beside the cached ones."""
        num_tokens = num_blocks * self._block_size
        sequence.num_cached_tokens += num_tokens
        sequence.num_computed_tokens += num_tokens
        sequence.num_launched_tokens += num_tokens
        self.num_hit_tokens += num_tokens
        self.num_host_hit_tokens += num_tokens
        self.store(sequence)

    def write(self, sequence: Sequence) -> None:
        """Copy what it has in the prefix cache to host memory: it ends, or they have a second use.

        Others may leave host memory for it: what is to be loaded from there is loading already.
        """
        if self._host is not None and sequence.num_stored_blocks:
            self._host.write(*self._stored(sequence))

    def swap_out(self, sequence: Sequence) -> bool:
        """The same where it is preempted: all of it, or nothing if that cannot be or costs more."""
        return self._host is not None and self._host.swap_out(*self._stored(sequence))

    def _stored(self, sequence: Sequence) -> tuple[list[BlockHash], Row[int]]:
        n = sequence.num_stored_blocks
        return sequence.block_hashes(n, self._block_size), sequence.block_ids[:n]

    def fork(self, parent: Sequence, child: Sequence) -> list[tuple[int, int]] | None:
        """Give an empty-handed child its computed tokens' blocks, and room for the token behind.

            parent   [ b0 | b1 | b2 # ]     full blocks: one more reference
            child    [ b0 | b1 | b7 # ]     the partial one: a copy, since each writes on in its own

        Returns (source, target) of what is to be copied at once; None if the pool has too few left.
        """
        assert not child.block_ids
        num_shared, num_partial = divmod(child.num_computed_tokens, self._block_size)
        shared = parent.block_ids[:num_shared]
        self._pool.acquire(shared)
        child.block_ids = shared[:]
        if not self.grow(child):
            child.block_ids = array("i")
            self._pool.release(shared)
            return None
        child.num_stored_blocks = min(parent.num_stored_blocks, num_shared)
        child.share_hashes(parent, child.num_stored_blocks)
        self.store(child)
        if not num_partial:
            return []
        return [(parent.block_ids[num_shared], child.block_ids[num_shared])]

    def common(self, leader: Sequence, other: Sequence) -> Row[int]:
        """Blocks of the leader, all computed, that the other's tokens but the last begin with."""
        size, num_same = self._block_size, 0
        most = min(leader.num_computed_tokens, other.num_tokens - 1) // size * size
        mine, theirs = leader.token_ids, other.token_ids
        while num_same < most:
            end = num_same + size
            if mine[num_same:end] != theirs[num_same:end]:
                break
            num_same = end
        return leader.block_ids[: num_same // size]

    def has_room(self, sequence: Sequence) -> bool:
        """Whether its blocks cover all its slots already."""
        return sequence.num_slots <= len(sequence.block_ids) * self._block_size

    def grow(self, sequence: Sequence) -> bool:
        """Make its blocks cover all its slots; False if the pool has too few left."""
        num_missing = -(-sequence.num_slots // self._block_size) - len(sequence.block_ids)
        if num_missing <= 0:
            return True
        fresh = self._pool.allocate(num_missing)
        if fresh is None:
            return False
        sequence.block_ids.extend(fresh)
        return True

    def store(self, sequence: Sequence) -> None:
        """Enter the full blocks that are computed by now into the prefix cache."""
        if not self._cache.is_enabled:
            return
        num_full = sequence.num_computed_tokens // self._block_size
        if num_full == sequence.num_stored_blocks:
            return
        fresh = slice(sequence.num_stored_blocks, num_full)
        hashes = sequence.block_hashes(num_full, self._block_size)
        self._cache.store(hashes[fresh], sequence.block_ids[fresh])
        sequence.num_stored_blocks = num_full

    def prepare_store(self, sequence: Sequence) -> None:
        """Hash what the launched step completes, before its results are waited for."""
        if self._cache.is_enabled:
            num_tokens = min(sequence.num_launched_tokens, sequence.num_tokens)
            sequence.block_hashes(num_tokens // self._block_size, self._block_size)

    def end(self, sequence: Sequence) -> None:
        """It needs its blocks no more."""
        self.write(sequence)
        self.give_back(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Take all blocks from the sequence; its tokens are to be computed anew, if ever."""
        for step in self._steps:
            if sequence in step.places:
                step.fence_off(sequence, self._pool.open_fence(sequence.block_ids))
        self._pool.release(sequence.block_ids)
        sequence.block_ids = array("i")
        sequence.num_stored_blocks = sequence.num_computed_tokens = 0
        sequence.num_launched_tokens = sequence.num_awaited_tokens = sequence.num_clear_tokens = 0
        sequence.draft_token_ids = ()

    def open_step(self, places: dict[Sequence, int]) -> StepFence:
        """A step that touches the sequences' blocks is about to be launched."""
        step = StepFence(self, places)
        self._steps.append(step)
        return step

    def refs(self, sequence: Sequence, first: int, last: int) -> list[BlockRef]:
        """Logical blocks [first, last); those that a launched step fills, or has, have a hash."""
        num_tokens = min(sequence.num_launched_tokens, sequence.num_tokens)
        num_full = min(last, num_tokens // self._block_size)
        hashes = sequence.block_hashes(num_full, self._block_size)[first:]
        block_ids = sequence.block_ids[first:last]
        generations = map(self._generations.read, block_ids)
        columns = (count(first), block_ids, generations, chain(hashes, repeat(None)))
        return list(map(BlockRef._make, zip(*columns)))  # noqa: B905  # as long as the blocks
