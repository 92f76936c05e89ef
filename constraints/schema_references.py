"""Checks the references inside a JSON schema: each must lead to a part of it, and none in a loop.

A schema may be recursive: a reference back from a property or an item applies one level deeper in
the value each time. In a loop the same schema applies to the same value for ever.

    {"items": {"$ref": "#"}}   recursive          {"anyOf": [{"$ref": "#"}]}   a loop
Compiles nothing and fetches nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias
from urllib.parse import unquote

_JsonObject: TypeAlias = dict[str, Any]

_OF_SAME_VALUE = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "then", "else"})
_BY_NAME = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
)
_DATA = frozenset({"const", "default", "enum", "examples"})  # values, not schemas
_MAX_SHOWN = 64


class BadReference(ValueError):
    """The message continues "this schema ..."."""


def check_references(schema: Any) -> None:
    """Raise BadReference for a reference that leads nowhere, out of the schema, or in a loop."""
    schemas = list(_schemas_within(schema))
    targets = {id(one): target_of(schema, one["$ref"]) for one in schemas if "$ref" in one}
    is_open: dict[int, bool] = {}  # by id; False: all it refers to was checked
    for one in schemas:
        pending: list[tuple[Any, bool]] = [(one, False)]
        while pending:  # depth first, through schemas of the same value
            current, is_left = pending.pop()
            if is_left:
                is_open[id(current)] = False
            elif isinstance(current, dict) and (found := is_open.get(id(current))) is not False:
                if found:
                    raise BadReference("has a $ref loop: it refers to itself directly")
                is_open[id(current)] = True
                pending.append((current, True))
                pending += [(inner, False) for inner in _of_same_value(current)]
                if id(current) in targets:
                    pending.append((targets[id(current)], False))


def _schemas_within(schema: Any) -> Iterator[_JsonObject]:
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            yield value
            for key, inner in value.items():
                if key in _BY_NAME and isinstance(inner, dict):
                    pending += inner.values()
                elif key not in _DATA and isinstance(inner, dict | list):
                    pending.append(inner)


def _of_same_value(schema: _JsonObject) -> Iterator[Any]:
    for key in schema.keys() & _OF_SAME_VALUE:
        inner = schema[key]
        yield from inner if isinstance(inner, list) else (inner,)


def target_of(schema: Any, reference: Any) -> Any:
    """The part of `schema` that a JSON pointer (RFC 6901) in a URI's fragment names."""
    if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
        shown = str(reference)[:_MAX_SHOWN]
        raise BadReference(f"refers to {shown!r}, which is not a part of it, such as #/...")
    target = schema
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and name in target:
            target = target[name]
        elif isinstance(target, list) and name.isdecimal() and int(name[:9]) < len(target):
            target = target[int(name[:9])]
        else:
            raise BadReference(f"refers to {reference[:_MAX_SHOWN]!r}, which does not exist")
    return target
