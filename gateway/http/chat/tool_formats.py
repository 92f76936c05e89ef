"""How families of models write tool calls: Hermes (Qwen and others) and Llama 3's JSON.

hermes       <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>, any number of them
llama3_json  {"name": "now", "parameters": {}} as the whole answer; several with ; between them
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .tool_parsing import CallScanner, Content, Delta, ToolDelta

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
