"""Gives blocks to sequences and takes them back: the one writer of `Sequence.block_ids`.

Joins pool and prefix cache: an admission takes cached blocks first, a computed full block becomes a
cached one, and a block that a step on the device still touches stays fenced. Decides nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Row

from ..kv.block_pool import BlockPool, BlockRefs, Fence
from ..kv.host_tier import HostMatch
from ..kv.prefix_cache import PrefixCache
from .host_prefixes import HostPrefixes
from .sequence import Sequence


class StepFence:
    """Keeps what the step's sequences give back while the step is on the device.

    As long as a sequence holds its blocks itself no fence is needed: a fence over every block of
    every step would cost more host time than a decode step takes. What the step computes for a
    sequence that is no longer in `places`, where each has its place in the step, is of no use.
    """

    def __init__(self, tables: BlockTables, places: dict[Sequence, int]) -> None:
        self._tables = tables
        self.places = places
        self.fences: list[Fence] = []  # over what those had that are no longer there

    def close(self) -> None:
        """The step has completed."""
        self._tables._steps.remove(self)
        for fence in self.fences:
            fence.close()


class BlockTables:
    """Block tables of all sequences of one engine. `has_draft_model`: one that computes what is
    decoded without drafts later, if ever, so that blocks may lack its KV."""

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        block_size: int,
        host: HostPrefixes | None = None,
    ) -> None:
        """`host`: where the prefix cache goes on, if it does."""
        self._pool = pool
        self.host = host
        self.has_draft_model = False
        self._cache = cache
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
        return sequence.find(self._cache.match, 0, num_tokens, self._block_size)

    def find(self, sequence: Sequence) -> tuple[list[int], HostMatch | None, int]:
        """Cached blocks that hold the beginning of an empty-handed sequence, what goes on behind
        them in host memory, and how many tokens are left to compute: one at least, or there would
        be no logits to sample from."""
        num_tokens, in_host = sequence.num_tokens - 1, None
        matched = self.match(sequence, num_tokens)
        num_blocks = len(matched)
        if self.host is not None and (in_host := self.host.match(sequence, num_tokens, num_blocks)):
            num_blocks += in_host.num_blocks
        return matched, in_host, sequence.num_tokens - num_blocks * self._block_size

    def take(self, sequence: Sequence, matched: Row[int], coming: Row[int] = ()) -> bool:
        """Give an empty-handed sequence blocks for all its slots, or none.

        `matched` come first and count as computed, then those that are `coming` for others too.
        """
        if not self.share(sequence, [*matched, *coming]):
            return False
        sequence.num_stored_blocks = len(matched)
        sequence.num_cached_tokens = len(matched) * self._block_size
        self.num_queried_tokens += sequence.num_tokens
        self.num_hit_tokens += sequence.num_cached_tokens
        sequence.num_computed_tokens = sequence.num_cached_tokens
        sequence.num_launched_tokens = sequence.num_cached_tokens
        if self.has_draft_model:
            sequence.drafted = (sequence.num_tokens, ())
            self.lacks_drafts(sequence, self._cache.first_undrafted(matched))
        return True

    def lacks_drafts(self, sequence: Sequence, first: int | None) -> None:
        """Its block number `first` lacks the draft model's KV; None: no block does."""
        if first is not None and sequence.drafted is not None:
            num_drafted_tokens = min(sequence.drafted[0], first * self._block_size)
            sequence.drafted = (num_drafted_tokens, ())

    def share(self, sequence: Sequence, shared: Row[int]) -> bool:
        """Give an empty-handed sequence these blocks and more for all its slots, or none."""
        assert not sequence.block_ids
        self._pool.acquire(shared)  # first: the allocation could evict them
        sequence.block_ids = array("i", shared)
        if not self.grow(sequence):
            sequence.block_ids = array("i")
            self._pool.release(shared)
            return False
        return True

    def loaded(self, sequence: Sequence, num_blocks: int) -> None:
        """What host memory had is there: so many blocks count as computed beside the cached."""
        assert self.host is not None
        self.lacks_drafts(sequence, self.host.first_undrafted(sequence, num_blocks))
        num_tokens = num_blocks * self._block_size
        sequence.num_cached_tokens += num_tokens
        sequence.num_computed_tokens += num_tokens
        sequence.num_launched_tokens += num_tokens
        self.num_hit_tokens += num_tokens
        self.num_host_hit_tokens += num_tokens
        self.store(sequence)

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
        self._note_drafted(sequence, fresh.start)

    def _note_drafted(self, sequence: Sequence, first: int) -> None:
        """Which of its stored blocks, from `first` on, have the draft model's KV by now."""
        if self.has_draft_model:
            num_drafted = max(first, sequence.num_drafted_tokens // self._block_size) - first
            stored = sequence.block_ids[first : sequence.num_stored_blocks]
            self._cache.note_drafted(stored, num_drafted)

    def prepare_store(self, sequence: Sequence) -> None:
        """Hash what the launched step completes, before its results are waited for."""
        if self._cache.is_enabled:
            num_tokens = min(sequence.num_launched_tokens, sequence.num_tokens)
            sequence.block_hashes(num_tokens // self._block_size, self._block_size)

    def end(self, sequence: Sequence) -> None:
        """It needs its blocks no more."""
        if self.host is not None:
            self.host.write(sequence)
        self.give_back(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Take all blocks from the sequence; its tokens are to be computed anew, if ever."""
        for step in self._steps:
            if step.places.pop(sequence, None) is not None:
                step.fences.append(self._pool.open_fence(sequence.block_ids))
        self._note_drafted(sequence, 0)
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

    def refs(self, sequence: Sequence, first: int, last: int) -> BlockRefs:
        """Logical blocks [first, last); those that a launched step fills, or has, have a hash."""
        num_tokens = min(sequence.num_launched_tokens, sequence.num_tokens)
        num_full = min(last, num_tokens // self._block_size)
        hashes = sequence.block_hashes(num_full, self._block_size)[first:]
        return self._pool.refs(sequence.block_ids[first:last], hashes)
