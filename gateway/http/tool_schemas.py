"""The JSON schemas of tools: shown to the model, never compiled here, nothing is ever fetched.

Still one must be of bounded size, refer to parts of itself alone, and not in circles: whoever
follows its references comes to an end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

from ...core.errors import InvalidRequest

MAX_SCHEMA_VALUES = 16384  # of all tools of a request
_MAX_DEPTH = 32
_MAX_REFERENCES = 64


def check_schema(schema: Mapping[str, Any], name: str) -> int:
    """How many values it has; raises InvalidRequest."""
    num_values = 0
    for _, depth in _all_within(schema):
        num_values += 1
        if depth > _MAX_DEPTH:
            raise _bad(name, f"is nested more than {_MAX_DEPTH} deep")
        if num_values > MAX_SCHEMA_VALUES:
            raise _bad(name, "is too large")
    _check_references(schema, name)
    return num_values


def _check_references(schema: Mapping[str, Any], name: str) -> None:
    leads_to: dict[str, list[str]] = {}  # a reference: those in what it refers to
    pending = _references_in(schema, name)
    while pending:
        reference = pending.pop()
        if reference not in leads_to:
            if len(leads_to) == _MAX_REFERENCES:
                raise _bad(name, f"has more than {_MAX_REFERENCES} references")
            leads_to[reference] = _references_in(_target(schema, reference, name), name)
            pending += leads_to[reference]
    try:
        TopologicalSorter(leads_to).prepare()
    except CycleError:
        raise _bad(name, "refers to itself in a circle") from None


def _references_in(value: Any, name: str) -> list[str]:
    found = []
    for inner, _ in _all_within(value):
        if isinstance(inner, dict) and "$ref" in inner:
            reference = inner["$ref"]
            if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
                raise _bad(name, "may refer to parts of itself alone")
            found.append(reference)
    return found


def _target(schema: Any, reference: str, name: str) -> Any:
    for part in reference.split("/")[1:]:
        if not isinstance(schema, dict) or part not in schema:
            raise _bad(name, f"refers to {reference[:64]!r}, which is not there")
        schema = schema[part]
    return schema


def _all_within(value: Any) -> Iterator[tuple[Any, int]]:
    """The value and all inside it, with their depths."""
    pending = [(value, 0)]
    while pending:
        value, depth = pending.pop()
        yield value, depth
        inner = value.values() if isinstance(value, dict) else value
        if isinstance(value, dict | list):
            pending += [(one, depth + 1) for one in inner]


def _bad(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{name} {what}", param=name, code="invalid_schema")
