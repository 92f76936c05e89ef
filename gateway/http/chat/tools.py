"""The tools that a chat request offers, its choice among them, and the grammars of calls.

A tool is {"type", "function": {...}}, with `strict` if its calls must follow its schema. Schemas
are shown to the model, and compiled for forced calls and strict tools, but never fetched. Their
size is bounded, and they may have only the references that structured output supports.

A forced call is constrained by a grammar for the output after the prompt's end:

    prompt ...{"name": "now", "arguments":      output  {"zone": "UTC"}}        one function
    prompt ...{"name": "                        output  now", "arguments": {"zone": "UTC"}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....constraints.grammars import JSON_OPTIONS
from ....constraints.schema_references import BadReference, check_references
from ....core.errors import InvalidRequest
from ....core.request.json_fields import BOOLEAN, STRING, FieldKind, invalid, nullable, record

MAX_TOOLS = 128
MAX_SCHEMA_VALUES = 16384  # of all tools of a request
_MAX_DEPTH = 32
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
_SHOWN = ("name", "description", "parameters")

Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`is_offered`: the model is shown the tools; `is_forced`: the answer must be a call, of
    `function` unless it is None."""

    is_offered: bool
    is_forced: bool = False
    function: str | None = None

    def wanted(self, tools: Sequence[Tool]) -> list[Tool]:
        """The tools that a forced call may call."""
        return [tool for tool in tools if self.function in (None, tool["function"]["name"])]


def _tools(value: Any, name: str) -> list[Tool]:
    if not isinstance(value, list):
        raise invalid(name, "a list of tools")
    if len(value) > MAX_TOOLS:
        raise InvalidRequest(f"{name} has more than {MAX_TOOLS} tools", name, "array_too_long")
    tools, num_values = [], 0
    for i, item in enumerate(value):
        tools.append(_tool(item, f"{name}[{i}]"))
        schema = tools[-1]["function"].get("parameters", {})
        num_values += check_schema(schema, f"{name}[{i}].function.parameters")
        if num_values > MAX_SCHEMA_VALUES:
            raise _bad(name, "are too large")
    return tools


def _tool(value: Any, name: str) -> Tool:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type") != "function":
        raise invalid(name, 'like {"type": "function", "function": {...}}')
    called = function.get("name")
    if not isinstance(called, str) or not NAME.match(called):
        raise invalid(f"{name}.function.name", "1 to 64 of A-Z a-z 0-9 _ . -")
    if not isinstance(function.get("description") or "", str):
        raise invalid(f"{name}.function.description", "a string")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{name}.function.parameters", "a JSON schema")
    shown = {key: function[key] for key in _SHOWN if function.get(key) is not None}
    tool = {"type": "function", "function": shown}
    return tool | {"strict": True} if function.get("strict") is True else tool


def check_schema(schema: Mapping[str, Any], name: str) -> int:
    """The number of values in a schema; raises InvalidRequest."""
    num_values = 0
    pending: list[tuple[Any, int]] = [(schema, 0)]
    while pending:
        value, depth = pending.pop()
        num_values += 1
        if depth > _MAX_DEPTH:
            raise _bad(name, f"is nested more than {_MAX_DEPTH} deep")
        if num_values > MAX_SCHEMA_VALUES:
            raise _bad(name, "is too large")
        inside = value.values() if isinstance(value, dict) else value
        if isinstance(value, dict | list):
            pending += [(one, depth + 1) for one in inside]
    try:
        check_references(schema)
    except BadReference as error:
        raise _bad(name, str(error)) from None
    return num_values


def _bad(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{name} {what}", name, "invalid_schema")


def shown_tools(tools: Sequence[Tool]) -> list[Tool]:
    """The tools in the form that chat templates take."""
    return [{"type": tool["type"], "function": tool["function"]} for tool in tools]


def _tool_choice(value: Any, name: str) -> ToolChoice:
    if value in ("none", "auto", "required"):
        return ToolChoice(value != "none", value == "required")
    function = value.get("function") if isinstance(value, dict) else None
    called = function.get("name") if isinstance(function, dict) else None
    if not isinstance(called, str):
        raise invalid(name, 'none, auto, required or {"type": "function", "function": {"name"}}')
    return ToolChoice(True, True, called)


def chosen(tools: Sequence[Tool], choice: ToolChoice | None) -> ToolChoice:
    """The choice, or its default; raises InvalidRequest if the choice is not among the tools."""
    if not tools:
        if choice is not None and choice.is_forced:
            raise InvalidRequest(
                "tool_choice wants a call, but there are no tools", "tool_choice", "invalid_value"
            )
        return ToolChoice(is_offered=False)
    choice = choice or ToolChoice(is_offered=True)
    names = {tool["function"]["name"] for tool in tools}
    if choice.function is not None and choice.function not in names:
        message = f"tool_choice names {choice.function[:64]!r}, which is not among the tools"
        raise InvalidRequest(message, "tool_choice", "invalid_value")
    return choice


def call_grammar(
    tools: Sequence[Tool], choice: ToolChoice, middle: str, end: str, literal: Callable[[str], str]
) -> str:
    """The Lark grammar of a forced call, after the prompt's end.

    `middle`, `end`: the format's texts between name and arguments, and after the arguments;
    `literal` writes a text in Lark.
    """
    calls, rules = [], []
    space = '" "? ' if middle.endswith(":") else ""
    for index, tool in enumerate(choice.wanted(tools)):
        head = ""
        if choice.function is None:
            head = literal(tool["function"]["name"] + middle) + " "
        tail = f" {literal(end)}" if end else ""
        calls.append(f"{head}{space}arguments_{index}{tail}")
        rules.append(f"arguments_{index}: %json {json.dumps(_schema(tool))}")
    return "\n".join([f"start: {' | '.join(calls)}", *rules])


def strict_grammar(tag: str, any_but_tag: str, rest: str, calls: str) -> str:
    """The Lark grammar of an answer with any number of calls, each as in `calls`, call_grammar's.

    `tag`, `rest`: a call's first token, and the text after it; `any_but_tag`: any other token.
    """
    return (
        f"start: text ({tag} {rest} call text)*\ntext: {any_but_tag}*\ncall: %lark {{\n{calls}\n}}"
    )


def _schema(tool: Tool) -> dict[str, object]:
    """The schema of a tool's arguments, which are an object whatever the schema says. Without
    `strict`, what only a strict compiler would refuse in it is ignored."""
    schema = tool["function"].get("parameters") or {"properties": {}, "additionalProperties": False}
    options = {**JSON_OPTIONS, "lenient": not tool.get("strict")}
    return {**schema, "type": "object", "x-guidance": options}


_FUNCTION = record(
    {"name": STRING.within(pattern="^[A-Za-z0-9_.-]{1,64}$").schema},
    {
        "description": nullable(STRING.schema),
        "parameters": nullable({"type": "object"}),
        "strict": nullable(BOOLEAN.schema),
    },
)
_TOOL = record({"type": {"const": "function"}, "function": _FUNCTION})
TOOLS = FieldKind({"type": "array", "maxItems": MAX_TOOLS, "items": _TOOL}, _tools)
_NAMED = record({"type": {"const": "function"}, "function": record({"name": STRING.schema})})
TOOL_CHOICE = FieldKind({"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED]}, _tool_choice)
