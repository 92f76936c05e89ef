"""The form of an output that a request may ask for."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass


class ConstraintKind(enum.Enum):
    """What the source is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"  # Rust's syntax; the whole output must match
    CHOICE = "choice"  # one of these texts; the source is a JSON list
    GRAMMAR = "grammar"  # Lark's syntax, as llguidance reads it


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an output must look like, not compiled; equal ones allow the same outputs.

    Two nodes that know it and the tokens so far allow the same next tokens: nothing else has to
    travel with a hand-off or a retry.
    """

    kind: ConstraintKind
    source: str

    @classmethod
    def choice(cls, values: Sequence[str]) -> Constraint:
        """One of these texts."""
        return cls(ConstraintKind.CHOICE, json.dumps(list(values)))
