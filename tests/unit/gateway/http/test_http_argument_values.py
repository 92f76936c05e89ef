"""Parsing an argument that was written as text, for any schema that a request may have."""

from __future__ import annotations

import time
from typing import Any

import pytest
from patience import AT_ONCE_S

from baton.gateway.http.chat.schema_values import ArgumentValues
from baton.gateway.http.chat.tools import check_schema

DEFS = {
    "Point": {"type": "object"},
    "Name": {"type": "string"},
    "a/b ~": {"type": "array"},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]},
    "Tree": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/Tree"}}]},
}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "3", "3"),
        ({"oneOf": [{"type": "array"}]}, '["x"]', ["x"]),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"const": 1}, "1", 1),
        ({"const": "1"}, "1", "1"),
        ({"type": ["string", "null"], "enum": [None, 1]}, "null", None),
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/Point", "description": "where"}, "{}", {}),
        ({"$ref": "#/$defs/Name"}, "94105", "94105"),
        ({"$ref": "#/$defs/a~1b%20~0"}, "[]", []),
        ({"$ref": "#/$defs/Tree/anyOf/0"}, "null", None),
        ({"$ref": "#/$defs/Tree"}, "[[]]", [[]]),
        ({"$ref": "#/$defs/Loop"}, "1", "1"),
        ({"$ref": "#/properties/a"}, "1", "1"),
        ({"$ref": "#"}, "1", "1"),
        ({"$ref": "elsewhere"}, "1", "1"),
        ({"allOf": [{"$ref": "#/$defs/Point"}]}, '{"x": 1}', {"x": 1}),
        ({"allOf": [{"$ref": "#/$defs/Point"}, {"description": "any"}]}, "{}", {}),
        ({"allOf": [{"$ref": "#/$defs/Name"}, {"minLength": 1}]}, "1", "1"),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, {"$ref": "#/$defs/Point"}]}, "{}", {}),
        ({"description": "any"}, "1", "1"),
        (True, "1", "1"),
        ({"anyOf": 5}, "1", "1"),
    ],
)
def test_values_by_what_their_schema_has(schema: Any, text: str, value: object) -> None:
    values = ArgumentValues({"properties": {"a": schema}, "$defs": DEFS})
    assert [values.value_of("a", text) for _ in range(2)] == [value] * 2


def test_an_argument_that_no_schema_knows_is_text() -> None:
    for schema in ({}, {"properties": None}, {"properties": {"b": {"type": "integer"}}}):
        assert ArgumentValues(schema).value_of("a", "\n1\n") == "1"


def test_alternatives_that_share_their_parts_cost_no_more_than_the_schema() -> None:
    """Time is linear in the schema, which has 10^9 paths through its shared parts."""
    defs: dict[str, Any] = {"C": {"type": "integer"}}
    for name, inner in ("BC", "AB"):
        defs[name] = {"anyOf": [{"$ref": f"#/$defs/{inner}"}] * 1000}
    schema = {"$defs": defs, "properties": {"x": {"anyOf": [{"$ref": "#/$defs/A"}] * 1000}}}
    check_schema(schema, "tools")
    values = ArgumentValues(schema)
    began_s = time.perf_counter()
    assert [values.value_of("x", "1") for _ in range(1000)] == [1] * 1000
    assert time.perf_counter() - began_s < AT_ONCE_S


def test_a_long_chain_of_references_is_text() -> None:
    """A chain of references of any length gives text, not an error: a request may contain one."""
    defs = {str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}]} for i in range(3000)}
    schema = {"$defs": defs | {"3000": {"type": "integer"}}, "properties": {}}
    schema["properties"] = {"x": {"$ref": "#/$defs/0"}}
    check_schema(schema, "tools")
    assert ArgumentValues(schema).value_of("x", "1") == "1"
