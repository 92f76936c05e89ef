"""What an output must look like, as in a request: a kind and its source, nothing compiled.

Two nodes that know the source and the tokens so far allow the same next tokens: nothing else has to
travel with a hand-off or a retry.
"""

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
    """Equal constraints allow the same outputs."""

    kind: ConstraintKind
    source: str

    @classmethod
    def choice(cls, values: Sequence[str]) -> Constraint:
        """One of these texts."""
        return cls(ConstraintKind.CHOICE, json.dumps(list(values)))
