"""How families of models write tool calls: Hermes (Qwen and others) and Llama 3's JSON.

hermes       <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>, any number of them
llama3_json  {"name": "now", "parameters": {}} as the whole answer; several with ; between them

A text becomes deltas as it comes:

    text so far     Let me look. <tool_call>{"name": "now", "arguments": {"zone"
    deltas          Content("Let me look. ")  ToolDelta(0, "now", '')  ToolDelta(0, None, '{"zone"')
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
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


_BEGIN, _END = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"


class ToolCallParser(ABC):
    """Of one sample: content and calls in turns; a subclass knows where a call begins."""

    def __init__(self) -> None:
        self._text = ""  # not judged yet
        self._scanner: CallScanner | None = None
        self._num_calls = 0
        self._is_named = False
        self._is_behind_call = False
        self._has_content = False

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        deltas: list[Delta] = []
        while self._text and (self._scan(deltas) if self._scanner else self._read(deltas)):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        """No more text comes."""
        deltas: list[Delta] = []
        if self._scanner is not None and not self._is_named:
            self._content(self._given_up(self._scanner), deltas)
        elif self._scanner is None and not self._is_behind_call:  # there, a tag's beginning at most
            self._content(self._text, deltas)
        self._text = ""
        return deltas

    @abstractmethod
    def _read(self, deltas: list[Delta]) -> bool:
        """Pass content on, and begin a call where one begins; False: more text is needed."""

    def _given_up(self, scanner: CallScanner) -> str:
        """The text of what was no call after all."""
        return scanner.raw

    def _content(self, text: str, deltas: list[Delta]) -> None:
        if text:
            self._has_content = True
            self._is_behind_call = False
            deltas.append(Content(text))

    def _begin(self) -> None:
        self._scanner, self._is_named = CallScanner(), False

    def _scan(self, deltas: list[Delta]) -> bool:
        """Go on with the call that has begun."""
        assert self._scanner is not None
        scanner = self._scanner
        self._text = scanner.feed(self._text)
        if scanner.name is not None and not self._is_named:
            self._is_named = True
            deltas.append(ToolDelta(self._num_calls, scanner.name, scanner.take_arguments()))
        elif arguments := scanner.take_arguments():
            deltas.append(ToolDelta(self._num_calls, None, arguments))
        if scanner.is_done or scanner.is_broken:
            self._num_calls += self._is_named
            self._is_behind_call = self._is_named
            self._scanner = None
            if not self._is_named:
                self._content(self._given_up(scanner), deltas)
            return True
        return False


class _HermesParser(ToolCallParser):
    def _read(self, deltas: list[Delta]) -> bool:
        if self._is_behind_call:
            self._text = self._text.lstrip().removeprefix(_END).lstrip()
            if _END.startswith(self._text):
                return False
        before, found, behind = self._text.partition(_BEGIN)
        if found:
            if self._has_content or before.strip():
                self._content(before, deltas)
            self._text = behind
            self._begin()
            return True
        num_held = next(
            (n for n in range(len(_BEGIN) - 1, 0, -1) if self._text.endswith(_BEGIN[:n])), 0
        )
        shown = self._text[: len(self._text) - num_held]
        if shown.strip() or self._has_content:
            self._content(shown, deltas)
            self._text = self._text[len(shown) :]
        return False

    def _given_up(self, scanner: CallScanner) -> str:
        return _BEGIN + scanner.raw


class _Llama3Parser(ToolCallParser):
    """The first character decides: an answer that does not begin with a call is content."""

    _is_over = False  # what follows the last call is not one

    def _read(self, deltas: list[Delta]) -> bool:
        if self._has_content:
            self._content(self._text, deltas)
            self._text = ""
            return False
        text = self._text.lstrip()
        if self._num_calls:
            text = text.removeprefix(";").lstrip()
            if self._is_over or (text and text[0] != "{"):
                self._is_over, self._text = True, ""  # nothing that anybody should see
                return False
        else:
            text = text.removeprefix(_PYTHON_TAG).lstrip()
        if not text or _PYTHON_TAG.startswith(text):
            return False
        if text[0] == "{":
            self._text = text
            self._begin()
        else:
            self._has_content = True
        return True


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One family's. `begin` stands before a call, whose arguments have the key `arguments_name`."""

    begin: str
    arguments_name: str
    parser: Callable[[], ToolCallParser]

    def opening(self, function: str | None, *, is_constrained: bool) -> str:
        """The beginning of a call of this function, or of any: the prompt's end where a call
        is wanted in any case. Where a grammar rules what follows, it ends before the arguments."""
        if function is None:
            return f'{self.begin}{{"name": "'
        named = f'{self.begin}{{"name": {json.dumps(function)}, "{self.arguments_name}":'
        return named if is_constrained else f"{named} {{"


HERMES = ToolFormat(f"{_BEGIN}\n", "arguments", _HermesParser)
LLAMA3_JSON = ToolFormat("", "parameters", _Llama3Parser)
FORMATS: Mapping[str, ToolFormat] = {"hermes": HERMES, "llama3_json": LLAMA3_JSON}


def format_of_template(template: str) -> ToolFormat | None:
    """The format that a chat template teaches its model; None if it knows no tools."""
    if _BEGIN in template:
        return HERMES
    if '"parameters"' in template and "tools" in template:
        return LLAMA3_JSON
    return None
