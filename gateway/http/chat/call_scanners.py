"""Scanners that read one tool call by character, one for each syntax that model families use.

    CallScanner      {"name": "now", "arguments": {"zone": "UTC"}}
    TaggedScanner    now<sep>{"zone": "UTC"}
    XmlScanner       <function=now>\\n<parameter=zone>\\nUTC\\n</parameter>\\n</function>
Calls in Python's syntax: pythonic_scanner.py. Where a call begins is found in tool_call_parsers.py.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping

from .schema_values import ArgumentValues
from .tools import NAME

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"
_MAX_HEADER_CHARS = 256


class Scanner(ABC):
    """Reads one call. `name`: None until known; `is_broken`: it is no call, `raw` is its text."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = self.is_broken = False
        self._arguments: list[str] = []  # pieces of JSON, not passed on yet

    @abstractmethod
    def feed(self, text: str) -> str:
        """Read text; returns the text after the call's end, or after the point where it broke."""

    @property
    @abstractmethod
    def raw(self) -> str:
        """All text read so far; valid as long as the name is not known."""

    def take_arguments(self) -> str:
        """The arguments' JSON read since the last call of this method; empty before the name."""
        if self.name is None:
            return ""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken


class CallScanner(Scanner):
    """Reads `{"name": "...", "arguments": {...}}` character by character.

    The arguments are passed on as they are written, once the name is known; with `needs_arguments`,
    once their key is known too, and an object without them is no call. The scanner breaks at the
    first character that cannot belong to such an object; values are not checked.
    """

    def __init__(self, needs_arguments: bool = False) -> None:
        super().__init__()
        self._needs_arguments = needs_arguments
        self._raw: list[str] = []
        self._expected = "{"  # {, key, colon, value, end
        self._piece = ""  # the key or value that is being read
        self._key = ""
        self._depth = 0
        self._is_in_string = self._is_escaped = False
        self._has_arguments = False
        self._found_name: str | None = None
        self._is_closed = False  # whether the value that is being read is complete
        self._is_cut = False  # whether it ended without its brace, at the next character

    def feed(self, text: str) -> str:
        for place, char in enumerate(text):
            self._take(char)
            if self.is_done or self.is_broken:
                end = place if self._is_cut else place + 1
                self._raw.append(text[:end])
                if self.is_done:
                    self._end()
                return text[end:]
        self._raw.append(text)
        return ""

    @property
    def raw(self) -> str:
        return "".join(self._raw)

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
            self._expected, self._is_closed = "value", False
        elif char == "}" and self._expected == "key" and not self._key:
            self.is_done = True  # an empty object
        else:
            self.is_broken = True

    def _take_in_string(self, char: str) -> None:
        ends = char == '"' and not self._is_escaped
        self._is_escaped = char == "\\" and not self._is_escaped
        self._is_in_string = not ends
        if self._expected == "value":
            self._is_closed = ends and not self._depth
            self._add(char)
        elif ends:
            self._key, self._piece, self._expected = self._piece, "", "colon"
            self._has_arguments |= self._key in _ARGUMENTS
            self._set_name()
        else:
            self._piece += char

    def _take_in_value(self, char: str) -> None:
        if self._depth == 0 and char in ",}":
            self._end_value()
            self._expected = "key"
            self.is_done = char == "}"
        elif self._depth == 0 and char in _SPACE:
            return
        elif self._is_closed and self._has_arguments:  # the object's brace is missing
            self._end_value()
            self.is_done = self._is_cut = True
        else:
            self._is_in_string = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            self._is_closed = not self._depth and char in "}]"
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
            except (ValueError, AttributeError, RecursionError):
                name = None
            self.is_broken = not isinstance(name, str)
            self._found_name = name if isinstance(name, str) else None
            self._set_name()
        self._piece = ""

    def _set_name(self) -> None:
        if self.name is None and (self._has_arguments or not self._needs_arguments):
            self.name = self._found_name  # the first one stays: it may be sent already

    def _end(self) -> None:
        """At the object's end: if it has no arguments, they are empty."""
        if self.name is not None and not self._has_arguments:
            self._arguments.append("{}")


