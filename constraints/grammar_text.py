"""A constraint as the grammar that llguidance compiles, and how large one may be.

White space inside JSON is a blank, or a line break with its indentation, where it is allowed at
all: a model that is made to write JSON could otherwise write blanks for ever.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ..core.request.request import Constraint, ConstraintKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_SOURCE_BYTES = 64 << 10  # of one constraint
MAX_CHOICES = 1024

JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_pattern": r"[ ]|\n[ ]{0,64}",
    # Where two alternatives of a oneOf overlap the output may match both.
    "coerce_one_of": True,
}


def grammar_text(constraint: Constraint) -> str:
    """What LLMatcher takes. Raises ValueError for what cannot even be read."""
    from llguidance import LLMatcher

    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(constraint.source, overrides=JSON_OPTIONS)
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(constraint.source)
        case ConstraintKind.CHOICE:
            return LLMatcher.grammar_from_lark(_lark_of_choice(json.loads(constraint.source)))
        case ConstraintKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(constraint.source)


def _lark_of_choice(values: list[str]) -> str:
    return "start: " + " | ".join(map(json.dumps, values))
