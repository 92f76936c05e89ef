"""The constraint that a request may put on its output."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass


class ConstraintKind(enum.Enum):
    """The language of the source."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"  # Rust's syntax; the whole output must match
    CHOICE = "choice"  # one of these texts; the source is a JSON list
    GRAMMAR = "grammar"  # Lark's syntax, as llguidance reads it


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint before compilation; equal ones allow the same outputs.

    With it and the tokens so far, every engine allows the same next tokens: a hand-off or a retry
    needs nothing else.
    """

    kind: ConstraintKind
    source: str

    @classmethod
    def choice(cls, values: Sequence[str]) -> Constraint:
        return cls(ConstraintKind.CHOICE, json.dumps(list(values)))
