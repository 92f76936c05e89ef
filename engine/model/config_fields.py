"""Reads one JSON object field by field; errors name the file and the field."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ...core.errors import StartupFailed


class Fields:
    """The fields of one JSON object; an absent or null field has the default."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path = path
        self._values = values

    def get(self, name: str, default: object = None) -> object:
        value = self._values.get(name)
        return default if value is None else value

    def positive(self, name: str, default: int | None = None) -> int:
        value = self.count(name, default)
        if value < 1:
            raise self.error(f"{name} is {value!r}, not a positive integer")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.error(f"{name} is {value!r}, not an integer from 0")
        return value

    def counts(self, name: str) -> tuple[int, ...]:
        """A list of integers from 0; empty if absent."""
        value = self.get(name, [])
        if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
            raise self.error(f"{name} is {value!r}, not a list of integers from 0")
        return tuple(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if isinstance(value, int | float) and type(value) is not bool and 0 < value < math.inf:
            return float(value)
        raise self.error(f"{name} is {value!r}, not a positive number")

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(f"{name} is {value!r}, not true or false")
        return value

    def section(self, name: str) -> Fields:
        """The object under `name`; empty if absent."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.error(f"{name} is no object")
        return Fields(self._path, value)

    def names(self) -> tuple[str, ...]:
        return tuple(self._values)

    def __bool__(self) -> bool:
        return bool(self._values)

    def error(self, what: str, *, hint: str = "") -> StartupFailed:
        return StartupFailed(f"{self._path}: {what}", hint=hint)
