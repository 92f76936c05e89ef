"""The JSON schemas of tools: shown to the model, compiled for forced calls alone, never fetched.

Each must be of bounded size, and its references must be such as structured output takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ....constraints.schema_references import BadReference, check_references
from ....core.errors import InvalidRequest

MAX_SCHEMA_VALUES = 16384  # of all tools of a request
_MAX_DEPTH = 32


def check_schema(schema: Mapping[str, Any], name: str) -> int:
    """How many values it has; raises InvalidRequest."""
    num_values = 0
    for _, depth in _all_within(schema):
        num_values += 1
        if depth > _MAX_DEPTH:
            raise _bad(name, f"is nested more than {_MAX_DEPTH} deep")
        if num_values > MAX_SCHEMA_VALUES:
            raise _bad(name, "is too large")
    try:
        check_references(schema)
    except BadReference as error:
        raise _bad(name, str(error)) from None
    return num_values


def _all_within(value: Any) -> Iterator[tuple[Any, int]]:
    """The value and all inside it, with their depths."""
    pending = [(value, 0)]
    while pending:
        value, depth = pending.pop()
        yield value, depth
        pending += [(one, depth + 1) for one in _inside(value)]


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _bad(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{name} {what}", name, "invalid_schema")
