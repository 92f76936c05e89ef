"""A request's tokens as text that may be shown: detokenised, and cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .stop_strings import StopMatcher


class Detokenize(Protocol):
    """detokenizer.Detokenizer, or a fake."""

    def step(self, token_id: int) -> str: ...


class TextPiece(NamedTuple):
    """What some tokens brought. `num_tokens` of them count: all, or up to the stop string's end."""

    text: str
    num_tokens: int
    matched_stop: str | None


class TextStream:
    """One request's text so far: what is held back lies here.

    The text of the first `min_tokens` tokens is not searched for stop strings. The one that is
    found is not shown, unless `includes_stop`.
    """

    def __init__(
        self,
        detokenizer: Detokenize,
        stops: Sequence[str],
        *,
        min_tokens: int = 0,
        includes_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self.is_searched = bool(stops)  # for stop strings: then `next` is not enough
        self._num_unsearched = min_tokens
        self._includes_stop = includes_stop

    def feed(self, token_ids: Sequence[int]) -> TextPiece:
        """Take the next tokens; those behind the one that completes a stop string do not count."""
        shown: list[str] = []
        for count, token_id in enumerate(token_ids, 1):
            text, stop = self._detokenizer.step(token_id), None
            if self._num_unsearched:
                self._num_unsearched -= 1
            else:
                text, stop = self._matcher.feed(text)
            shown.append(text)
            if stop is not None:
                if self._includes_stop:
                    shown.append(stop)
                return TextPiece("".join(shown), count, stop)
        return TextPiece("".join(shown), len(token_ids), None)

    def next(self, token_id: int) -> str:
        """The next token's text, of a stream that is not searched."""
        return self._detokenizer.step(token_id)

    def flush(self) -> str:
        """The last of the text, once no more tokens come."""
        return self._matcher.flush()
