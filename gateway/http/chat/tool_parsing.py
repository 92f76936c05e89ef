"""A model's text that calls tools, as it comes: content, calls' names, calls' arguments.

    text so far     Let me look. <tool_call>{"name": "now", "arguments": {"zone"
    deltas          Content("Let me look. ")  ToolDelta(0, "now", '')  ToolDelta(0, None, '{"zone"')
`CallScanner` reads one call's JSON object; which text begins and ends one is tool_formats.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """More of the call number `index`; its first delta has the name."""

    index: int
    name: str | None
    arguments: str


Delta = Content | ToolDelta


@dataclass(slots=True)
class CallScanner:
    """Reads `{"name": "...", "arguments": {...}}` character by character.

    The arguments are passed on as they are written, once the name is known. What is no such object
    is found out at the first character that cannot belong to one; values are not judged.
    """

    name: str | None = None
    is_done: bool = False
    is_broken: bool = False
    _raw: list[str] = field(default_factory=list)
    _expected: str = "{"  # {, key, colon, value, end
    _piece: str = ""  # the key or value that is being read
    _key: str = ""
    _depth: int = 0
    _is_in_string: bool = False
    _is_escaped: bool = False
    _arguments: list[str] = field(default_factory=list)  # not passed on yet

    def feed(self, text: str) -> str:
        """Take text; returns what lies behind the object, or behind what breaks it."""
        for place, char in enumerate(text):
            self._take(char)
            if self.is_done or self.is_broken:
                self._raw.append(text[: place + 1])
                return text[place + 1 :]
        self._raw.append(text)
        return ""

    @property
    def raw(self) -> str:
        """All of it so far, for what turns out to be no call."""
        return "".join(self._raw)

    def take_arguments(self) -> str:
        """What came of them since the last time; nothing before the name."""
        if self.name is None:
            return ""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def _take(self, char: str) -> None:
        if self._is_in_string:
            self._take_in_string(char)
        elif self._expected == "value":
            self._take_in_value(char)
        elif char in _SPACE:
            return
        elif char == '"' and self._expected == "key":
            self._is_in_string = True
        elif char == "{" and self._expected == "{":
            self._expected = "key"
        elif char == ":" and self._expected == "colon":
            self._expected = "value"
        elif char == "}" and self._expected == "key" and not self._key:
            self.is_done = True  # empty
        else:
            self.is_broken = True

    def _take_in_string(self, char: str) -> None:
        ends = char == '"' and not self._is_escaped
        self._is_escaped = char == "\\" and not self._is_escaped
        self._is_in_string = not ends
        if self._expected == "value":
            self._add(char)
        elif ends:
            self._key, self._piece, self._expected = self._piece, "", "colon"
        else:
            self._piece += char

    def _take_in_value(self, char: str) -> None:
        if self._depth == 0 and char in ",}":
            self._end_value()
            self._expected = "key"
            self.is_done = char == "}"
        elif self._depth == 0 and char in _SPACE:
            return
        else:
            self._is_in_string = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            self._add(char)

    def _add(self, char: str) -> None:
        if self._key in _ARGUMENTS:
            self._arguments.append(char)
        elif self._key == "name":
            self._piece += char

    def _end_value(self) -> None:
        if self._key == "name":
            try:
                name = json.loads(self._piece)
                name.encode()  # half of a surrogate pair is no name
            except (ValueError, AttributeError):
                name = None
            self.is_broken = not isinstance(name, str)
            self.name = name if isinstance(name, str) else None
        self._piece = ""
