"""The plan of one step: how many tokens of which sequences, and how many more have room.

The first token of a prompt should not wait for a chunk of another prompt, which takes a GPU as long
in a step of its own:

    budget   |--------------------------------|
             |  prompt 1, its last chunk        |     a little over: not another step for the rest
             |  prompt 2, its last |                  prompt 3 begins in the next step, not here
             |  prompt 3, alone, not its last ............. |    in few steps, but for the last one:
             |  prompt 3, its last |                what is left to pull behind the first token
             |  prompt 4, whole, in a queue ............... |    two steps take longer than one

A step of small prompts is not filled up with a long prompt of another caller, which would make
them wait several times as long. The order of prompts, and that long ones make progress, is up to
the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Row
from dataclasses import dataclass, field
from typing import NamedTuple

from ...core.errors import BatonError
from ...core.step_shape import StepShape, pairs_of
from .sequence import Sequence, SequenceState


class ScheduledSequence(NamedTuple):
    """The next `num_scheduled_tokens` tokens of a sequence, from `num_launched_tokens` on."""

    sequence: Sequence
    num_scheduled_tokens: int

    @property
    def samples(self) -> bool:
        """Whether they are its last ones, so that the next token is sampled."""
        return self.num_scheduled_tokens == self.sequence.num_unlaunched_tokens


@dataclass(slots=True)
class Schedule:
    """One step: one token of each `clear` sequence, followed by the `others`. `failed` sequences
    can never continue.

    The tokens that end a prompt may exceed the budget by `num_spare_tokens`. A prompt that is alone
    in its step may have up to `num_chunk_tokens`, decodes included, and leaves `num_last_tokens`
    for its last step; if others wait and it can end in this step, it does. Prompts of up to
    `num_small_tokens` do not share their step with a much longer one of another caller.

    `most_context`: the budget holds for prompts with at most this much context; None: for any.
    """

    num_budget_tokens: int  # that are left
    num_spare_tokens: int = 0
    num_chunk_tokens: int = 0
    num_last_tokens: int = 0
    num_small_tokens: int = 0
    num_prompt_tokens: int = 0
    most_context: int | None = None
    prompt_callers: set[int] = field(default_factory=set)
    clear: list[Sequence] = field(default_factory=list)
    others: list[ScheduledSequence] = field(default_factory=list)
    failed: list[tuple[Sequence, BatonError]] = field(default_factory=list)

    def plan(self, sequence: Sequence, *, is_in_queue: bool = False) -> None:
        """Take as many of a prompt's unlaunched tokens as there is room for."""
        num_tokens = sequence.num_unlaunched_tokens
        budget = self.num_budget_tokens
        if num_tokens > budget and not self.can_end(num_tokens):
            num_tokens = self._chunk_of(num_tokens, is_in_queue)
        self.take(sequence, num_tokens)
        self.num_prompt_tokens += num_tokens
        self.prompt_callers.add(sequence.request.caller_id)

    def take(self, sequence: Sequence, num_tokens: int) -> None:
        """Take `num_tokens` of the sequence's unlaunched tokens into the step."""
        self.others.append(ScheduledSequence(sequence, num_tokens))
        budget, chunk = self.num_budget_tokens, self.num_chunk_tokens
        self.num_budget_tokens = budget - num_tokens if num_tokens < budget else 0
        self.num_chunk_tokens = chunk - num_tokens if num_tokens < chunk else 0

    def take_clear(self, sequences: list[Sequence]) -> None:
        """Take one token of each of the sequences, as many as there is room for."""
        assert not self.clear
        self.clear = clear = sequences[: self.num_budget_tokens]
        self.num_budget_tokens -= len(clear)
        self.num_chunk_tokens = max(0, self.num_chunk_tokens - len(clear))

    @property
    def is_empty(self) -> bool:
        return not (self.clear or self.others)

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences in the order of the step."""
        return [*self.clear, *(s for s, _ in self.others)]

    def drop_preempted(self) -> None:
        """Remove sequences that were preempted, or have ended, since they were planned."""
        self.clear = [s for s in self.clear if s.state is SequenceState.RUNNING]
        self.others = [s for s in self.others if s.sequence.state is SequenceState.RUNNING]

    def limit_prompts(self, num_tokens: int) -> None:
        """Limit the prompt tokens that are still taken to `num_tokens`."""
        if num_tokens < self.num_budget_tokens + self.num_spare_tokens:
            self.num_budget_tokens = min(self.num_budget_tokens, num_tokens)
            self.num_spare_tokens = 0
        self.num_chunk_tokens = min(self.num_chunk_tokens, num_tokens)

    def can_end(self, num_tokens: int) -> bool:
        """Whether the last `num_tokens` of a prompt have room in the step."""
        return num_tokens <= self.num_budget_tokens + self.num_spare_tokens

    def is_cut_for_less(self, context: int) -> bool:
        """Whether a prompt with this much context may have room for fewer tokens."""
        return self.most_context is not None and context > self.most_context

    def should_begin(self, num_tokens: int) -> bool:
        """Whether a prompt with `num_tokens` to compute should begin in this step.

        Not if it would only delay the prompts that end with this step: they fill a GPU already, or
        the new prompt would have a larger step of its own.
        """
        if self.can_end(num_tokens) or not self.num_prompt_tokens:
            return True
        budget = self.num_budget_tokens
        return self.num_prompt_tokens < budget and self.num_chunk_tokens <= budget

    def would_stretch(self, caller_id: int, num_tokens: int) -> bool:
        """Whether a prompt with `num_tokens` to compute would make small ones of others wait."""
        num_planned, num_small = self.num_prompt_tokens, self.num_small_tokens
        is_long = 0 < num_planned <= num_small and num_tokens > max(num_small, 4 * num_planned)
        return is_long and caller_id not in self.prompt_callers

    def _chunk_of(self, num_tokens: int, is_in_queue: bool) -> int:
        """How many tokens to take of a prompt that does not end within the budget."""
        budget = self.num_budget_tokens
        if self.num_prompt_tokens or self.num_chunk_tokens <= budget:
            return budget
        if is_in_queue and num_tokens <= self.num_chunk_tokens:
            return num_tokens
        num_first = min(num_tokens - self.num_last_tokens, self.num_chunk_tokens)
        return max(num_first, min(budget, self.num_last_tokens))  # with many decodes few are left


def step_shape(clear: Row[Sequence], others: Iterable[ScheduledSequence] = ()) -> StepShape:
    """The shape of a step, before it is launched, with one token of each `clear` sequence."""
    num_prompt_tokens = pairs = 0
    num_decodes, keys = len(clear), sum([s.num_launched_tokens + 1 for s in clear])
    for sequence, num_tokens in others:
        num_launched = sequence.num_launched_tokens
        if num_launched < sequence.num_prefill_tokens:
            num_prompt_tokens += num_tokens
            pairs += pairs_of(num_tokens, num_launched)
        else:
            num_decodes += num_tokens
            keys += num_launched + num_tokens
    return StepShape(num_prompt_tokens, pairs, num_decodes, keys)
