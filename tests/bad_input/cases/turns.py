"""Bad requests of /v1/responses (B90) and Anthropic's /v1/messages (B91), as rows of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bad_input.cases.table import ABSENT, CHAT_ALONE, Row, rows

_RESPONSES, _MESSAGES, _COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
_TOOL: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
_OWN: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
_DEEP: Any = {}
for _ in range(300):
    _DEEP = {"properties": {"a": _DEEP}}


def _of(
    path: str, name: str, changes: Sequence[Mapping[str, Any]], code: str, param: str | None,
    **more: Any,
) -> list[Row]:  # fmt: skip
    kind = "B90" if path == _RESPONSES else "B91"
    more = {"over_grpc": CHAT_ALONE, "path": path} | more
    return rows(f"{kind}-{name}", changes, code, param=param, **more)


def _values(path: str, name: str, values: Sequence[Any], code: str = "invalid_value") -> list[Row]:
    return _of(path, name, [{name: value} for value in values], code, name)


def _item(item: Any) -> dict[str, Any]:
    return {"input": [item]}


def _user(content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


TURNS: list[Row] = [
    *_of(_RESPONSES, "missing", [{"input": ABSENT}, {"input": None}, {"input": ""}],
         "missing_required", "input"),
    *_of(_RESPONSES, "model", [{"model": "nope"}], "model_not_found", "model", status=404),
    *_of(_RESPONSES, "empty", [{"input": []}], "empty_array", "input"),
    *_of(_RESPONSES, "many", [{"input": [{"role": "user", "content": "x"}] * 5000}],
         "array_too_long", "input"),
    *_values(_RESPONSES, "input", [1, {}, True]),
    *_of(_RESPONSES, "item", [_item(i) for i in (1, None, "x", [])], "invalid_value", "input[0]"),
    *_of(_RESPONSES, "role", [_item({"role": r, "content": "x"}) for r in ("", "root", 1, None)],
         "invalid_value", "input[0].role"),
    *_of(_RESPONSES, "content", [_item({"role": "user", "content": c}) for c in (1, None, [], {})],
         "invalid_value", "input[0].content"),
    *_of(_RESPONSES, "part", [_item({"role": "user", "content": [{"type": t, "image_url": "http://a"}]})
                              for t in ("input_image", "input_file", "x" * 500)],
         "unsupported_content", "input[0].content[0]"),
    *_of(_RESPONSES, "kind", [_item({"type": t}) for t in (
        "item_reference", "computer_call", "web_search_call", "x" * 500, 1, [])],
        "unsupported_content", "input[0]"),
    *_of(_RESPONSES, "call", [_item({"type": "function_call", "call_id": "a", "name": "f",
                                     "arguments": a}) for a in ("{", "[]", 1, "{" * 5000)],
         "invalid_value", "input[0].tool_calls[0].function.arguments"),
    *_of(_RESPONSES, "call-id", [_item({"type": "function_call_output", "output": "x"})],
         "invalid_value", "input[0].call_id"),
    *_of(_RESPONSES, "output", [_item({"type": "function_call_output", "call_id": "a",
                                       "output": o}) for o in (None, 1, {})],
         "invalid_value", "input[0].output"),
    *_values(_RESPONSES, "instructions", [1, [], {}]),
    *_values(_RESPONSES, "max_output_tokens", [-1, 1.5, "5", True, 0]),
    *_values(_RESPONSES, "store", ["yes", 1, []]),
    *_values(_RESPONSES, "stream", ["yes", 1]),
    *_values(_RESPONSES, "previous_response_id", [1, [], "x" * 200]),
    *_of(_RESPONSES, "unknown", [{"previous_response_id": i} for i in (
        "", "x", "resp_" + "0" * 32, "../../etc/passwd", "\u0000")],
        "previous_response_not_found", "previous_response_id", status=404),
    *_of(_RESPONSES, "tool", [{"tools": [t]} for t in (1, None, {}, [])], "invalid_value",
         "tools[0]"),
    *_of(_RESPONSES, "hosted", [{"tools": [{"type": t}]} for t in (
        "web_search", "mcp", "code_interpreter", "custom", "x" * 500)], "unsupported_parameter",
        "tools[0]"),
    *_of(_RESPONSES, "tool-name", [{"tools": [_TOOL | {"name": n}]} for n in ("", "a b", 1, None)],
         "invalid_value", "tools[0].name"),
    *_of(_RESPONSES, "space", [{"tools": [{"type": "namespace", "name": n, "tools": [_TOOL]}]}
                               for n in (1, None, [])], "invalid_value", "tools[0].name"),
    *_of(_RESPONSES, "space-tools", [{"tools": [{"type": "namespace", "name": "n", "tools": t}]}
                                     for t in (1, None, {})], "invalid_value", "tools[0].tools"),
    *_of(_RESPONSES, "space-name", [
        {"tools": [{"type": "namespace", "name": "n", "tools": [_TOOL, _TOOL | {"name": n}]}]}
        for n in ("a b", "x" * 64)], "invalid_value", "tools[0].tools[1].name"),
    *_of(_RESPONSES, "space-space", [{"tools": [{"type": "namespace", "name": "n", "tools": [
        {"type": t, "name": "m", "tools": []}]}]} for t in ("namespace", "mcp")],
        "unsupported_parameter", "tools[0].tools[0]"),
    *_of(_RESPONSES, "space-schema", [{"tools": [_TOOL, {
        "type": "namespace", "name": "n", "tools": [_TOOL | {"parameters": {"$ref": "#"}}]}]}],
        "invalid_schema",
        "tools[1].tools[0].parameters"),
    *_of(_RESPONSES, "call-space", [_item({"type": "function_call", "call_id": "a", "name": "f",
                                           "namespace": n, "arguments": "{}"}) for n in (1, [])],
         "invalid_value", "input[0].namespace"),
    *_of(_RESPONSES, "schema", [{"tools": [_TOOL | {"parameters": p}]} for p in (
        _DEEP, {"$ref": "#"}, {"$ref": "http://169.254.169.254/x"})], "invalid_schema",
        "tools[0].parameters"),
    *_values(_RESPONSES, "tool_choice", ["some", 1, {"type": "file_search"}]),
    *_of(_RESPONSES, "effort", [{"reasoning": {"effort": e}} for e in ("much", 1)],
         "invalid_value", "reasoning.effort"),
    *_of(_RESPONSES, "reasoning", [{"reasoning": {"x": 1}}], "unknown_parameter", "reasoning"),
    *_of(_RESPONSES, "format", [{"text": {"format": {"type": "wat"}}}], "unsupported_parameter",
         "text.format"),
    *_of(_RESPONSES, "format-schema", [{"text": {"format": {"type": "json_schema"}}}],
         "missing_required", "text.format.json_schema"),
    *[row for name, value in (
        ("background", True), ("conversation", "x"), ("max_tool_calls", 1), ("prompt", {"id": "x"}),
        ("truncation", "auto"), ("top_logprobs", 3), ("prompt_logprobs", 1), ("logprobs", True),
        ("return_token_ids", True), ("n", 2), ("messages", []), ("max_tokens", 5),
        ("response_format", {"type": "text"}))
      for row in _values(_RESPONSES, name, [value], "unsupported_parameter")],
    *_values(_RESPONSES, "bootstrap_room", [1], "unknown_parameter"),

    *_of(_MESSAGES, "missing", [{"max_tokens": ABSENT}], "missing_required", "max_tokens"),
    *[row for path in (_MESSAGES, _COUNT) for end in (path[13:18],) for row in (
        *_of(path, f"missing-messages{end}", [{"messages": ABSENT}, {"messages": None}],
             "missing_required", "messages"),
        *_of(path, f"model{end}", [{"model": "nope"}], "model_not_found", "model", status=404),
        *_of(path, f"empty{end}", [{"messages": []}], "empty_array", "messages"),
        *_of(path, f"type{end}", [{"messages": m} for m in ("x", 1, {})], "invalid_value",
             "messages"),
        *_of(path, f"role{end}", [_user("x", role) for role in ("root", "tool", "")],
             "invalid_value", "messages[0].role"),
        *_of(path, f"content{end}", [_user(c) for c in (None, 1, [], {})], "invalid_value",
             "messages[0].content"),
        *_of(path, f"block{end}", [_user([b]) for b in (1, None, {}, {"type": 1})],
             "invalid_value", "messages[0].content[0]"),
        *_of(path, f"picture{end}", [_user([{"type": kind, "source": {"url": "http://a"}}])
                                     for kind in ("image", "document", "tool_use", "x" * 500)],
             "unsupported_content", "messages[0].content[0]"),
        *_of(path, f"system{end}", [{"system": s} for s in (1, {}, [])], "invalid_value", "system"),
        *_of(path, f"prefill{end}", [_user([{"type": "tool_use", "id": "1", "name": "f",
                                             "input": {}}], "assistant")],
             "invalid_value", "messages"),
        *_of(path, f"long{end}", [_user("x" * 3_000_000)], "context_length_exceeded", "messages"),
        *_of(path, f"server{end}", [{"tools": [{"type": "web_search_20250305", "name": "x"}]}],
             "unsupported_parameter", "tools[0]"),
        *_of(path, f"thinking{end}", [{"thinking": t} for t in ({}, 1, {"type": "x"}, "on")],
             "invalid_value", "thinking.type"),
        *[row for name, value in (("container", "x"), ("mcp_servers", [{"url": "http://a"}]),
                                  ("stop", ["x"]), ("n", 2), ("logprobs", True), ("input", "x"),
                                  ("response_format", {"type": "json_object"}), ("prompt", "x"),
                                  ("enable_thinking", True), ("reasoning_effort", "low"))
          for row in _of(path, f"{name}{end}", [{name: value}], "unsupported_parameter", name)],
        *_of(path, f"kv_transfer_params{end}", [{"kv_transfer_params": {}}], "unknown_parameter",
             "kv_transfer_params"),
    )],
    *_of(_MESSAGES, "result", [_user([{"type": "tool_result", "content": "x"}])], "invalid_value",
         "messages[0].content[0].tool_use_id"),
    *_of(_MESSAGES, "many", [_user("x") | {"messages": _user("x")["messages"] * 5000}],
         "array_too_long", "messages"),
    *_values(_MESSAGES, "max_tokens", [-1, 1.5, "5", True, 0]),
    *_values(_MESSAGES, "temperature", [-1, "1", 3, True]),
    *_values(_MESSAGES, "stop_sequences", [["x"] * 99], "array_too_long"),
    *_of(_MESSAGES, "stops", [{"stop_sequences": s} for s in ([""], ["x" * 999], [1])],
         "invalid_value", "stop_sequences[0]"),
    *_of(_MESSAGES, "budget", [{"thinking": {"type": "enabled", "budget_tokens": b}}
                               for b in (0, -1, "5", None, 1.5)], "invalid_value",
         "thinking.budget_tokens"),
    *_of(_MESSAGES, "tool-name", [{"tools": [_OWN | {"name": n}]} for n in ("", "a b", 1, None)],
         "invalid_value", "tools[0].name"),
    *_of(_MESSAGES, "schema", [{"tools": [_OWN | {"input_schema": p}]} for p in (
        _DEEP, {"$ref": "#"}, {"$ref": "file:///etc/passwd"})], "invalid_schema",
        "tools[0].input_schema"),
    *_of(_MESSAGES, "no-schema", [{"tools": [_OWN | {"input_schema": p}]} for p in (None, 1, "x")],
         "invalid_value", "tools[0].input_schema"),
    *_of(_MESSAGES, "choice", [{"tool_choice": {"type": t}} for t in ("some", 1, None, [])],
         "invalid_value", "tool_choice.type"),
    *_of(_MESSAGES, "no-tools", [{"tool_choice": {"type": "any"}}], "invalid_value",
         "tool_choice"),
]  # fmt: skip
