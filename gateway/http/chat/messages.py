"""Checks the messages of a chat, and converts them to the form that chat templates take.

Contents are texts; a list of text parts becomes one text, with each part on its own line. Images,
audio and files are not supported, and nothing is ever fetched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ....core.errors import InvalidRequest
from ....core.request.json_fields import STRING, FieldKind, invalid, nullable, record

MAX_MESSAGES = 4096
_MAX_CALLS = 128
_ROLES = {"system": "system", "developer": "system"} | {r: r for r in ("user", "assistant", "tool")}

Message = dict[str, Any]


def named_items(
    value: Any, name: str, what: str = "messages", wanted: str = "a list of messages"
) -> list[tuple[Any, str]]:
    """The items of a list, at least one and at most MAX_MESSAGES, each with its name in errors.
    Raises InvalidRequest."""
    if not isinstance(value, list):
        raise invalid(name, wanted)
    if not value:
        raise InvalidRequest(f"{name} is empty", name, "empty_array")
    if len(value) > MAX_MESSAGES:
        raise InvalidRequest(f"{name} has more than {MAX_MESSAGES} {what}", name, "array_too_long")
    return [(item, f"{name}[{i}]") for i, item in enumerate(value)]


def _messages(value: Any, name: str) -> list[Message]:
    return [read_message(item, where) for item, where in named_items(value, name)]


def read_message(value: Any, name: str) -> Message:
    """A message in OpenAI's format as templates take it; raises InvalidRequest."""
    if not isinstance(value, dict):
        raise invalid(name, "an object")
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{name}.role", f"one of {', '.join(_ROLES)}")
    message: Message = {"role": _ROLES[role]}
    calls = value.get("tool_calls")
    if role == "assistant" and calls:
        message["tool_calls"] = _calls(calls, f"{name}.tool_calls")
    if value.get("content") is not None or role != "assistant":
        message["content"] = read_text(value.get("content"), f"{name}.content")
    else:
        message["content"] = ""
    if role == "assistant":
        for key in ("reasoning_content", "reasoning"):
            if value.get(key) is not None:
                message["reasoning_content"] = STRING.read(value[key], f"{name}.{key}")
    if role == "tool" and value.get("tool_call_id") is not None:
        message["tool_call_id"] = STRING.read(value["tool_call_id"], f"{name}.tool_call_id")
    if value.get("name") is not None:
        message["name"] = STRING.read(value["name"], f"{name}.name")
    return message


def read_text(value: Any, name: str, kinds: Sequence[str] = ("text",)) -> str:
    """A text, or the joined texts of parts of these kinds; raises InvalidRequest."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise invalid(name, "a text or a list of text parts")
    return "\n".join(_part(part, f"{name}[{i}]", kinds) for i, part in enumerate(value))


def _part(value: Any, name: str, kinds: Sequence[str]) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise invalid(name, f'a part like {{"type": "{kinds[0]}", "text": "..."}}')
    if kind not in kinds:
        raise InvalidRequest(
            f"{name}: only text is supported, not {kind[:32]!r}", name, "unsupported_content"
        )
    return str(STRING.read(value.get("refusal" if kind == "refusal" else "text"), f"{name}.text"))


def _calls(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > _MAX_CALLS:
        raise invalid(name, f"a list of at most {_MAX_CALLS} calls")
    return [_call(call, f"{name}[{i}]") for i, call in enumerate(value)]


def _call(value: Any, name: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, Mapping):
        raise invalid(name, "a call of a function")
    arguments = _arguments(function.get("arguments"), f"{name}.function.arguments")
    called = {
        "name": STRING.read(function.get("name"), f"{name}.function.name"),
        "arguments": arguments,
    }
    call_id = value.get("id")
    call_id = "" if call_id is None else STRING.read(call_id, f"{name}.id")
    return {"id": call_id, "type": "function", "function": called}


def _arguments(value: Any, name: str) -> dict[str, Any]:
    """A call's arguments as an object, as templates take them; clients send JSON text."""
    if value is None:
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
            json.dumps(value, ensure_ascii=False).encode()  # fails for half of a surrogate pair
        except (ValueError, RecursionError):
            raise invalid(name, "JSON in a string") from None
    if not isinstance(value, dict):
        raise invalid(name, "a JSON object in a string")
    return value


_PART = record({"type": {"const": "text"}, "text": STRING.schema})
_PARTS = {"type": "array", "minItems": 1, "items": _PART}
_MESSAGE = record(
    {"role": {"enum": list(_ROLES)}},
    {
        "content": nullable({"anyOf": [STRING.schema, _PARTS]}),
        "name": nullable(STRING.schema),
        "reasoning_content": nullable(STRING.schema),
        "tool_call_id": nullable(STRING.schema),
        "tool_calls": nullable({"type": "array", "maxItems": _MAX_CALLS}),
    },
)
MESSAGES = FieldKind(
    {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": _MESSAGE}, _messages
)
