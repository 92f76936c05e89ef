"""Splits a sample's text into content and tool calls: finds where calls begin and end.

Text becomes deltas as it arrives:

    text so far     Let me look. <tool_call>{"name": "now", "arguments": {"zone"
    deltas          TEXT "Let me look. "   CALL 0 now ""   CALL 0 '{"zone"'
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ...text.special_tokens import any_of
from .call_scanners import CallScanner, Scanner
from .pythonic_scanner import PythonicScanner
from .reasoning import beginning_of

PYTHON_TAG = "<|python_tag|>"

_PIECE_CHARS = 4096  # parsed at a time, since the text after a call is copied for each call


class DeltaKind(enum.Enum):
    REASONING = "reasoning"
    TEXT = "text"  # for the user
    CALL = "call"


@dataclass(frozen=True, slots=True)
class ParsedDelta:
    """A piece of an answer. A call's first delta has the function's name; `text` is of the
    arguments' JSON, `call` the call's number."""

    kind: DeltaKind
    text: str
    call: int = 0
    name: str | None = None


class ToolCallParser(ABC):
    """Splits one sample's text into content and calls; a subclass finds where a call begins."""

    def __init__(self, new_scanner: Callable[[], Scanner] = CallScanner) -> None:
        self._new_scanner = new_scanner
        self._text = ""  # not parsed yet
        self._space: list[str] = []  # white space after `_text`
        self._scanner: Scanner | None = None
        self._num_calls = 0
        self._is_behind_call = False
        self._has_content = False

    @property
    def open_call(self) -> int | None:
        """The number of the call that has begun and not ended, if any; valid after `finish`."""
        call = self._scanner
        is_open = call is not None and call.name is not None and not call.is_done
        return self._num_calls if is_open else None

    @property
    def _needs_text(self) -> bool:
        """Whether white space is held back until other text follows."""
        return self._scanner is None and not self._has_content

    def feed(self, text: str) -> list[ParsedDelta]:
        deltas: list[ParsedDelta] = []
        for begin in range(0, len(text), _PIECE_CHARS):
            self._feed_piece(text[begin : begin + _PIECE_CHARS], deltas)
        return deltas

    def _feed_piece(self, text: str, deltas: list[ParsedDelta]) -> None:
        if self._needs_text and text.isspace():
            self._space.append(text)
            return
        self._text = "".join((self._text, *self._space, text))
        self._space.clear()
        while self._text and (self._scan(deltas) if self._scanner else self._read(deltas)):
            pass

    def finish(self) -> list[ParsedDelta]:
        """The last deltas, at the text's end."""
        deltas: list[ParsedDelta] = []
        self._feed_piece("", deltas)
        if self._scanner is not None and self._scanner.name is None:
            self._content(self._given_up(self._scanner), deltas)
        elif self._scanner is not None:
            self._scanner.feed("\0")  # only a further character may show that arguments are whole
        elif not self._is_behind_call:  # after a call, `_text` is at most a tag's beginning
            self._content(self._text, deltas)
        self._text = ""
        return deltas

    @abstractmethod
    def _read(self, deltas: list[ParsedDelta]) -> bool:
        """Add content to `deltas`, and begin a call if one begins; False: more text is needed."""

    def _given_up(self, scanner: Scanner) -> str:
        """The text that turned out to be no call."""
        return scanner.raw

    def _content(self, text: str, deltas: list[ParsedDelta]) -> None:
        if text:
            self._has_content = True
            self._is_behind_call = False
            deltas.append(ParsedDelta(DeltaKind.TEXT, text))

    def _begin(self) -> None:
        self._scanner = self._new_scanner()

    def _scan(self, deltas: list[ParsedDelta]) -> bool:
        """Continue the call that has begun; False: more text is needed."""
        assert self._scanner is not None
        scanner, was_named = self._scanner, self._scanner.name is not None
        self._text = scanner.feed(self._text)
        name, arguments = None if was_named else scanner.name, scanner.take_arguments()
        if name is not None or arguments:
            deltas.append(ParsedDelta(DeltaKind.CALL, arguments, self._num_calls, name))
        if scanner.is_done or scanner.is_broken:
            self._scanner, self._is_behind_call = None, scanner.name is not None
            self._num_calls += self._is_behind_call
            if scanner.name is None:
                self._content(self._given_up(scanner), deltas)
            return True
        return False


