"""What a run keeps of every request: when it was due, sent, and when each token came. Raw times, so
that any figure can be computed later.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.metrics import TokenTimes


@dataclass(slots=True)
class Record:
    """One request. Times are seconds from the run's start; `error` is empty if nothing failed."""

    group: str
    due_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    sent_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    error: str = ""
    is_cut_off: bool = False  # it still ran at the end of the run

    @property
    def times(self) -> TokenTimes:
        return TokenTimes(self.sent_s, tuple(self.token_s))

    @property
    def lag_s(self) -> float:
        """How late the generator itself was."""
        return self.sent_s - self.due_s

    def count_as(self, num_prompt_tokens: int | None, num_output_tokens: int | None) -> None:
        """Take over the server's count at the end of a request.

        Where pieces of several tokens were counted as one, the tokens are spread evenly over the
        pieces, the last one on the last.
        """
        if num_prompt_tokens is not None:
            self.num_prompt_tokens = num_prompt_tokens
        num_pieces, num_tokens = len(self.token_s), num_output_tokens
        if not num_tokens or not num_pieces or num_tokens == num_pieces:
            return
        last_s = self.token_s[-1]
        self.token_s = [self.token_s[i * num_pieces // num_tokens] for i in range(num_tokens)]
        self.token_s[-1] = last_s
