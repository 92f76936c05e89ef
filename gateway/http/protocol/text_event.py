"""The event of a stream that most tokens are: one that only adds a text."""

from __future__ import annotations

import json
from dataclasses import dataclass

_quoted = json.encoder.encode_basestring_ascii  # what json.dumps does to a string, at once


@dataclass(frozen=True, slots=True)
class TextEvent:
    """What stands before and behind the text, which is the same all through a stream."""

    before: str
    behind: str

    def of(self, text: str) -> str:
        return f"{self.before}{_quoted(text)}{self.behind}"

    def within(self, head: str, tail: str) -> TextEvent:
        """With more around it."""
        return TextEvent(head + self.before, self.behind + tail)