class TagParser(ToolCallParser):
    """A call follows the tag `begin`. Tags `around` calls are dropped everywhere, tags `behind` a
    call only there."""

    def __init__(
        self,
        new_scanner: Callable[[], Scanner],
        begin: str,
        behind: Sequence[str] = (),
        around: Sequence[str] = (),
    ) -> None:
        super().__init__(new_scanner)
        self._tag = begin
        self._behind = (*behind, *around)
        self._tags = (begin, *around)
        self._search = any_of(self._tags)

    def _read(self, deltas: list[ParsedDelta]) -> bool:
        if self._is_behind_call and not self._drop_tags():
            return False
        match = self._search.search(self._text)
        if match is not None:
            before, self._text = self._text[: match.start()], self._text[match.end() :]
            if self._has_content or before.strip():
                self._content(before, deltas)
            if match[0] == self._tag:
                self._begin()
            return True
        num_held = max(beginning_of(tag, self._text) for tag in self._tags)
        shown = self._text[: len(self._text) - num_held]
        if shown.strip() or self._has_content:
            self._content(shown, deltas)
            self._text = self._text[len(shown) :]
        return False

    def _drop_tags(self) -> bool:
        """Drop the tags after a call; False: more text is needed."""
        while True:
            text = self._text.lstrip()
            tag = next((tag for tag in self._behind if text.startswith(tag)), None)
            self._text = text if tag is None else text.removeprefix(tag)
            if tag is None:
                return not any(one.startswith(text) for one in self._behind or ("",))

    def _given_up(self, scanner: Scanner) -> str:
        return self._tag + scanner.raw


class MistralParser(TagParser):
    """Also parses a list of objects after the tag, which older models write."""

    def __init__(self, new_scanner: Callable[[], Scanner], begin: str) -> None:
        super().__init__(new_scanner, begin)
        self._is_at_tag = self._is_in_list = False

    @property
    def _needs_text(self) -> bool:
        is_within = self._is_at_tag or self._is_in_list
        return super()._needs_text or (is_within and self._scanner is None)

    def _begin(self) -> None:
        self._is_at_tag = True

    def _read(self, deltas: list[ParsedDelta]) -> bool:
        if not self._is_at_tag and not self._is_in_list:
            return super()._read(deltas)
        text = self._text.lstrip()
        if not text:
            return False
        if self._is_at_tag:
            self._is_in_list = text[0] == "["
        self._is_at_tag = False
        if not self._is_in_list:
            super()._begin()
            return True
        if text[0] in "[,":
            self._text = text[1:]
            self._scanner = CallScanner()
        else:  # the list's end
            self._text, self._is_in_list = text.removeprefix("]"), False
        return True


class FirstCharacterParser(ToolCallParser):
    """The first character decides: an answer that does not begin with a call is content."""

    def _read(self, deltas: list[ParsedDelta]) -> bool:
        if not self._has_content:
            return self._read_calls()
        self._content(self._text, deltas)
        self._text = ""
        return False

    @abstractmethod
    def _read_calls(self) -> bool:
        """As `_read`, for an answer without content so far."""


class Llama3Parser(FirstCharacterParser):
    """Calls are JSON objects, separated by semicolons."""

    _is_over = False  # whether the text after the last call is no call

    def __init__(self) -> None:
        super().__init__(partial(CallScanner, needs_arguments=True))  # plain answers may be JSON

    def _read_calls(self) -> bool:
        text = self._text.lstrip()
        if self._num_calls:
            text = text.removeprefix(";").lstrip()
            if self._is_over or (text and text[0] != "{"):
                self._is_over, self._text = True, ""  # not to be shown
                return False
        else:
            text = text.removeprefix(PYTHON_TAG).lstrip()
        if not text or PYTHON_TAG.startswith(text):
            return False
        if text[0] == "{":
            self._text = text
            self._begin()
        else:
            self._has_content = True
        return True


class PythonicParser(FirstCharacterParser):
    """The whole answer is a list of calls in Python's syntax."""

    def __init__(self) -> None:
        super().__init__(PythonicScanner)

    def _read_calls(self) -> bool:
        text = self._text.lstrip()
        if self._num_calls:
            text = text.removeprefix(",").lstrip()
            if not text or text[0] == "]":
                self._text = text
                return False
        else:
            text = text.removeprefix(PYTHON_TAG).lstrip()
            if not text or PYTHON_TAG.startswith(text) or text == "[":
                return False
            if text[0] != "[" or not (text[1:].lstrip()[:1].isidentifier()):
                self._has_content = bool(text[1:].strip()) or text[0] != "["
                return self._has_content
            text = text[1:]
        self._text = text
        self._begin()
        return True

    def _given_up(self, scanner: Scanner) -> str:
        return scanner.raw if self._num_calls else f"[{scanner.raw}"
