"""Blocks of sequences that run: who gets one more, who gives theirs up for that, or for good."""

from __future__ import annotations

from ...core.errors import PromptTooLarge
from ..kv.limits import EngineLimits
from .admission import distinct_blocks
from .block_tables import BlockTables
from .queues import Queues
from .schedule import Schedule
from .sequence import Sequence, SequenceGroup, SequenceState


class Preemption:
    """Of one scheduler. `num_swaps`: of the preemptions those whose KV went to host memory."""

    def __init__(self, limits: EngineLimits, tables: BlockTables, queues: Queues) -> None:
        self.num_preemptions = 0
        self.num_swaps = 0
        self._limits = limits
        self._tables = tables
        self._queues = queues

    def make_room(self, sequence: Sequence, schedule: Schedule) -> bool:
        """Slots for all its tokens, preempting others if need be; False: not in this step."""
        if sequence.num_slots <= len(sequence.block_ids) * self._limits.block_size:
            return True
        if self.has_outgrown_pool(sequence, schedule):
            return False
        while not self._tables.grow(sequence):
            victim = self.next_victim()
            if victim is None:
                return False  # the rest is held, reserved or fenced, and will be released
            self.preempt(victim)
            if victim.group is not None:
                schedule.drop_preempted()
            if sequence.state is not SequenceState.RUNNING:
                return False
        return True

    def fit_drafts(self, sequence: Sequence, schedule: Schedule) -> None:
        """Leave as many drafts as have room in the step; none, rather than preempt anybody."""
        drafts = sequence.draft_token_ids
        sequence.draft_token_ids = drafts[: schedule.num_budget_tokens - 1]
        if not self._tables.grow(sequence):
            sequence.draft_token_ids = ()

    def make_room_for_drafts(self, sequence: Sequence, num_drafts: int) -> bool:
        """Slots for all its tokens and so many drafts, which it does not have yet, if there are
        any without preempting anybody."""
        sequence.draft_token_ids = (0,) * num_drafts
        has_room = self._tables.grow(sequence)
        sequence.draft_token_ids = ()
        return has_room

    def preempt_group(self, group: SequenceGroup) -> None:
        """Take all blocks of the group: its first member waits for its turn, the others for it."""
        for sequence in group.members:
            if sequence.state is SequenceState.RUNNING:
                self._take_blocks(sequence)
            sequence.state = SequenceState.PARKED
        self._queues.groups.remove(group)
        self.wait_again(group.members[0])
        self.num_preemptions += 1

    def preempt(self, sequence: Sequence) -> None:
        """Take its blocks, and those of its group: it waits for its turn again."""
        if sequence.group is not None:
            self.preempt_group(sequence.group)
            return
        self._take_blocks(sequence)
        self.wait_again(sequence)
        self.num_preemptions += 1

    def turn_back(self, sequence: Sequence) -> None:
        """It was admitted, and cannot run: its blocks did not come. It is next, for others."""
        if sequence.group is not None:
            self._queues.groups.remove(sequence.group)
        self._tables.give_back(sequence)
        self.wait_again(sequence)

    def _take_blocks(self, sequence: Sequence) -> None:
        self._queues.running.remove(sequence)
        self._tables.store(sequence)  # what was pulled for it may not be there yet
        if self._tables.host is not None:
            self.num_swaps += self._tables.host.swap_out(sequence)
        self._tables.give_back(sequence)
        sequence.was_preempted = True

    def next_victim(self) -> Sequence | None:
        """Not the oldest nor its beams, and nothing held: the latest prompt that is half computed,
        or the latest arrival. A prompt that was preempted once has aged: it counts as what decodes
        does."""
        preemptible = [one for one in self._queues.running if not one.is_held]
        if not preemptible:
            return None
        group = preemptible[0].group
        others = [one for one in preemptible[1:] if one.group is None or one.group is not group]
        victims = [one for one in others if _is_young_prompt(one)] or others
        return victims[-1] if victims else None

    def has_outgrown_pool(self, sequence: Sequence, schedule: Schedule) -> bool:
        """Take it out if the whole pool could not hold its tokens any more.

        An awaited token may end it: it is judged once that is known.
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
        self._queues.leave(sequence)
        self._tables.end(sequence)

    def _check_fits_group(self, group: SequenceGroup) -> None:
        """Raise PromptTooLarge if the whole pool could not hold all its sequences' slots."""
        fresh = [self._limits.blocks_for(s.num_slots) - len(s.block_ids) for s in group.members]
        num_blocks = len(distinct_blocks(group.members)) + sum(fresh)
        if num_blocks > self._limits.capacity:
            raise PromptTooLarge(
                f"{len(fresh)} beams need {num_blocks} KV blocks; the pool has "
                f"{self._limits.capacity}"
            )

    def wait_again(self, sequence: Sequence) -> None:
        """Queue it up before all others."""
        sequence.state = SequenceState.WAITING
        _, _, num_to_compute = self._tables.find(sequence)
        self._queues.add(sequence, num_to_compute, is_first=True)


def _is_young_prompt(sequence: Sequence) -> bool:
    """Whether it is computed for the first time and has no output token yet."""
    return sequence.is_prefilling and not sequence.num_outputs and not sequence.was_preempted
