"""The JSON schemas of tools: shown to the model, never compiled here, nothing is ever fetched.

Still one must be of bounded size, refer to parts of itself alone, and not in circles: whoever
follows its references comes to an end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...core.errors import InvalidRequest

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
    _check_references(schema, name)
    return num_values


def _check_references(schema: Mapping[str, Any], name: str) -> None:
    """Depth first, from values to those in them and those they refer to: each is entered once."""
    is_open: dict[int, bool] = {}  # by id; False: all behind it was looked at
    pending: list[tuple[Any, bool]] = [(schema, False)]
    while pending:
        value, is_left = pending.pop()
        if is_left:
            is_open[id(value)] = False
        elif isinstance(value, dict | list) and (found := is_open.get(id(value))) is not False:
            if found:
                raise _bad(name, "refers to itself in a circle")
            is_open[id(value)] = True
            pending.append((value, True))
            pending += [(inner, False) for inner in _inside(value)]
            if isinstance(value, dict) and "$ref" in value:
                pending.append((_target(schema, value["$ref"], name), False))


def _target(schema: Any, reference: Any, name: str) -> Any:
    if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
        raise _bad(name, "may refer to parts of itself alone")
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
        pending += [(one, depth + 1) for one in _inside(value)]


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _bad(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{name} {what}", param=name, code="invalid_schema")
