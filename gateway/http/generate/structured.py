"""The fields with which clients request structured output, and the constraint of each.

    response_format       OpenAI's: text, json_object, json_schema
    structured_outputs    vLLM's: one of json, json_object, regex, choice, grammar
    guided_*              vLLM's older names of these
A request may use one of them. A forced tool call is constrained too: chat/tools.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ....constraints.grammars import JSON_OPTIONS, MAX_CHOICES, MAX_SOURCE_BYTES
from ....core.errors import InvalidRequest
from ....core.request.json_fields import (
    BOOLEAN,
    STRING,
    FieldKind,
    invalid,
    list_of,
    options,
    record,
)
from ....proto.v1 import common_pb2

SamplingFields = dict[str, Any]  # of the message SamplingParams

_ANY_OBJECT = '{"type": "object"}'


def _json_schema(value: Any, name: str) -> str:
    """A schema as JSON text. In vLLM's `json` it is an object, or the text of one."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict | bool):
        raise invalid(name, "a JSON schema")
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest(f"{name} is nested too deeply", name, "invalid_schema") from None
    if len(text) > MAX_SOURCE_BYTES:
        raise InvalidRequest(f"{name} is too large", name, "invalid_schema")
    return text


def _response_format(value: Any, name: str) -> SamplingFields:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": _ANY_OBJECT}
    if kind != "json_schema":
        raise InvalidRequest(
            f"{name}.type can be text, json_object or json_schema", name, "unsupported_parameter"
        )
    described = value.get("json_schema")
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        raise InvalidRequest(
            f"{name}.json_schema.schema is required", f"{name}.json_schema", "missing_required"
        )
    return {"json_schema": _json_schema(described["schema"], f"{name}.json_schema.schema")}


def _structured_outputs(value: Any, name: str) -> SamplingFields:
    found = [fields for fields in _OPTIONS.read(value, name).values() if fields]
    if len(found) != 1:
        raise invalid(name, f"an object of one of {', '.join(_WAYS)}")
    fields: SamplingFields = found[0]
    return fields


def _way(kind: FieldKind, fields_of: Callable[[Any], SamplingFields]) -> FieldKind:
    return FieldKind(kind.schema, lambda value, name: fields_of(kind.read(value, name)))


_SCHEMA = FieldKind({"anyOf": [{"type": "object"}, {"type": "string"}]}, _json_schema)
_WAYS: Mapping[str, FieldKind] = {
    "json": _way(_SCHEMA, lambda schema: {"json_schema": schema}),
    "json_object": _way(BOOLEAN, lambda is_one: {"json_schema": _ANY_OBJECT} if is_one else {}),
    "regex": _way(STRING, lambda regex: {"regex": regex}),
    "choice": _way(
        list_of(STRING, MAX_CHOICES), lambda texts: {"choice": common_pb2.Choices(values=texts)}
    ),
    "grammar": _way(STRING, lambda grammar: {"grammar": grammar}),
}
_OPTIONS = options(**_WAYS)

STRUCTURED: Mapping[str, FieldKind] = {
    "response_format": FieldKind(
        record(
            {"type": {"enum": ["text", "json_object", "json_schema"]}},
            {"json_schema": record({"schema": {"type": "object"}}, {"name": STRING.schema})},
        ),
        _response_format,
    ),
    "structured_outputs": FieldKind(_OPTIONS.schema, _structured_outputs),
    **{f"guided_{way}": _WAYS[way] for way in ("json", "regex", "choice", "grammar")},
}


def _flat_format(value: Any, name: str) -> SamplingFields:
    if isinstance(value, dict) and value.get("type") == "json_schema":
        value = {"type": "json_schema", "json_schema": value}
    return _response_format(value, name)


# A response_format with the schema next to the type, as in /v1/responses and /v1/messages.
FLAT_FORMAT = FieldKind(STRUCTURED["response_format"].schema, _flat_format)


def constraint_of(
    found: Mapping[str, Any], call_grammar: str | None = None
) -> tuple[SamplingFields, str]:
    """The constraint, as fields of the message SamplingParams, and the client's field for it.

    `call_grammar`: the grammar of tool calls, if any. Raises InvalidRequest if there are two
    constraints.
    """
    given = {name: found[name] for name in STRUCTURED if found.get(name)}
    if call_grammar is not None:
        name = "tool_choice" if "tool_choice" in found else "tools"
        given = {name: {"grammar": call_grammar}} | given
    if len(given) > 1:
        _, second, *_ = given
        raise InvalidRequest(f"give one of {' and '.join(given)}", second, "invalid_value")
    for name, fields in given.items():
        return fields, name
    return {}, "constraint"


def lark_of(constraint: SamplingFields, param: str) -> str:
    """The constraint as the right side of a rule in Lark, to be part of a larger grammar.

    Raises InvalidRequest for an invalid schema; `param`: the client's field.
    """
    ((way, source),) = constraint.items()
    match way:
        case "json_schema":
            return f"%json {json.dumps(_with_options(source, param))}"
        case "regex":
            escaped = re.sub(r"\\.|[/\n]", _in_lark, source, flags=re.DOTALL)
            return f"/{escaped or '(?:)'}/"
        case "choice":
            return f"({' | '.join(map(json.dumps, source.values)) or 'NONE'})"
    return f"%lark {{\n{source}\n}}"


def _in_lark(match: re.Match[str]) -> str:
    """Escapes slashes and line breaks for a regex between slashes; other escapes are unchanged."""
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(match[0], match[0])


def _with_options(source: str, param: str) -> dict[str, Any]:
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{param} is not JSON", param, "invalid_schema") from None
    if not isinstance(schema, dict):
        schema = {"allOf": [schema]}
    return {**schema, "x-guidance": JSON_OPTIONS}
