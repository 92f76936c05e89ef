"""Whether one more sequence fits, by the estimated lengths of outputs and the most blocks that all
sequences will then hold at once (peak_blocks.py).

Outputs may be longer than estimated, and prefills take time: the scheduler that admits by this has
to be able to preempt.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Row
from itertools import islice
from statistics import fmean

from ...core.request.request import Request
from ..kv.limits import EngineLimits
from .peak_blocks import Footprint, peak_blocks
from .sequence import Sequence

_FEW_OUTPUTS = 32  # for the mean: of more it would follow a new mix of requests too late


class OutputLengthEstimator:
    """How long an output will get: a high quantile of recent output lengths.

    Of these only the outputs longer than what the request already has are considered; if there are
    none, it is expected to use all of its max_tokens.
    """

    def __init__(self, *, window: int = 512, quantile: float = 0.9) -> None:
        self._window = window
        self._quantile = quantile
        self._recent: deque[int] = deque()
        self._ordered: list[int] = []

    def observe(self, num_outputs: int) -> None:
        """A request ended by itself after `num_outputs` tokens."""
        if len(self._recent) == self._window:
            oldest = self._recent.popleft()
            del self._ordered[bisect.bisect_left(self._ordered, oldest)]
        self._recent.append(num_outputs)
        bisect.insort(self._ordered, num_outputs)

    @property
    def mean(self) -> float:
        """The mean of the last few outputs; 0 before the first."""
        few = [*islice(reversed(self._recent), _FEW_OUTPUTS)]
        return fmean(few) if few else 0.0

    @property
    def expected(self) -> int:
        """The estimate for a new request, whatever its max_tokens; 0 before the first output."""
        return self.estimate(0, self._ordered[-1]) if self._ordered else 0

    def estimate(self, num_generated: int, max_tokens: int) -> int:
        """Output tokens still to come, at least 1, of a request that has `num_generated`."""
        first = bisect.bisect_right(self._ordered, num_generated)
        num_longer = len(self._ordered) - first
        total = max_tokens
        if num_longer:
            rank = math.ceil(self._quantile * num_longer) - 1
            total = min(total, self._ordered[first + max(0, rank)])
        return max(1, total - num_generated)


class Admission:
    """Decides whether one more sequence fits beside those that have blocks."""

    def __init__(self, limits: EngineLimits, estimator: OutputLengthEstimator) -> None:
        self._limits = limits
        self._estimator = estimator

    def footprints(self, sequences: Iterable[Sequence]) -> list[Footprint]:
        """Of sequences that have blocks; valid until a step is launched or one of them ends."""
        return [self.footprint(sequence, sequence.block_ids) for sequence in sequences]

    def fits(self, candidate: Sequence, matched: list[int], others: list[Footprint]) -> bool:
        """Whether the pool can hold the estimated peak; `matched` are cached blocks to share.

        A candidate beside nothing but held sequences fits: however long it is expected to get,
        waiting would not help. Held sequences end by themselves, so a beam search may wait for
        them.
        """
        may_wait = bool(others) and candidate.group is not None
        if not candidate.is_held and not may_wait and all(f.is_held for f in others):
            return True
        own = self.footprint(candidate, matched)
        footprints = [*others, own, *self.footprints_of_group(candidate)]
        block_size, capacity = self._limits.block_size, self._limits.capacity
        # Comparing thousands of block ids is only needed if the bound does not fit.
        if peak_blocks(footprints, block_size, is_bound=True) <= capacity:
            return True
        return peak_blocks(footprints, block_size) <= capacity

    def has_credit(
        self, candidate: Sequence, matched: list[int], holders: Iterable[Sequence]
    ) -> bool:
        """Whether the KV that is held for pullers leaves room for the candidate's.

        If none is held, any candidate passes: there is nothing to wait for.
        """
        held_by, limit = list(holders), self._limits.held_blocks_limit
        num_blocks = self._limits.blocks_for(candidate.num_slots)
        if not held_by or sum(len(s.block_ids) for s in held_by) + num_blocks <= limit:
            return True
        held = distinct_blocks(held_by)
        return not held or len(held.union(matched)) + num_blocks - len(matched) <= limit

    def footprints_of_group(self, leader: Sequence) -> list[Footprint]:
        """The slots that the absent members of the leader's group will not share with it: all
        behind the prompt, as if their outputs differed from the first token on."""
        group = leader.group
        if group is None or group.members[0] is not leader or not group.num_absent:
            return []
        num_shared = len(leader.request.prompt_token_ids) // self._limits.block_size
        num_own = leader.num_tokens - num_shared * self._limits.block_size + 1
        num_growth = self.num_growth(leader.request, leader.num_outputs, leader.num_tokens + 1)
        return [Footprint(num_own, num_growth, [])] * group.num_absent

    def footprint(self, sequence: Sequence, block_ids: Row[int]) -> Footprint:
        num_slots = sequence.num_slots
        if sequence.is_held:
            return Footprint(num_slots, 0, block_ids, is_held=True)
        num_growth = self.num_growth(sequence.request, sequence.num_outputs, num_slots)
        return Footprint(num_slots, num_growth, block_ids)

    def num_growth(self, request: Request, num_outputs: int, num_slots: int) -> int:
        """Slots to come of a request with `num_outputs` output tokens and `num_slots` slots."""
        num_left = self._estimator.estimate(num_outputs, self._limits.max_outputs(request))
        num_tokens = len(request.prompt_token_ids) + num_outputs
        return max(0, num_tokens + num_left - 1 - num_slots)  # the last one's is never computed


def distinct_blocks(sequences: Iterable[Sequence]) -> set[int]:
    """The blocks of all the sequences, shared ones once."""
    blocks: set[int] = set()
    return blocks.union(*(sequence.block_ids for sequence in sequences))
