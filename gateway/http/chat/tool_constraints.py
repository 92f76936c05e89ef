"""A tool call that is wanted in any case, as a grammar of what follows the prompt's last words.

    prompt ...{"name": "now", "arguments":      output  {"zone": "UTC"}}        one function
    prompt ...{"name": "                        output  now", "arguments": {"zone": "UTC"}}
The arguments match the function's schema; what only a strict compiler would refuse in a schema that
is not called strict is left out of account.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ....constraints.grammar_text import JSON_OPTIONS
from .tools import Tool, ToolChoice


def call_grammar(tools: Sequence[Tool], choice: ToolChoice, arguments_name: str) -> str:
    """Lark, for a call that is forced; `arguments_name` is the format's key of the arguments."""
    wanted = [tool for tool in tools if choice.function in (None, tool["function"]["name"])]
    calls = []
    rules = []
    for index, tool in enumerate(wanted):
        head = ""
        if choice.function is None:
            name = json.dumps(tool["function"]["name"])[1:]
            head = json.dumps(f'{name}, "{arguments_name}":') + " "
        calls.append(f'{head}" "? arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {json.dumps(_schema(tool))}")
    return "\n".join([f"start: {' | '.join(calls)}", *rules])


def _schema(tool: Tool) -> dict[str, object]:
    """Of the arguments, which are an object whatever the schema says of that."""
    schema = tool["function"].get("parameters") or {"properties": {}, "additionalProperties": False}
    options = {**JSON_OPTIONS, "lenient": not tool.get("strict")}
    return {"type": "object", **schema, "x-guidance": options}
