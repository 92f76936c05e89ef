"""Converts the input of a /v1/responses request to chat messages, and its fields to a chat's.

instructions, system and developer items at the start    one system message
consecutive reasoning, message, function_call items      one assistant message
function_call_output                                     a tool message
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from ....core.errors import InvalidRequest
from ....core.request.json_fields import (
    BOOLEAN,
    STRING,
    FieldKind,
    invalid,
    list_of,
    options,
    record,
    string,
)
from ..chat.chat_template import VARIABLES
from ..chat.messages import Message, named_items, read_message, read_text
from ..chat.reasoning import REASONING
from ..chat.tools import TOOL_CHOICE, TOOLS, ToolChoice
from ..generate.request_fields import (
    FRONT,
    GENERATION,
    MAX_TOKENS,
    SAMPLING,
    UNSUPPORTED_IN_TURNS,
    Body,
    Unsupported,
)
from ..generate.structured import FLAT_FORMAT, STRUCTURED

_BETWEEN = "__"  # joins a namespace and a function's name, as MCP clients do
_TEXT_KINDS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
_text = partial(read_text, kinds=_TEXT_KINDS)


def _input(value: Any, name: str) -> list[Message]:
    if value == "":
        raise InvalidRequest(f"{name} is required", name, "missing_required")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    items = named_items(value, name, "items", "a text or a list of items")
    return joined([_item(item, where) for item, where in items])


def _item(value: Any, name: str) -> Message:
    if not isinstance(value, dict):
        raise invalid(name, "an item")
    match value.get("type"):
        case "message" | None:
            content = value.get("content")
            text = None if content is None else _text(content, f"{name}.content")
            return read_message({"role": value.get("role"), "content": text}, name)
        case "function_call":
            called = _called(value.get("namespace"), value.get("name"), name)
            function = {"name": called, "arguments": value.get("arguments")}
            call_id = STRING.read(value.get("call_id"), f"{name}.call_id")
            call = {"id": call_id, "type": "function", "function": function}
            return read_message({"role": "assistant", "tool_calls": [call]}, name)
        case "function_call_output":
            call_id = STRING.read(value.get("call_id"), f"{name}.call_id")
            output = _text(value.get("output"), f"{name}.output")
            return read_message({"role": "tool", "tool_call_id": call_id, "content": output}, name)
        case "reasoning":
            parts = value.get("content") or value.get("summary") or ""
            text = _text(parts, f"{name}.content")
            return {"role": "assistant", "content": "", "reasoning_content": text}
        case kind:
            raise InvalidRequest(
                f"{name}: items of type {str(kind)[:32]!r} are not supported; there are message, "
                "function_call, function_call_output and reasoning",
                name,
                "unsupported_content",
            )


def joined(messages: Sequence[Message]) -> list[Message]:
    """Merge consecutive assistant messages, and the system messages at the start."""
    found: list[Message] = []
    for role, run in itertools.groupby(messages, key=itemgetter("role")):
        if role == "assistant" or (role == "system" and not found):
            found.append(_as_one([*run]))
        else:
            found += map(dict, run)
    return found


def _as_one(run: Sequence[Message]) -> Message:
    whole = dict(run[0])
    for key in ("content", "reasoning_content"):
        if texts := [text for one in run if (text := one.get(key))]:
            whole[key] = "\n\n".join(texts)
    if calls := [call for one in run for call in one.get("tool_calls", ())]:
        whole["tool_calls"] = calls
    return whole


def _tools(value: Any, name: str) -> Any:
    """The tools as in a chat request, where a function's fields are one level deeper and there are
    no namespaces."""
    found = list(_functions(value, name))
    nested = [{"type": "function", "function": function} for function, _ in found]
    try:
        return TOOLS.read(nested, name)
    except InvalidRequest as error:
        for i, (_, where) in enumerate(found):
            for inner in (f"{name}[{i}].function", f"{name}[{i}]"):
                if error.param is not None and error.param.startswith(inner):
                    error.message = error.message.replace(inner, where)
                    error.param = where + error.param.removeprefix(inner)
                    raise
        raise


def _functions(
    value: Any, name: str, namespace: str | None = None
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The fields of each function, and its place in the request for errors."""
    if not isinstance(value, list):
        raise invalid(name, "a list of tools")
    for i, tool in enumerate(value):
        where = f"{name}[{i}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise invalid(where, 'like {"type": "function", "name": ...}')
        if kind == "namespace" and namespace is None:
            inside = STRING.read(tool.get("name"), f"{where}.name")
            yield from _functions(tool.get("tools"), f"{where}.tools", inside)
        elif kind == "function":
            called = _called(namespace, tool.get("name"), where)
            yield {**{k: v for k, v in tool.items() if k != "type"}, "name": called}, where
        else:
            message = f"{where}: only functions are called here, not {kind[:32]!r}"
            raise InvalidRequest(message, where, "unsupported_parameter")


