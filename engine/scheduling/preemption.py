"""Blocks for running sequences: which get more, and which are preempted or fail for it."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.errors import PromptTooLarge
from ..kv.limits import EngineLimits
from .admission import distinct_blocks
from .block_tables import BlockTables
from .queues import Queues
from .schedule import Schedule
from .sequence import Sequence, SequenceGroup, SequenceState


@dataclass(slots=True)
class Preemption:
    """The preemptions of one scheduler. `num_swaps`: those whose KV was copied to host memory."""

    _limits: EngineLimits
    _tables: BlockTables
    _queues: Queues
    num_preemptions: int = 0
    num_swaps: int = 0

    def make_room(self, sequence: Sequence, schedule: Schedule) -> bool:
        """Allocate slots for all its tokens, preempting others if needed; False: not this step."""
        if sequence.num_slots <= len(sequence.block_ids) * self._limits.block_size:
            return True
        if self.has_outgrown_pool(sequence, schedule):
            return False
        while not self._tables.grow(sequence):
            victim = self.next_victim()
            if victim is None:
                return False  # other blocks are held, reserved or fenced, and will be freed
            self.preempt(victim)
            if victim.group is not None:
                schedule.drop_preempted()
            if sequence.state is not SequenceState.RUNNING:
                return False
        return True

    def fit_drafts(self, sequence: Sequence, schedule: Schedule) -> None:
        """Keep as many drafts as have room in the step; none if that would need a preemption."""
        drafts = sequence.draft_token_ids
        sequence.draft_token_ids = drafts[: schedule.num_budget_tokens - 1]
        if not self._tables.grow(sequence):
            sequence.draft_token_ids = ()

    def make_room_for_drafts(self, sequence: Sequence, num_drafts: int) -> bool:
        """Allocate slots for all its tokens and `num_drafts` drafts to come, without preempting
        any sequence; False if there are too few blocks."""
        sequence.draft_token_ids = (0,) * num_drafts
        has_room = self._tables.grow(sequence)
        sequence.draft_token_ids = ()
        return has_room

    def preempt_group(self, group: SequenceGroup) -> None:
        """Free all blocks of the group: its first member waits in the queue, the others for it."""
        for sequence in group.members:
            if sequence.state is SequenceState.RUNNING:
                self._take_blocks(sequence)
            sequence.state = SequenceState.PARKED
        self._queues.groups.remove(group)
        self.wait_again(group.members[0])
        self.num_preemptions += 1

    def preempt(self, sequence: Sequence) -> None:
        """Free its blocks, and those of its group: it waits in the queue again."""
        if sequence.group is not None:
            self.preempt_group(sequence.group)
            return
        self._take_blocks(sequence)
        self.wait_again(sequence)
        self.num_preemptions += 1

    def finish_loads(self) -> None:
        """Run the sequences whose copies from host memory have ended. Blocks that could not be
        copied are computed by one of the sequences that share them; the others wait again, next in
        line, for other blocks."""
        host, loads = self._tables.host, self._queues.loading.items()
        assert host is not None
        ended = [(s, load, n) for s, load in loads if (n := load.num_good) is not None]
        for sequence, load, num_blocks in ended:
            del self._queues.loading[sequence]
            if num_blocks >= load.num_shared:
                self._tables.lacks_drafts(sequence, host.loaded(sequence, num_blocks))
                self._tables.store(sequence)
                self._queues.run(sequence)
                continue
            if sequence.group is not None:
                self._queues.groups.remove(sequence.group)
            self._tables.free(sequence)
            self.wait_again(sequence)

    def _take_blocks(self, sequence: Sequence) -> None:
        self._queues.running.remove(sequence)
        self._tables.store(sequence)  # blocks that were pulled may not be stored yet
        if self._tables.host is not None:
            self.num_swaps += self._tables.host.swap_out(sequence)
        self._tables.free(sequence)
        sequence.was_preempted = True

    def next_victim(self) -> Sequence | None:
        """The latest prompt that is half computed, or else the latest arrival; never the oldest
        sequence, its beams, or a held one. A prompt that was preempted once counts as a decode."""
        preemptible = [s for s in self._queues.running if not s.is_held]
        if not preemptible:
            return None
        group = preemptible[0].group
        others = [s for s in preemptible[1:] if s.group is None or s.group is not group]
        victims = [s for s in others if _is_young_prompt(s)] or others
        return victims[-1] if victims else None

    def has_outgrown_pool(self, sequence: Sequence, schedule: Schedule) -> bool:
        """Whether the whole pool could not hold its tokens; then it is removed, and fails.

        With an awaited token, which may end it, it stays until that is known.
        """
        try:
            self._limits.check_fits(sequence.num_slots)
            if sequence.group is not None and sequence.state is SequenceState.RUNNING:
                self._check_fits_group(sequence.group)
        except PromptTooLarge as error:
            if sequence.group is not None:
                for member in sequence.group.members:
                    self._remove(member)
                schedule.drop_preempted()
            elif not sequence.num_awaited_tokens:
                self._remove(sequence)
            else:
                return True
            schedule.failed.append((sequence, error))
            return True
        return False

    def _remove(self, sequence: Sequence) -> None:
        self._queues.remove(sequence)
        self._tables.end(sequence)

    def _check_fits_group(self, group: SequenceGroup) -> None:
        """Raise PromptTooLarge if the whole pool could not hold the slots of all its sequences."""
        fresh = [self._limits.blocks_for(s.num_slots) - len(s.block_ids) for s in group.members]
        num_blocks = len(distinct_blocks(group.members)) + sum(fresh)
        if num_blocks > self._limits.capacity:
            raise PromptTooLarge(
                f"{len(fresh)} beams need {num_blocks} KV blocks; the pool has "
                f"{self._limits.capacity}"
            )

    def wait_again(self, sequence: Sequence) -> None:
        """Queue it before all others, as its caller was charged for it before."""
        sequence.state = SequenceState.WAITING
        _, _, num_to_compute = self._tables.find(sequence)
        queues = self._queues
        queues.stalled_at = None
        queues.waiting.add_first(sequence, sequence.request.caller_id, num_to_compute)
        queues.waiting.refused_at = None  # the head is another now


def _is_young_prompt(sequence: Sequence) -> bool:
    """Whether it is computed for the first time and has no output token yet."""
    return sequence.is_prefilling and not sequence.num_outputs and not sequence.was_preempted
