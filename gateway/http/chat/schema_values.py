"""The value of an argument that a model wrote as text, by its function's JSON schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ....constraints.schema_references import BadReference, target_of

_MAX_DEPTH = 16  # of nested references and alternatives


class ArgumentValues:
    """The argument values of one function; each part of its schema is examined once."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._has_texts: dict[int, bool] = {}  # by id() of a part of the schema

    def value_of(self, name: str, text: str) -> Any:
        """The value of `text`: a string, unless the schema admits none and the text is JSON."""
        text = text.removeprefix("\n").removesuffix("\n")
        properties = self._schema.get("properties")
        if self._may_be_text(properties.get(name) if isinstance(properties, dict) else None):
            return text
        try:
            value = json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
            json.dumps(value, allow_nan=False).encode()
        except (ValueError, RecursionError):
            return text
        return value

    def _may_be_text(self, schema: Any, depth: int = 0) -> bool:
        """Whether a schema admits strings; True if that is hard to decide."""
        if not isinstance(schema, dict) or depth == _MAX_DEPTH:
            return True
        if (known := self._has_texts.get(id(schema))) is None:
            self._has_texts[id(schema)] = True  # if its references lead back to it
            known = all(self._take_texts(schema, depth + 1))
            self._has_texts[id(schema)] = known
        return known

    def _take_texts(self, schema: Mapping[str, Any], depth: int) -> Iterator[bool]:
        """Whether the schema's keywords admit strings, one by one."""
        if (kind := schema.get("type")) is not None:
            yield kind == "string" or (isinstance(kind, list) and "string" in kind)
        if "const" in schema:
            yield isinstance(schema["const"], str)
        if isinstance(values := schema.get("enum"), list):
            yield any(isinstance(value, str) for value in values)
        if "$ref" in schema:
            yield self._may_be_text(self._referred(schema["$ref"]), depth)
        for key, among in (("allOf", all), ("anyOf", any), ("oneOf", any)):
            if isinstance(several := schema.get(key), list):
                yield among(self._may_be_text(one, depth) for one in several)

    def _referred(self, reference: Any) -> Any:
        try:
            return target_of(self._schema, reference)
        except BadReference:
            return None
