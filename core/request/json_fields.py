"""Kinds of fields of a JSON body: their strict parsers and their OpenAPI schemas.

Strict: "10", true and 1.0 are no integers. `read` returns the value for the proto field, or raises
InvalidRequest with the field's name. msgspec's parser is not used: it has other error texts, and
accepts a name that occurs twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidRequest
from .token_ids import column

Schema = Mapping[str, Any]

UINT32_MAX = 2**32 - 1  # of proto fields


@dataclass(frozen=True, slots=True)
class FieldKind:
    """`read(value, name)`: the value is never None, as null counts as absent."""

    schema: Schema
    read: Callable[[Any, str], Any]

    def within(self, **limits: Any) -> FieldKind:
        """The same kind, with the validator's limits in its schema."""
        return FieldKind({**self.schema, **limits}, self.read)


def invalid(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {what}", name, "invalid_value")


def _boolean(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise invalid(name, "true or false")
    return value


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(name, "a number")
    try:
        return float(value)
    except OverflowError:
        raise invalid(name, "a smaller number") from None


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise invalid(name, "a string")
    return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def integer(least: int, most: int) -> FieldKind:
    """An integer in [least, most]. No message names an upper bound that is the proto field's."""
    if most < UINT32_MAX:
        wanted = smaller = f"an integer in [{least}, {most}]"
    else:
        wanted, smaller = f"an integer from {least} on", "a smaller integer"

    def read(value: Any, name: str) -> int:
        if not _is_integer(value) or value < least:
            raise invalid(name, wanted)
        if value > most:
            raise invalid(name, smaller)
        return int(value)

    return FieldKind({"type": "integer", "minimum": least, "maximum": most}, read)


def string(max_chars: int) -> FieldKind:
    def read(value: Any, name: str) -> str:
        if len(_string(value, name)) > max_chars:
            raise invalid(name, f"at most {max_chars} characters long")
        return str(value)

    return FieldKind({"type": "string", "maxLength": max_chars}, read)


def list_of(kind: FieldKind, max_items: int) -> FieldKind:
    def read(value: Any, name: str) -> list[Any]:
        if not isinstance(value, list):
            raise invalid(name, "a list")
        if len(value) > max_items:
            raise InvalidRequest(f"{name} has more than {max_items} items", name, "array_too_long")
        return [kind.read(item, f"{name}[{i}]") for i, item in enumerate(value)]

    return FieldKind({"type": "array", "items": kind.schema, "maxItems": max_items}, read)


def one_or_list_of(kind: FieldKind, max_items: int) -> FieldKind:
    """One item or a list; read as a list."""
    many = list_of(kind, max_items)

    def read(value: Any, name: str) -> list[Any]:
        return list(many.read(value, name)) if isinstance(value, list) else [kind.read(value, name)]

    return FieldKind({"anyOf": [kind.schema, many.schema]}, read)


def options(**fields: FieldKind) -> FieldKind:
    """An object that has only these fields."""

    def read(value: Any, name: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise invalid(name, "an object")
        for key in value:
            if key not in fields:
                message = f"{name} has no field {key[:64]!r}"
                raise InvalidRequest(message, name, "unknown_parameter")
        given = {key: item for key, item in value.items() if item is not None}
        return {key: fields[key].read(item, f"{name}.{key}") for key, item in given.items()}

    schema = record({}, {key: nullable(kind.schema) for key, kind in fields.items()})
    return FieldKind({**schema, "additionalProperties": False}, read)


def record(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """The schema of an object that has at least the required fields."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties} | (
        {"required": list(required)} if required else {}
    )


def nullable(schema: Schema) -> Schema:
    """The schema that also allows null, which counts as absent."""
    return {"anyOf": [schema, {"type": "null"}]}


def _token_ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list):
        raise invalid(name, "a list of token ids")
    try:
        if set(map(type, value)) <= {int}:
            column(value)
            return value
    except (OverflowError, ValueError):
        pass
    fits = (_is_integer(item) and 0 <= item <= UINT32_MAX for item in value)
    i = next(i for i, does_fit in enumerate(fits) if not does_fit)
    raise InvalidRequest(f"{name}[{i}] is not a token id", f"{name}[{i}]", "invalid_token_id")


BOOLEAN = FieldKind({"type": "boolean"}, _boolean)
NUMBER = FieldKind({"type": "number"}, _number)
STRING = FieldKind({"type": "string"}, _string)
TOKEN_IDS = FieldKind(
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": UINT32_MAX}},
    _token_ids,
)
