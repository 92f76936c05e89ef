"""Allocates the blocks of sequences and frees them: the only writer of `Sequence.block_ids`.

Joins the pool and the prefix cache: an admission takes cached blocks first, a full block is cached
once it is computed, and a freed block stays fenced while a step on the device uses it. Decides
nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Row
from dataclasses import dataclass, field

from ..kv.block_pool import BlockPool, BlockRefs, Fence
from ..kv.host_tier import HostMatch
from ..kv.prefix_cache import PrefixCache
from .host_prefixes import HostPrefixes
from .sequence import Sequence


@dataclass(slots=True, eq=False)
class StepFence:
    """Keeps blocks that the step's sequences free while the step is on the device.

    As long as a sequence has its blocks no fence is needed: a fence over every block of every step
    would cost more host time than a decode step takes. `places`: the place of each sequence in the
    step. A sequence that freed its blocks is removed: its results are dropped.
    """

    places: dict[Sequence, int]
    fences: list[Fence] = field(default_factory=list)  # over the blocks of removed sequences


class BlockTables:
    """The block tables of all sequences of one engine. `has_draft_model`: the KV of the draft model
    may be missing in some blocks, since it computes tokens decoded without drafts later, if ever.
    """

    def __init__(
        self, pool: BlockPool, cache: PrefixCache, block_size: int, host: HostPrefixes | None = None
    ) -> None:
        """`host`: the prefix cache's extension in host memory, if there is one."""
        self._pool = pool
        self.host = host
        self.has_draft_model = False
        self._cache = cache
        self._block_size = block_size
        self._steps: list[StepFence] = []  # on the device
        self.num_queried_tokens = 0  # of all sequences that were allocated blocks
        self.num_hit_tokens = 0  # of them, those in cached blocks

    def match(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Cached blocks that hold a prefix of the sequence's first `num_tokens` tokens.

        Empty if it has to compute its whole prompt for log-probabilities.
        """
        if not self._cache.is_enabled or sequence.needs_prompt_logprobs:
            return []
        return sequence.find(self._cache.match, 0, num_tokens, self._block_size)

    def find(self, sequence: Sequence) -> tuple[list[int], HostMatch | None, int]:
        """For a sequence without blocks: the cached blocks that hold a prefix of it, the blocks in
        host memory that follow them, and how many tokens are left to compute: at least one, whose
        logits the next token is sampled from."""
        num_tokens, in_host = sequence.num_tokens - 1, None
        matched = self.match(sequence, num_tokens)
        num_blocks = len(matched)
        if self.host is not None and (in_host := self.host.match(sequence, num_tokens, num_blocks)):
            num_blocks += in_host.num_blocks
        return matched, in_host, sequence.num_tokens - num_blocks * self._block_size

    def allocate(self, sequence: Sequence, matched: Row[int], coming: Row[int] = ()) -> bool:
        """Allocate blocks for all slots of a sequence without blocks, or none.

        Its first blocks are `matched`, which are computed, then those that are `coming`: on the
        way from host memory for another sequence.
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
        """Its logical block `first` lacks the draft model's KV; None: no block does."""
        if first is not None and sequence.drafted is not None:
            num_drafted_tokens = min(sequence.drafted[0], first * self._block_size)
            sequence.drafted = (num_drafted_tokens, ())

    def share(self, sequence: Sequence, shared: Row[int]) -> bool:
        """Give a sequence without blocks these ones, and more for all its slots, or none."""
        assert not sequence.block_ids
        self._pool.acquire(shared)  # first: the allocation could evict them
        sequence.block_ids = array("i", shared)
        if not self.grow(sequence):
            sequence.block_ids = array("i")
            self._pool.release(shared)
            return False
        return True

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
        """Enter its computed full blocks into the prefix cache."""
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
        """Record which of its stored blocks, from `first` on, have the draft model's KV."""
        if self.has_draft_model:
            num_drafted = max(first, sequence.num_drafted_tokens // self._block_size) - first
            stored = sequence.block_ids[first : sequence.num_stored_blocks]
            self._cache.note_drafted(stored, num_drafted)

    def prepare_store(self, sequence: Sequence) -> None:
        """Hash the blocks that a launched step fills, before its results are waited for."""
        if self._cache.is_enabled:
            num_tokens = min(sequence.num_launched_tokens, sequence.num_tokens)
            sequence.block_hashes(num_tokens // self._block_size, self._block_size)

    def end(self, sequence: Sequence) -> None:
        """Free its blocks at its end."""
        if self.host is not None:
            self.host.write(sequence)
        self.free(sequence)

    def free(self, sequence: Sequence) -> None:
        """Free all its blocks; if it continues, its KV has to be recomputed."""
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
        """A step that uses the blocks of these sequences is about to be launched."""
        step = StepFence(places)
        self._steps.append(step)
        return step

    def close_step(self, step: StepFence) -> None:
        """The step has completed."""
        self._steps.remove(step)
        for fence in step.fences:
            fence.close()

    def refs(self, sequence: Sequence, first: int, last: int) -> BlockRefs:
        """Its logical blocks [first, last), with hashes of those that are full once the launched
        steps have completed."""
        num_tokens = min(sequence.num_launched_tokens, sequence.num_tokens)
        num_full = min(last, num_tokens // self._block_size)
        hashes = sequence.block_hashes(num_full, self._block_size)[first:]
        return self._pool.refs(sequence.block_ids[first:last], hashes)
