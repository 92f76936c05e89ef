"""The results file: the figures of every run, written after each, which later calls extend."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..floors.figures import machine
from .cells import Run


def key_of(mode: str, run: Run) -> dict[str, Any]:
    """The key of a row, in addition to the machine."""
    return {
        "mode": mode,
        "cell": run.cell.name,
        "num_cards": run.num_cards,
        "rate_per_s": run.rate_per_s,
        "y_ms": run.y_ms,
    }


class Results:
    """`goodput.json`: one entry per call in `calls`, and rows that refer to their call by number.

    A later row replaces an earlier one with the same key and cards.
    """

    def __init__(self, path: Path, commit: str, command: str, cards: str) -> None:
        self._path = path
        self._content: dict[str, Any] = {"calls": [], "rows": []}
        if path.exists():
            self._content = json.loads(path.read_text())
        self._commit, self._cards = commit, cards
        self._call = {
            "commit": commit,
            "command": command,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": machine() | {"cards": cards},
        }
        self._number: int | None = None

    def has(self, key: Mapping[str, Any]) -> bool:
        """Whether the key was measured at this commit on such cards."""
        return any(
            self._is(row, key) and self._call_of(row)["commit"] == self._commit
            for row in self._content["rows"]
        )

    def add(self, key: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        if self._number is None:
            self._number = len(self._content["calls"])
            self._content["calls"].append(self._call)
        rows = [row for row in self._content["rows"] if not self._is(row, key)]
        self._content["rows"] = [*rows, {**key, "call": self._number, **found}]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._content, indent=1) + "\n")
        partial.replace(self._path)

    def _is(self, row: Mapping[str, Any], key: Mapping[str, Any]) -> bool:
        of_same_cards = self._call_of(row)["machine"]["cards"] == self._cards
        return of_same_cards and all(row[name] == value for name, value in key.items())

    def _call_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        call: dict[str, Any] = self._content["calls"][row["call"]]
        return call
