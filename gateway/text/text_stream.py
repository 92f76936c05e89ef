"""A request's tokens as text that may be shown: detokenised, and cut at the first stop string.

What could be the beginning of a stop string is held back. The match that is complete first wins; of
those that end at the same character, the longest. So the outcome does not depend on how the text
was cut into pieces.

    stop "END"     fed "a E"  ->  shown "a "   held "E"
                   fed "N"    ->  shown ""     held "EN"
                   fed "x D"  ->  shown "ENx D"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


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


@dataclass(slots=True)
class StopMatcher:
    """One request's matcher. After a match nothing more may be fed."""

    stops: Sequence[str]
    _held: str = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take more text; return what can be shown now, and the stop string that matched."""
        if not self.stops:
            return text, None
        buffer = self._held + text
        found = [(buffer.find(stop), stop) for stop in self.stops]
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if ends:
            _, start, stop = min(ends)
            self._held = ""
            return buffer[:start], stop
        num_shown = len(buffer) - self._num_held(buffer)
        self._held = buffer[num_shown:]
        return buffer[:num_shown], None

    def flush(self) -> str:
        """The text ended: what was held back was no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that begins a stop string."""
        longest = max((len(stop) for stop in self.stops), default=0) - 1
        for length in range(min(longest, len(buffer)), 0, -1):
            end = buffer[-length:]
            if any(stop.startswith(end) for stop in self.stops):
                return length
        return 0
