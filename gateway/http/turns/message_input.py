"""Converts the fields of Anthropic's /v1/messages to those of a chat request.

system                                 the first message
assistant   thinking, text, tool_use   one message, with reasoning and calls; if last, continued
user        tool_result, text          tool messages, then a user message
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ....core.errors import InvalidRequest
from ....core.request.json_fields import (
    BOOLEAN,
    STRING,
    FieldKind,
    integer,
    invalid,
    options,
    record,
)
from ..chat.chat_template import VARIABLES
from ..chat.messages import MAX_MESSAGES, Message, named_items, read_message
from ..chat.reasoning import REASONING
from ..chat.tools import TOOLS, ToolChoice
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

_ROLES = ("user", "assistant", "system")
_CHOICES = {"auto": (True, False), "any": (True, True), "none": (False, False)}


def _messages(value: Any, name: str) -> list[Message]:
    return [one for item, where in named_items(value, name) for one in _turn(item, where)]


def _turn(value: Any, name: str) -> list[Message]:
    role = value.get("role") if isinstance(value, dict) else None
    if role not in _ROLES:
        raise invalid(f"{name}.role", f"one of {', '.join(_ROLES)}")
    content = value.get("content")
    if role == "assistant" and content in (None, []):  # an answer without a token has no block
        content = ""
    if isinstance(content, str):
        return [read_message({"role": role, "content": content}, name)]
    blocks = _blocks(content, f"{name}.content")
    return _of_assistant(blocks, name) if role == "assistant" else _of_user(role, blocks, name)


def _blocks(value: Any, name: str) -> list[tuple[str, Mapping[str, Any], str]]:
    """For each block its type, the block itself, and its name in errors."""
    if not isinstance(value, list) or not value:
        raise invalid(name, "a text or a list of blocks")
    found = []
    for i, block in enumerate(value):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            raise invalid(f"{name}[{i}]", 'a block like {"type": "text", "text": "..."}')
        found.append((kind, block, f"{name}[{i}]"))
    return found


def _unsupported(kind: str, name: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name}: blocks of type {kind[:32]!r} are not supported here", name, "unsupported_content"
    )


def _of_assistant(blocks: Sequence[tuple[str, Mapping[str, Any], str]], name: str) -> list[Message]:
    texts: list[str] = []
    reasoning: list[str] = []
    calls = []
    for kind, block, where in blocks:
        match kind:
            case "text":
                texts.append(STRING.read(block.get("text"), f"{where}.text"))
            case "thinking":
                reasoning.append(STRING.read(block.get("thinking"), f"{where}.thinking"))
            case "redacted_thinking":  # from another server, and unreadable here
                continue
            case "tool_use":
                if not isinstance(block.get("input"), dict):
                    raise invalid(f"{where}.input", "an object")
                function = {
                    "name": STRING.read(block.get("name"), f"{where}.name"),
                    "arguments": block["input"],
                }
                call_id = STRING.read(block.get("id"), f"{where}.id")
                calls.append({"id": call_id, "type": "function", "function": function})
            case _:
                raise _unsupported(kind, where)
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return [read_message(message, name)]


def _of_user(
    role: str, blocks: Sequence[tuple[str, Mapping[str, Any], str]], name: str
) -> list[Message]:
    results, texts = [], []
    for kind, block, where in blocks:
        if kind == "text":
            texts.append(STRING.read(block.get("text"), f"{where}.text"))
        elif kind == "tool_result" and role == "user":
            call_id = STRING.read(block.get("tool_use_id"), f"{where}.tool_use_id")
            text = _result(block, where)
            results.append({"role": "tool", "tool_call_id": call_id, "content": text})
        else:
            raise _unsupported(kind, where)
    user = [{"role": role, "content": "\n".join(texts)}] if texts else []
    return [read_message(message, name) for message in (*results, *user)]


def _result(block: Mapping[str, Any], name: str) -> str:
    content = block.get("content")
    text = "" if content is None or content == [] else _texts(content, f"{name}.content")
    return f"Error: {text}" if block.get("is_error") is True else text


def _texts(value: Any, name: str) -> str:
    """A text, or blocks of text."""
    if isinstance(value, str):
        return value
    texts = []
    for kind, block, where in _blocks(value, name):
        if kind != "text":
            raise _unsupported(kind, where)
        texts.append(STRING.read(block.get("text"), f"{where}.text"))
    return "\n".join(texts)


def _tools(value: Any, name: str) -> Any:
    if not isinstance(value, list):
        raise invalid(name, "a list of tools")
    nested = []
    for i, tool in enumerate(value):
        if not isinstance(tool, dict):
            raise invalid(f"{name}[{i}]", "an object")
        if tool.get("type") not in (None, "custom"):
            message = f"{name}[{i}]: tools that a server runs are not here, clients' own alone"
            raise InvalidRequest(message, f"{name}[{i}]", "unsupported_parameter")
        if not isinstance(tool.get("input_schema"), dict):
            raise invalid(f"{name}[{i}].input_schema", "a JSON schema")
        function = {key: tool.get(key) for key in ("name", "description", "strict")}
        function["parameters"] = tool["input_schema"]
        nested.append({"type": "function", "function": function})
    try:
        return TOOLS.read(nested, name)
    except InvalidRequest as error:
        for ours, theirs in (("].function.parameters", "].input_schema"), ("].function", "]")):
            error.message = error.message.replace(ours, theirs)
            error.param = (error.param or name).replace(ours, theirs)
        raise


def _tool_choice(value: Any, name: str) -> tuple[ToolChoice, bool]:
    """The choice, and whether several calls are allowed."""
    if not isinstance(value, dict):
        raise invalid(name, "an object")
    kind, is_single = value.get("type"), value.get("disable_parallel_tool_use") or False
    is_parallel = not BOOLEAN.read(is_single, f"{name}.disable_parallel_tool_use")
    if kind == "tool":
        return ToolChoice(True, True, STRING.read(value.get("name"), f"{name}.name")), is_parallel
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise invalid(f"{name}.type", "auto, any, tool or none")
    return ToolChoice(*_CHOICES[kind]), is_parallel


def _thinking(value: Any, name: str) -> dict[str, Any]:
    """The setting as fields of a chat request."""
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "disabled":
            return {"enable_thinking": False}
        case "enabled":
            budget = integer(1, 2**32 - 1).read(value.get("budget_tokens"), f"{name}.budget_tokens")
            return {"enable_thinking": True, "thinking_token_budget": budget}
        case "adaptive":
            return {"enable_thinking": True}
    raise invalid(f"{name}.type", "enabled, disabled or adaptive")


def _effort(value: Any, name: str) -> str:
    effort = "xhigh" if value == "max" else value
    return str(REASONING["reasoning_effort"].read(effort, name))


_TYPED = record({"type": STRING.schema})
_TEXT_OR_BLOCKS = {"anyOf": [STRING.schema, {"type": "array", "items": _TYPED, "minItems": 1}]}
_MESSAGE = record({"role": {"enum": list(_ROLES)}, "content": _TEXT_OR_BLOCKS})
_TOOL = record({"name": STRING.schema, "input_schema": {"type": "object"}})
_COUNTED: Mapping[str, FieldKind] = {  # the fields that make the prompt
    "model": STRING,
    "messages": FieldKind(
        {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": _MESSAGE}, _messages
    ),
    "system": FieldKind(_TEXT_OR_BLOCKS, _texts),
    "tools": FieldKind({"type": "array", "items": _TOOL}, _tools),
    "tool_choice": FieldKind(
        record({"type": {"enum": ["auto", "any", "tool", "none"]}}, {"name": STRING.schema}),
        _tool_choice,
    ),
    "thinking": FieldKind(
        record({"type": {"enum": ["enabled", "disabled", "adaptive"]}}), _thinking
    ),
    "output_config": options(
        format=FieldKind(record({"type": {"enum": ["json_schema"]}}), FLAT_FORMAT.read),
        effort=FieldKind({"enum": ["low", "medium", "high", "xhigh", "max"]}, _effort),
    ),
    "chat_template_kwargs": VARIABLES,
}
_SAMPLED = {
    name: kind
    for name, kind in {**SAMPLING, **GENERATION, **STRUCTURED}.items()
    if name not in ("n", "prompt_logprobs", "response_format", "stop")
}
_FIELDS: Mapping[str, FieldKind] = {
    **_COUNTED,
    **_SAMPLED,
    "max_tokens": MAX_TOKENS,
    "stream": FRONT["stream"],
    "stop_sequences": SAMPLING["stop"],
}
_AS_IN_CHATS = {*_SAMPLED, "model", "stream", "tools", "max_tokens", "chat_template_kwargs"}
_NOT_SUPPORTED: Mapping[str, Unsupported] = {
    **UNSUPPORTED_IN_TURNS,
    **dict.fromkeys(
        ("enable_thinking", "thinking_budget", "thinking_token_budget"), Unsupported("use thinking")
    ),
    **dict.fromkeys(
        ("json_schema", "output_format", "response_format"),
        Unsupported("use output_config.format"),
    ),
    "container": Unsupported(),
    "input": Unsupported("the name is messages"),
    "mcp_servers": Unsupported(harmless=([],)),
    "parallel_tool_calls": Unsupported(harmless=(True,)),
    "prefill": Unsupported(),
    "reasoning": Unsupported("use thinking", ({},)),
    "reasoning_effort": Unsupported("use output_config.effort"),
    "service_tier": Unsupported(harmless=("auto", "standard_only")),
    "stop": Unsupported("the name is stop_sequences"),
    "text": UNSUPPORTED_IN_TURNS["text"]._replace(instead="use output_config.format"),
}
COUNTED_BODY = Body(_COUNTED, ("model", "messages"), _NOT_SUPPORTED)
BODY = Body(_FIELDS, ("model", "messages", "max_tokens"), _NOT_SUPPORTED)


def chat_fields(found: Mapping[str, Any], follows: Collection[str]) -> dict[str, Any]:
    """The fields of the same request as a chat. A last message of the assistant is continued.

    `follows`: the reasoning fields that have an effect with this model; others are dropped, since
    clients send them to any model.
    """
    system = found.get("system")
    kept = {name: value for name, value in found.items() if name in _AS_IN_CHATS}
    fields = kept | {"messages": list(found["messages"])}
    if fields["messages"][-1]["role"] == "assistant":
        fields["continue_final_message"] = True
    if system:
        fields["messages"].insert(0, {"role": "system", "content": system})
    choice, is_parallel = found.get("tool_choice", (None, True))
    output = found.get("output_config", {})
    reasoning = {**found.get("thinking", {}), "reasoning_effort": output.get("effort")}
    given = {
        "stop": found.get("stop_sequences"),
        "tool_choice": choice,
        "parallel_tool_calls": is_parallel,
        "response_format": output.get("format"),
        **{name: value for name, value in reasoning.items() if name in follows},
    }
    return fields | {name: value for name, value in given.items() if value is not None}
