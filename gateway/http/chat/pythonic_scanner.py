"""A Scanner of one tool call in Python's syntax: now(zone="UTC")."""

from __future__ import annotations

import ast
import json
from typing import Any

from .call_scanners import Scanner
from .tools import NAME


class PythonicScanner(Scanner):
    """Reads a call whose arguments are literals by keyword. Parsed, never evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self._text: list[str] = []
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    @property
    def raw(self) -> str:
        return "".join(self._text)

    def feed(self, text: str) -> str:
        for place, char in enumerate(text):
            self._take(char)
            if self._depth == 0 and char == ")" and not self._quote:
                self._text.append(text[: place + 1])
                self._parse()
                return text[place + 1 :]
            if self._depth < 0:
                self.is_broken = True
                self._text.append(text[: place + 1])
                return text[place + 1 :]
        self._text.append(text)
        return ""

    def _take(self, char: str) -> None:
        if self._quote:
            if not self._is_escaped and char == self._quote:
                self._quote = ""
            self._is_escaped = char == "\\" and not self._is_escaped
        elif char in "'\"":
            self._quote = char
        else:
            self._depth += (char in "([{") - (char in ")]}")

    def _parse(self) -> None:
        try:
            call = ast.parse(self.raw.strip(), mode="eval").body
            if not isinstance(call, ast.Call) or call.args:
                raise ValueError
            name = ast.unparse(call.func)
            found = {one.arg: _literal(one.value) for one in call.keywords if one.arg}
            arguments = json.dumps(found, ensure_ascii=False, allow_nan=False)
            arguments.encode()
            if not NAME.match(name) or len(found) != len(call.keywords):
                raise ValueError
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            self.is_broken = True
            return
        self.name, self.is_done = name, True
        self._arguments.append(arguments)


_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}


def _literal(node: ast.expr) -> Any:
    """The value of a literal; raises ValueError for one that JSON has no type for."""
    match node:
        case ast.Constant(value=value) if isinstance(value, str | int | float | None):
            return value
        case ast.Name(id=name) if name.lower() in _CONSTANTS:
            return _CONSTANTS[name.lower()]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            named = [key.value for key in keys if isinstance(key, ast.Constant)]
            if len(named) != len(keys) or not all(isinstance(key, str) for key in named):
                raise ValueError
            return dict(zip(named, map(_literal, values), strict=True))
    raise ValueError
