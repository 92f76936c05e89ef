"""The search for stop strings in a text that arrives in pieces.

Text that may be the beginning of a stop string is held back. The match that ends first wins, and of
matches that end at the same character the longest. So the result does not depend on the pieces.

    stop "END"     fed "a E"  ->  shown "a "   held "E"
                   fed "N"    ->  shown ""     held "EN"
                   fed "x D"  ->  shown "ENx D"
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class StopSearch:
    """The search of one request's text, token by token, up to the first match. The text of the
    next `_num_unsearched` tokens is not searched; `_includes_stop`: the stop string that is found
    is shown."""

    _stops: Sequence[str]
    _num_unsearched: int = 0
    _includes_stop: bool = False
    _held: str = ""

    def feed(self, texts: Iterable[str]) -> tuple[str, int, str | None]:
        """Take the texts of the next tokens, up to the one that completes a stop string. Returns
        what can be shown now, the number of tokens taken, and the stop string."""
        shown: list[str] = []
        for text in texts:
            stop = None
            if self._num_unsearched:
                self._num_unsearched -= 1
            else:
                text, stop = self._feed(text)
            shown.append(text)
            if stop is not None:
                end = stop if self._includes_stop else ""
                return "".join((*shown, end)), len(shown), stop
        return "".join(shown), len(shown), None

    def flush(self) -> str:
        """The text that was held back: the output has ended without a match."""
        held, self._held = self._held, ""
        return held

    def _feed(self, text: str) -> tuple[str, str | None]:
        """Add text; returns the text that can be shown now, and the stop string that matched."""
        buffer = self._held + text
        found = [(buffer.find(stop), stop) for stop in self._stops]
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if ends:
            _, start, stop = min(ends)
            self._held = ""
            return buffer[:start], stop
        num_shown = len(buffer) - self._num_held(buffer)
        self._held = buffer[num_shown:]
        return buffer[:num_shown], None

    def _num_held(self, buffer: str) -> int:
        """The length of the longest suffix of `buffer` that is a prefix of a stop string."""
        longest = max(map(len, self._stops), default=0) - 1
        for length in range(min(longest, len(buffer)), 0, -1):
            end = buffer[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
