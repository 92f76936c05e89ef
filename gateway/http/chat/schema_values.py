"""What an argument that a model wrote as text stands for, by its function's JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MAX_REFERENCES = 8  # one to the next, of a schema
_MAX_DEPTH = 4  # of alternatives in alternatives


def value_of(text: str, schema: Any, whole: Mapping[str, Any]) -> Any:
    """A text is a string, unless its schema, a part of `whole`, has another type and it is JSON of
    that."""
    text = text.removeprefix("\n").removesuffix("\n")
    if _has_texts(schema, whole):
        return text
    try:
        value = json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
        json.dumps(value, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    return value


def _has_texts(schema: Any, whole: Mapping[str, Any], depth: int = 0) -> bool:
    """Whether a schema may have strings among its values. References are followed in `whole`."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = _referred(schema["$ref"], whole)
    if not isinstance(schema, dict) or depth == _MAX_DEPTH:
        return True
    if (kind := schema.get("type")) is not None:
        return kind == "string" or (isinstance(kind, list) and "string" in kind)
    if isinstance(values := schema.get("enum"), list):
        return any(isinstance(value, str) for value in values)
    for key in ("anyOf", "oneOf"):
        if isinstance(several := schema.get(key), list):
            return any(_has_texts(one, whole, depth + 1) for one in several)
    return True


def _referred(reference: Any, whole: Mapping[str, Any]) -> Any:
    """What `#/$defs/Name` stands for; None where that is nothing."""
    found: Any = whole
    for key in str(reference).removeprefix("#/").split("/"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