class TaggedScanner(Scanner):
    """Reads a name, `separator`, and the arguments as a JSON object. `name_in` matches the text
    before the separator; its group is the name."""

    def __init__(self, separator: str, name_in: re.Pattern[str]) -> None:
        super().__init__()
        self._separator = separator
        self._name_in = name_in
        self._header = ""
        self._depth = 0
        self._is_in_string = self._is_escaped = False

    @property
    def raw(self) -> str:
        return self._header

    def feed(self, text: str) -> str:
        if self.name is not None:
            return self._read(text)
        for place, char in enumerate(text):  # breaks at the same place however the text is split
            self._header += char
            header = self._header.removesuffix(self._separator)
            if has_all := len(header) < len(self._header):
                match = self._name_in.fullmatch(header.strip())
                if match is not None and NAME.match(match[1]):
                    self.name = match[1]
                    return self._read(text[place + 1 :])
            if has_all or len(header) > _MAX_HEADER_CHARS:
                self.is_broken = True
                return text[place + 1 :]
        return ""

    def _read(self, text: str) -> str:
        for place, char in enumerate(text):
            if not self._depth and char in _SPACE:
                continue
            if not self._depth and char != "{":
                self.is_done = True  # no object: a call without arguments
                self._arguments.append("{}")
                return text[place:]
            self._take(char)
            if not self._depth:
                self.is_done = True
                return text[place + 1 :]
        return ""

    def _take(self, char: str) -> None:
        self._arguments.append(char)
        if self._is_in_string:
            self._is_in_string = char != '"' or self._is_escaped
            self._is_escaped = char == "\\" and not self._is_escaped
        else:
            self._is_in_string = char == '"'
            self._depth += (char in "{[") - (char in "}]")


class XmlScanner(Scanner):
    """Reads Qwen3-Coder's calls. A value is text, whose type depends on the function's schema."""

    _FUNCTION = re.compile(r"<function=([^>\n]{1,64})>")
    _PARAMETER = re.compile(r"<parameter=([^>\n]{1,256})[>\n]")  # some models omit the bracket
    _MAY_BE_PARAMETER = re.compile(r"<parameter=[^>\n]{0,256}\Z")
    _VALUE_END = "</parameter>"
    _END = "</function>"

    def __init__(self, values: Mapping[str, ArgumentValues]) -> None:
        """`values`: by the function's name."""
        super().__init__()
        self._values = values
        self._space: list[str] = []  # white space before the function's tag
        self._text = ""
        self._searched = 0  # characters of `_text` in which a value's end does not begin
        self._key: str | None = None  # of the value that is being read
        self._num_parameters = 0

    @property
    def raw(self) -> str:
        return "".join((*self._space, self._text))

    def feed(self, text: str) -> str:
        if self.name is None:
            for place, char in enumerate(text):  # as in TaggedScanner
                if not self._text and char in _SPACE:
                    self._space.append(char)
                    continue
                self._text += char
                if self._begin() or self.is_broken:
                    text = text[place + 1 :]
                    break
            else:
                return ""
            if self.is_broken:
                return text
        self._text += text
        while self._read_value() if self._key is not None else self._read_tag():
            if self.is_done:
                return self._text
        return ""

    def _begin(self) -> bool:
        match = self._FUNCTION.match(self._text)
        if match is None or not NAME.match(match[1]):
            may_begin = "<function=".startswith(self._text[:10])
            is_long = len(self._text) > _MAX_HEADER_CHARS
            self.is_broken = match is not None or not may_begin or is_long
            return False
        self.name, self._text = match[1], ""
        return True

    def _read_tag(self) -> bool:
        """Read a tag between values; False: more text is needed."""
        self._text = tag = self._text.lstrip()
        if tag.startswith(self._END):
            self._arguments.append("}" if self._num_parameters else "{}")
            self.is_done = True
            self._text = tag.removeprefix(self._END)
        elif match := self._PARAMETER.match(tag):
            self._key = match[1]
            self._text = tag[match.end() :]
        elif self._is_begun(tag):
            return False
        else:
            _, found, behind = tag[1:].partition("<")  # text outside tags is dropped
            self._text = found + behind
        return True

    def _is_begun(self, tag: str) -> bool:
        may_be_either = any(one.startswith(tag) for one in (self._END, "<parameter="))
        return may_be_either or self._MAY_BE_PARAMETER.match(tag) is not None

    def _read_value(self) -> bool:
        """Read up to the value's end; False: more text is needed."""
        assert self._key is not None
        end = self._text.find(self._VALUE_END, self._searched)
        if end < 0:
            self._searched = max(0, len(self._text) - len(self._VALUE_END))
            return False
        self._add(self._key, self._text[:end])
        self._text, self._searched = self._text[end + len(self._VALUE_END) :], 0
        self._key = None
        return True

    def _add(self, key: str, text: str) -> None:
        values = self._values.get(self.name or "") or ArgumentValues({})
        value = json.dumps(values.value_of(key, text), ensure_ascii=False)
        self._arguments.append(f"{', ' if self._num_parameters else '{'}{json.dumps(key)}: {value}")
        self._num_parameters += 1