def _called(namespace: Any, function: Any, name: str) -> Any:
    """The name by which the model calls a function."""
    if namespace is None:
        return function
    space = STRING.read(namespace, f"{name}.namespace")
    return f"{space}{_BETWEEN}{STRING.read(function, f'{name}.name')}"


def namespaces(tools: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """The namespaces and names of a request's tools in namespaces, by the model's name for them."""
    return {
        f"{space['name']}{_BETWEEN}{tool['name']}": (space["name"], tool["name"])
        for space in tools
        if space["type"] == "namespace"
        for tool in space["tools"]
    }


def _tool_choice(value: Any, name: str) -> ToolChoice:
    if isinstance(value, dict) and value.get("type") == "function":
        value = {"type": "function", "function": {"name": value.get("name")}}
    found: ToolChoice = TOOL_CHOICE.read(value, name)
    return found


def _only(*harmless: str) -> FieldKind:
    """A field that accepts only these strings, which change nothing."""

    def read(value: Any, name: str) -> Any:
        if STRING.read(value, name) not in harmless:
            raise InvalidRequest(
                f"{name} {value[:64]!r} is not supported here", name, "unsupported_parameter"
            )
        return value

    return FieldKind({"enum": list(harmless)}, read)


_ITEM = {"type": "object"}
_TOOL = record({"type": {"const": "function"}, "name": STRING.schema})
_SPACE = record(
    {
        "type": {"const": "namespace"},
        "name": STRING.schema,
        "tools": {"type": "array", "items": _TOOL},
    }
)
_FIELDS: Mapping[str, FieldKind] = {
    **{name: FRONT[name] for name in ("model", "stream", "user", "metadata")},
    **{name: kind for name, kind in SAMPLING.items() if name != "prompt_logprobs"},
    **{name: kind for name, kind in GENERATION.items() if name != "n"},
    **{name: kind for name, kind in STRUCTURED.items() if name != "response_format"},
    "input": FieldKind(
        {"anyOf": [STRING.schema, {"type": "array", "items": _ITEM, "minItems": 1}]}, _input
    ),
    "instructions": STRING,
    "max_output_tokens": MAX_TOKENS,
    "tools": FieldKind({"type": "array", "items": {"anyOf": [_TOOL, _SPACE]}}, _tools),
    "tool_choice": FieldKind(
        {"anyOf": [{"enum": ["none", "auto", "required"]}, _TOOL]}, _tool_choice
    ),
    "parallel_tool_calls": BOOLEAN,
    "text": options(format=FLAT_FORMAT, verbosity=_only("medium")),
    "reasoning": options(
        effort=REASONING["reasoning_effort"], summary=STRING, generate_summary=STRING
    ),
    "previous_response_id": string(128),
    "store": BOOLEAN,
    "include": list_of(_only("reasoning.encrypted_content"), 16),  # nothing is encrypted
    "stream_options": options(include_obfuscation=BOOLEAN),
    "chat_template_kwargs": VARIABLES,
    "enable_thinking": REASONING["enable_thinking"],
    "thinking_token_budget": REASONING["thinking_token_budget"],
}
_NOT_SUPPORTED: Mapping[str, Unsupported] = {
    **UNSUPPORTED_IN_TURNS,
    "background": Unsupported(harmless=(False,)),
    "conversation": Unsupported(),
    "json_schema": Unsupported("use text.format"),
    "max_completion_tokens": Unsupported("the name is max_output_tokens"),
    "max_tokens": Unsupported("the name is max_output_tokens"),
    "max_tool_calls": Unsupported(),
    "messages": Unsupported("the name is input"),
    "output_config": Unsupported("use text.format and reasoning.effort", ({},)),
    "reasoning_effort": Unsupported("use reasoning.effort"),
    "response_format": Unsupported("use text.format"),
    "system": Unsupported("the name is instructions", ("", [])),
    "truncation": Unsupported(harmless=("disabled",)),
}
BODY = Body(_FIELDS, ("model", "input"), _NOT_SUPPORTED)


def chat_fields(found: Mapping[str, Any], conversation: Sequence[Message]) -> dict[str, Any]:
    """The fields of the same request as a chat; the instructions precede the whole conversation."""
    instructions = found.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    renamed = {
        "messages": joined([*system, *conversation]),
        "max_completion_tokens": found.get("max_output_tokens"),
        "response_format": found.get("text", {}).get("format"),
        "reasoning_effort": found.get("reasoning", {}).get("effort"),
    }
    own = ("input", "instructions", "text", "reasoning", "stream_options", "max_output_tokens")
    kept = {name: value for name, value in found.items() if name not in own}
    return kept | {name: value for name, value in renamed.items() if value}
