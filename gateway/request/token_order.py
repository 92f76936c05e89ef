"""Tokens of one attempt, and log-probabilities of a prompt, put in order by their position.

        known already │ next_index
    0 1 2 3 4 5 6 7 8 │ 9  _  11        9 can go out; 11 is held until 10 comes
    └ doubles: dropped ┘

Two streams race: the decode node's first token may overtake the prefill node's. The first value
seen for a position stays; streamed tokens never change. A prompt's log-probabilities come by
chunks, and again on a retry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ...core.errors import EngineFailed
from ...core.request.request import TokenLogprobs

T = TypeVar("T")


@dataclass(slots=True)
class TokenSplice(Generic[T]):
    """Of whatever stands for a token.

    `next_index` is the position that must come next; `max_tokens` bounds all positions.
    """

    next_index: int
    max_tokens: int
    _early: dict[int, T] = field(default_factory=dict)

    def add(self, first_index: int, tokens: Sequence[T]) -> list[T]:
        """Take tokens of positions from `first_index` on; return those now in order.

        Raises EngineFailed for a position past `max_tokens`: no engine may send that.
        """
        if tokens and first_index + len(tokens) > self.max_tokens:
            raise EngineFailed(
                f"an engine sent token {first_index + len(tokens) - 1} of at most {self.max_tokens}"
            )
        if first_index == self.next_index and not self._early:  # nearly always
            self.next_index += len(tokens)
            return list(tokens)
        for index, token in enumerate(tokens, first_index):
            if index >= self.next_index:
                self._early.setdefault(index, token)
        ready: list[T] = []
        while self.next_index in self._early:
            ready.append(self._early.pop(self.next_index))
            self.next_index += 1
        return ready

    def take_next(self, index: int) -> bool:
        """Whether a token of this position can go out at once, as nearly always; it is then out."""
        if index != self.next_index or self._early or index >= self.max_tokens:
            return False
        self.next_index += 1
        return True


class PromptScores:
    """Of the prompt's second token and all behind it: what came first for a position stays."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_wanted = num_prompt_tokens - 1
        self._known: list[TokenLogprobs] = []

    @property
    def is_complete(self) -> bool:
        return len(self._known) >= self._num_wanted

    def add(self, first_index: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Take those of positions from `first_index` on. Raises EngineFailed on nonsense."""
        num_doubles = len(self._known) - (first_index - 1)
        if num_doubles < 0 or first_index + len(logprobs) > self._num_wanted + 1:
            raise EngineFailed("an engine sent log-probabilities that do not fit the prompt")
        self._known += logprobs[num_doubles:]

    def all(self) -> tuple[TokenLogprobs, ...]:
        return tuple(self._known)
