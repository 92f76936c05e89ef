"""One step in the planning: how many tokens of which sequence, and what has room beside them.

A prompt's first token should not wait for the chunk of another prompt, which takes a GPU as long in
a step of its own:

    budget   |--------------------------------|
             |  prompt 1, its last chunk        |     a little over: not another step for the rest
             |  prompt 2, its last |                  prompt 3 begins in the next step, not here
             |  prompt 3, alone, not its last ............. |    in few steps, but for the last one:
             |  prompt 3, its last |                what is left to pull behind the first token
             |  prompt 4, whole, in a queue ............... |    two steps take longer than one

A step of small prompts is not filled with a long one of another caller: it would take them several
times as long. Who is asked first, and that long prompts get on all the same, is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Row
from dataclasses import dataclass, field
from typing import NamedTuple

from ...core.errors import BatonError
from ...core.step_cost import StepShape, pairs_of
from .sequence import Sequence, SequenceState


class ScheduledSequence(NamedTuple):
    """`num_scheduled_tokens` tokens of the sequence, from `num_launched_tokens` on."""

    sequence: Sequence
    num_scheduled_tokens: int

    @property
    def samples(self) -> bool:
        """Whether they are its last ones, so that the token behind them is sampled."""
        return self.num_scheduled_tokens == self.sequence.num_unlaunched_tokens


@dataclass(slots=True)
class Schedule:
    """One step: a token of each that is `clear`, and behind them the `others`. `failed` sequences
    can never go on.

    The tokens that end a prompt may exceed the budget by `num_spare_tokens`. A prompt with no other
    in its step may have up to `num_chunk_tokens`, the decodes included, and leaves
    `num_last_tokens` for its last step, unless in a queue it can end in this one. Prompts of up
    to `num_small_tokens` share their step with no much longer one of another caller.

    `most_context`: of a prompt that has as many tokens as there is room for, how much is computed
    at most; None: however much.
    """

    num_budget_tokens: int  # left
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
        """Have so many of the sequence's unlaunched tokens in the step."""
        self.others.append(ScheduledSequence(sequence, num_tokens))
        budget, chunk = self.num_budget_tokens, self.num_chunk_tokens
        self.num_budget_tokens = budget - num_tokens if num_tokens < budget else 0
        self.num_chunk_tokens = chunk - num_tokens if num_tokens < chunk else 0

    def take_clear(self, sequences: list[Sequence]) -> None:
        """Have a token of each of these, as many as there is room for."""
        assert not self.clear
        self.clear = clear = sequences[: self.num_budget_tokens]
        self.num_budget_tokens -= len(clear)
        self.num_chunk_tokens = max(0, self.num_chunk_tokens - len(clear))

    @property
    def is_empty(self) -> bool:
        return not (self.clear or self.others)

    @property
    def sequences(self) -> list[Sequence]:
        """In the order of the step."""
        return [*self.clear, *(one for one, _ in self.others)]

    def drop_preempted(self) -> None:
        """Leave out what was preempted, or has ended, since it was planned."""
        self.clear = [one for one in self.clear if one.state is SequenceState.RUNNING]
        self.others = [s for s in self.others if s.sequence.state is SequenceState.RUNNING]

    def fit_drafts(self) -> None:
        """Leave out tokens of sequences that have fewer drafts than when they were planned."""
        self.others = [
            ScheduledSequence(one, min(num_tokens, one.num_unlaunched_tokens))
            for one, num_tokens in self.others
        ]

    def limit_prompts(self, num_tokens: int) -> None:
        """Let the step have no more tokens of prompts than these, though it had room for more."""
        if num_tokens < self.num_budget_tokens + self.num_spare_tokens:
            self.num_budget_tokens = min(self.num_budget_tokens, num_tokens)
            self.num_spare_tokens = 0
        self.num_chunk_tokens = min(self.num_chunk_tokens, num_tokens)

    def can_end(self, num_tokens: int) -> bool:
        """Whether so many tokens, the last ones of a prompt, have room in the step."""
        return num_tokens <= self.num_budget_tokens + self.num_spare_tokens

    def is_cut_for_less(self, context: int) -> bool:
        """Whether a prompt of which so much is computed may have room for fewer tokens."""
        return self.most_context is not None and context > self.most_context

    def should_begin(self, num_tokens: int) -> bool:
        """Whether a prompt with so many tokens to compute is better begun in this step.

        Not if it only makes the prompts wait that are in the step already: they end with it, and
        are enough to fill a GPU, or alone it would get on in a larger step.
        """
        if self.can_end(num_tokens) or not self.num_prompt_tokens:
            return True
        budget = self.num_budget_tokens
        return self.num_prompt_tokens < budget and self.num_chunk_tokens <= budget

    def would_stretch(self, caller_id: int, num_tokens: int) -> bool:
        """Whether a prompt with so many tokens to compute would make small ones of others wait."""
        num_planned, num_small = self.num_prompt_tokens, self.num_small_tokens
        is_long = 0 < num_planned <= num_small and num_tokens > max(num_small, 4 * num_planned)
        return is_long and caller_id not in self.prompt_callers

    def _chunk_of(self, num_tokens: int, is_in_queue: bool) -> int:
        """How many of a prompt's tokens to take that does not end within the budget."""
        budget = self.num_budget_tokens
        if self.num_prompt_tokens or self.num_chunk_tokens <= budget:
            return budget
        if is_in_queue and num_tokens <= self.num_chunk_tokens:
            return num_tokens
        num_first = min(num_tokens - self.num_last_tokens, self.num_chunk_tokens)
        return max(num_first, min(budget, self.num_last_tokens))  # with many decodes few are left


def step_shape(clear: Row[Sequence], others: Iterable[ScheduledSequence] = ()) -> StepShape:
    """What a step of these, not launched yet, has in it: a token of those that are `clear`."""
    num_prompt_tokens = pairs = 0
    num_decodes, keys = len(clear), sum([one.num_launched_tokens + 1 for one in clear])
    for sequence, num_tokens in others:
        num_launched = sequence.num_launched_tokens
        if num_launched < sequence.num_prefill_tokens:
            num_prompt_tokens += num_tokens
            pairs += pairs_of(num_tokens, num_launched)
        else:
            num_decodes += num_tokens
            keys += num_launched + num_tokens
    return StepShape(num_prompt_tokens, pairs, num_decodes, keys)
