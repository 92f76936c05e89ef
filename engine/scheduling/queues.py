"""The queues and lists that the sequences of an engine are in.

    waiting ──► running ──► held: computed, waiting to be released
       └► loading ▲
coming ──► reserved ┘             all but waiting and coming sequences have blocks

Decides nothing: see scheduler.py.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator, MutableSequence
from itertools import chain

from ...core.fair_queue import FairQueue
from ..kv.block_pool import BlockPool
from ..kv.host_tier import BlockLoad
from ..kv.limits import EngineLimits
from .sequence import Sequence, SequenceGroup, SequenceState


class RequestQueue(FairQueue[Sequence]):
    """`refused_at`: the value of `Queues.opportunities` when its head did not fit."""

    refused_at: int | None = None


class Queues:
    """The queues of one scheduler."""

    def __init__(self, limits: EngineLimits, pool: BlockPool) -> None:
        self.waiting, self.coming = RequestQueue(), RequestQueue()
        self.running: list[Sequence] = []  # by arrival
        self.loading: dict[Sequence, BlockLoad] = {}
        self.reserved: list[Sequence] = []
        self.held: list[Sequence] = []
        self.in_adapter_room: Collection[Sequence] = ()  # that wait for an adapter's slot
        self.groups: list[SequenceGroup] = []  # whose first member has blocks
        self._limits = limits
        self._pool = pool
        self.stalled_at: int | None = None  # `opportunities`, when nothing could be scheduled
        self._num_holds = 0

    @property
    def opportunities(self) -> int:
        """A counter that moves when blocks or a running slot may have become free."""
        return self._pool.num_releases + self._num_holds

    @property
    def parked(self) -> list[Sequence]:
        """Prompts that wait for their adapter's slot."""
        return [s for s in self.in_adapter_room if s.state is SequenceState.WAITING]

    def owners(self) -> Iterator[Sequence]:
        """All sequences that have blocks."""
        yield from self.running
        yield from self.loading
        yield from self.reserved
        yield from self.held

    def owners_and_head(self) -> Iterator[Sequence]:
        """All sequences that have blocks, and the head of the waiting queue."""
        yield from self.owners()
        if (head := self.waiting.head) is not None:
            yield head

    def holders(self) -> Iterator[Sequence]:
        """The sequences whose blocks are, or will be, held for pullers."""
        yield from self.held
        yield from (s for s in chain(self.running, self.loading) if s.is_held)

    def has_slot(self, sequence: Sequence | None = None, *, beside: Sequence | None = None) -> bool:
        """Whether one more may run: `sequence` with its group, and `beside` with its own."""
        num_seqs = len(self.running) + len(self.loading) + len(self.reserved)
        num_seqs += sum(group.num_absent for group in self.groups)
        num_seqs += 0 if sequence is None else sequence.num_to_come
        if beside is not None:
            num_seqs += 1 + beside.num_to_come
        return num_seqs < self._limits.max_num_seqs

    def run(self, sequence: Sequence) -> None:
        """Let the sequence, which has blocks, run."""
        self.stalled_at = None
        sequence.state = SequenceState.RUNNING
        bisect.insort(self.running, sequence, key=lambda s: s.arrival)

    def hold(self, sequence: Sequence) -> None:
        """The prompt of a held sequence is computed: it no longer runs, and keeps its blocks."""
        self.running.remove(sequence)
        sequence.state = SequenceState.HELD
        self.held.append(sequence)
        self._num_holds += 1

    @property
    def has_prefills(self) -> bool:
        """Whether any running or loading prompt is not fully computed."""
        computed = (s.num_computed_tokens >= s.num_prefill_tokens for s in self.running)
        return bool(self.loading) or not all(computed)

    @property
    def has_prompts_to_launch(self) -> bool:
        """Whether the next step may have prompt tokens."""
        has_next = self.next_to_admit is not None
        return has_next or any(
            s.num_launched_tokens < s.num_prefill_tokens for s in reversed(self.running)
        )

    @property
    def next_to_admit(self) -> Sequence | None:
        """The head of the waiting queue, if a slot is free for it and something was freed since it
        did not fit."""
        head = self._head_of(self.waiting)
        return head if head is not None and self.has_slot(head) else None

    @property
    def next_to_reserve(self) -> Sequence | None:
        """The same for the coming queue. A slot that the head of the waiting queue needs is not
        given away."""
        if (head := self._head_of(self.coming)) is None:
            return None  # nearly always
        return head if self.has_slot(head, beside=self.waiting.head) else None

    def _head_of(self, queue: RequestQueue) -> Sequence | None:
        return None if queue.refused_at == self.opportunities else queue.head

    def remove(self, sequence: Sequence) -> None:
        """End the sequence, whatever its state."""
        queues: dict[SequenceState, MutableSequence[Sequence] | RequestQueue] = {
            SequenceState.WAITING: self.waiting,
            SequenceState.COMING: self.coming,
            SequenceState.RUNNING: self.running,
            SequenceState.RESERVED: self.reserved,
            SequenceState.HELD: self.held,
        }
        if sequence.state is SequenceState.LOADING:
            del self.loading[sequence]
        elif sequence.state is not SequenceState.PARKED:
            queues[sequence.state].remove(sequence)
        sequence.state = SequenceState.ENDED
        group = sequence.group
        if group is not None and all(s.state is SequenceState.ENDED for s in group.members):
            self.groups = [other for other in self.groups if other is not group]

    def refuse_head(self, queue: RequestQueue) -> None:
        """The head does not fit: it stays the head, and is tried again when something is freed."""
        queue.pin_head()
        queue.refused_at = self.opportunities
