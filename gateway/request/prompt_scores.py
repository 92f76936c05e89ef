"""Collects the log-probabilities of a prompt, if they were requested."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.errors import EngineFailed
from ...core.request.request import TokenLogprobs


class PromptScores:
    """Log-probabilities of the prompt's tokens from the second on. They arrive by prefill chunk,
    and again on a retry: the first one received for a position stays."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_wanted = num_prompt_tokens - 1
        self._known: list[TokenLogprobs] = []

    @property
    def is_complete(self) -> bool:
        return len(self._known) >= self._num_wanted

    def add(self, first_index: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Add those of positions from `first_index` on. Raises EngineFailed if they do not fit."""
        num_doubles = len(self._known) - (first_index - 1)
        if num_doubles < 0 or first_index + len(logprobs) > self._num_wanted + 1:
            raise EngineFailed("an engine sent log-probabilities that do not fit the prompt")
        self._known += logprobs[num_doubles:]

    def all(self) -> tuple[TokenLogprobs, ...]:
        return tuple(self._known)
