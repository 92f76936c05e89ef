"""Bodies and fields, row by row: what is refused, with which code, and the field that is named."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import InvalidRequest
from baton.core.request.json_fields import FieldKind
from baton.gateway.http.chat import chat
from baton.gateway.http.chat.tools import check_schema, chosen
from baton.gateway.http.generate import completions
from baton.gateway.http.generate.request_fields import (
    INTERNAL,
    UNSUPPORTED,
    Body,
    Unsupported,
    generate_request,
    require,
)
from baton.gateway.http.generate.structured import constraint_of
from baton.gateway.http.protocol.body import parse_object
from baton.gateway.http.turns import message_input, response_input

CHAT, COMPLETIONS = chat.BODY.fields, completions.BODY.fields
MESSAGES, RESPONSES = message_input.BODY.fields, response_input.BODY.fields


def read_fields(
    body: Mapping[str, Any],
    known: Mapping[str, FieldKind],
    unsupported: Mapping[str, Unsupported] = UNSUPPORTED,
) -> dict[str, Any]:
    """Of a body in which no field is required."""
    return Body(known, (), unsupported).read_fields(body)


def refusal(call: Any, *arguments: Any) -> tuple[str, str | None]:
    with pytest.raises(InvalidRequest) as caught:
        call(*arguments)
    assert len(caught.value.message) < 250, "a caller's value is not thrown back whole"
    return caught.value.code, caught.value.param


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("max_tokens", 0, "an integer from 1 on"),
        ("max_tokens", 2**32, "a smaller integer"),
        ("seed", -1, "an integer from 0 on"),
        ("seed", 2**63, "a smaller integer"),
        ("n", 17, "an integer in [1, 16]"),
    ],
)
def test_what_an_integer_must_be(name: str, value: int, wanted: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name} must be {re.escape(wanted)}$"):
        read_fields({name: value}, CHAT)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b'{"a": 1', "invalid_json"),
        (b'{"a": 1} x', "invalid_json"),
        (b"{} {}", "invalid_json"),
        (b"{'a': 1}", "invalid_json"),
        (b"[" * 100_000, "json_too_deep"),
        (b'{"a": ' * 10_000, "json_too_deep"),
        (b'\xef\xbb\xbf{"a": 1}', "invalid_encoding"),
        (b'{"a": "\xff"}', "invalid_encoding"),
        (b'{"a": "\\ud800"}', "invalid_encoding"),
        (b'{"\\uDC00": 1}', "invalid_encoding"),
        ('{"a": 1}'.encode("utf-16"), "invalid_encoding"),
        (b'{"a": NaN}', "invalid_number"),
        (b'{"a": -Infinity}', "invalid_number"),
        (b'{"a": 1e999}', "invalid_number"),
        (b'{"a": -0}', "invalid_number"),
        (b'{"a": -0.0}', "invalid_number"),
        (b'{"a": -1e-999}', "invalid_number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "invalid_number"),
        (b"[1]", "invalid_value"),
        (b'"a"', "invalid_value"),
        (b"null", "invalid_value"),
    ],
)
def test_bodies_that_are_no_object(body: bytes, code: str) -> None:
    assert refusal(parse_object, body) == (code, None)


@pytest.mark.parametrize(
    "text",
    ['{"a": "\\ud83d\\ude00"}', '{"a": "x-0", "b": 0.0, "c": -0.5}', '{"a": "NaN", "b": -1}', "{}"],
)
def test_bodies_that_look_odd(text: str) -> None:
    assert parse_object(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"model": "a", "n": 1, "model": "a"}', "model"),
        ('{"a": [{"b": {"c": 1, "\\u0063": 2}}]}', "c"),
        ('{"a": {"": 1, "": 2}}', ""),
        ('{"\\ud800": 1, "\\ud800": 2}', None),
        ('{"' + "x" * 999 + '": 1, "' + "x" * 999 + '": 2}', "x" * 64),
    ],
)
def test_a_name_twice_in_one_object(body: str, param: str | None) -> None:
    assert refusal(parse_object, body.encode()) == ("duplicate_field", param)


def test_looking_for_names_that_come_twice_costs_little() -> None:
    """The check for duplicate names is cheap for a long chat; a list of prompts has one object and
    needs none."""
    message = {"role": "user", "content": "x" * 100}
    body = json.dumps({"model": "demo", "messages": [message] * 4096}).encode()

    def took_s(parse: Any) -> float:
        began_s = time.thread_time()
        parse(body)
        return time.thread_time() - began_s

    plain_s = min(took_s(json.loads) for _ in range(7))
    assert min(took_s(parse_object) for _ in range(7)) < 4 * plain_s + 0.001


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text()
    | st.floats(allow_nan=False, allow_infinity=False).map(lambda number: number + 0.0),  # no -0.0
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@pytest.mark.parametrize(
    "name", ["reasoning_effort", "chat_template_kwargs", "max_completion_tokens"]
)
def test_a_refusal_says_what_there_is_instead(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"completions takes|max_tokens"):
        read_fields({name: {"a": 1}}, COMPLETIONS)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=6), st.booleans())
def test_whatever_json_writes_is_read(value: dict[str, Any], ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii)
    assert parse_object(text.encode()) == value


TOOL = {"type": "function", "function": {"name": "f"}}


def tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("name", "value", "code", "param"),
    [
        ("max_tokens", -1, "invalid_value", "max_tokens"),
        ("max_tokens", 2**63, "invalid_value", "max_tokens"),
        ("max_tokens", "10", "invalid_value", "max_tokens"),
        ("max_tokens", 1.5, "invalid_value", "max_tokens"),
        ("max_tokens", 10.0, "invalid_value", "max_tokens"),
        ("max_tokens", True, "invalid_value", "max_tokens"),
        ("n", -1, "invalid_value", "n"),
        ("temperature", "hot", "invalid_value", "temperature"),
        ("temperature", True, "invalid_value", "temperature"),
        ("temperature", 10**400, "invalid_value", "temperature"),
        ("top_k", -2, "invalid_value", "top_k"),
        ("top_k", 1e12, "invalid_value", "top_k"),
        ("seed", 2**70, "invalid_value", "seed"),
        ("seed", -1, "invalid_value", "seed"),
        ("seed", "x", "invalid_value", "seed"),
        ("stop", ["a"] * 100, "array_too_long", "stop"),
        ("stop", ["a", None], "invalid_value", "stop[1]"),
        ("stop", 7, "invalid_value", "stop"),
        ("stop_token_ids", [1, -1], "invalid_token_id", "stop_token_ids[1]"),
        ("logit_bias", {"abc": 1}, "invalid_token_id", "logit_bias"),
        ("logit_bias", {"-1": 1}, "invalid_token_id", "logit_bias"),
        ("logit_bias", {str(2**32): 1}, "invalid_token_id", "logit_bias"),
        ("logit_bias", {"1": "2"}, "invalid_value", "logit_bias"),
        ("logit_bias", dict.fromkeys(map(str, range(2000)), 0), "array_too_long", "logit_bias"),
        ("logit_bias", [1], "invalid_value", "logit_bias"),
        ("ignore_eos", 1, "invalid_value", "ignore_eos"),
        ("stream", "true", "invalid_value", "stream"),
        ("stream_options", {"x": 1}, "unknown_parameter", "stream_options"),
        ("stream_options", {"include_usage": 1}, "invalid_value", "stream_options.include_usage"),
        ("user", "x" * 600, "invalid_value", "user"),
        ("metadata", {"a": "x" * 600}, "invalid_value", "metadata"),
        ("metadata", {"a": 1}, "invalid_value", "metadata"),
        ("metadata", dict.fromkeys(map(str, range(17)), ""), "invalid_value", "metadata"),
        ("cache_salt", 5, "invalid_value", "cache_salt"),
        ("model", 5, "invalid_value", "model"),
        ("kv_transfer_params", {}, "unknown_parameter", "kv_transfer_params"),
        ("bootstrap_room", 1, "unknown_parameter", "bootstrap_room"),
        ("mm_hashes", [], "unknown_parameter", "mm_hashes"),
        ("media_io_kwargs", {}, "unknown_parameter", "media_io_kwargs"),
        ("chat_template", "x", "unsupported_parameter", "chat_template"),
        ("prompt_embeds", "AAAA", "unsupported_parameter", "prompt_embeds"),
        ("best_of", 17, "invalid_value", "best_of"),
        ("suffix", "x", "unsupported_parameter", "suffix"),
        ("use_beam_search", 1, "invalid_value", "use_beam_search"),
        ("early_stopping", "always", "invalid_value", "early_stopping"),
        ("early_stopping", "true", "invalid_value", "early_stopping"),
        ("num_beam_groups", 0, "invalid_value", "num_beam_groups"),
    ],
)  # fmt: skip
def test_fields_of_both_endpoints(name: str, value: Any, code: str, param: str) -> None:
    for table in (COMPLETIONS, CHAT):
        assert refusal(read_fields, {name: value}, table) == (code, param)


@pytest.mark.parametrize(
    ("value", "code", "param"),
    [
        ([], "empty_prompt", "prompt"),
        (7, "invalid_value", "prompt"),
        ({}, "invalid_value", "prompt"),
        ([1, -2], "invalid_token_id", "prompt[1]"),
        ([1, 2**32], "invalid_token_id", "prompt[1]"),
        ([1.0], "invalid_token_id", "prompt[0]"),
        ([1, True], "invalid_token_id", "prompt[1]"),
        ([1, "a"], "invalid_token_id", "prompt[1]"),
        (["a", 1], "invalid_value", "prompt[1]"),
        (["a", [1]], "invalid_value", "prompt[1]"),
        ([[1], "a"], "invalid_value", "prompt[1]"),
        ([[[1]]], "invalid_token_id", "prompt[0][0]"),
        (["a"] * 65, "array_too_long", "prompt"),
    ],
)
def test_prompts_that_are_refused(value: Any, code: str, param: str) -> None:
    assert refusal(read_fields, {"prompt": value}, COMPLETIONS) == (code, param)


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        (["a", ""], ["a", ""]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_the_four_forms_of_a_prompt(value: Any, prompts: list[Any]) -> None:
    assert read_fields({"prompt": value}, COMPLETIONS) == {"prompt": prompts}


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("value", "code", "param"),
    [
        ([], "empty_array", "messages"),
        ("hi", "invalid_value", "messages"),
        ([USER] * 100_001, "array_too_long", "messages"),
        (["hi"], "invalid_value", "messages[0]"),
        ([USER, {"content": "x"}], "invalid_value", "messages[1].role"),
        ([{"role": "root", "content": "x"}], "invalid_value", "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "invalid_value", "messages[0].role"),
        ([{"role": "user", "content": None}], "invalid_value", "messages[0].content"),
        ([{"role": "user", "content": 5}], "invalid_value", "messages[0].content"),
        ([{"role": "user", "content": []}], "invalid_value", "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "invalid_value", "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "text", "text": 5}]}],
            "invalid_value", "messages[0].content[0].text",
        ),
        (
            [{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}],
            "unsupported_content", "messages[0].content[0]",
        ),
        (
            [{"role": "user", "content": [{"type": "input_audio"}]}],
            "unsupported_content", "messages[0].content[0]",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "invalid_value", "messages[0].tool_calls[0].function.arguments",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}],
            "invalid_value", "messages[0].tool_calls[0].function.arguments",
        ),
        ([{"role": "assistant", "tool_calls": 5}], "invalid_value", "messages[0].tool_calls"),
    ],
)  # fmt: skip
def test_messages_that_are_refused(value: Any, code: str, param: str) -> None:
    assert refusal(read_fields, {"messages": value}, CHAT) == (code, param)


def test_messages_as_a_template_takes_them() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    given = [
        {"role": "developer", "content": "be brief", "name": "dev"},
        {"role": "user", "content": parts, "junk": object()},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
    ]
    function = {"name": "f", "arguments": {"a": [1]}}
    assert read_fields({"messages": given}, CHAT)["messages"] == [
        {"role": "system", "content": "be brief", "name": "dev"},
        {"role": "user", "content": "one\ntwo"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize("more", [{}, {"content": None}])
def test_an_answer_that_was_cut_in_its_reasoning_can_be_sent_back(more: dict[str, Any]) -> None:
    read_message = {"role": "assistant", "content": "", "reasoning_content": "wh"}
    given = {"role": "assistant", "reasoning_content": "wh"} | more
    assert read_fields({"messages": [given]}, CHAT) == {"messages": [read_message]}
    empty = [{"role": "assistant"} | more]
    plain = [{"role": "assistant", "content": ""}]
    assert read_fields({"messages": empty}, CHAT)["messages"] == plain
    assert read_fields({"input": empty}, RESPONSES)["input"] == plain
    for content in (more, {"content": []}):  # as in an assistant message without content
        turns = [{"role": "assistant"} | content, USER]
        assert read_fields({"messages": turns}, MESSAGES)["messages"] == [*plain, USER]


def test_null_is_absent_within_items() -> None:
    call = {"id": None, "type": None, "function": {"name": "f", "arguments": None}}
    given = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": None, "name": None, "tool_calls": None},
    ]
    called = {"name": "f", "arguments": {}}
    assert read_fields({"messages": given}, CHAT)["messages"] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "", "type": "function", "function": called}],
        },
        {"role": "tool", "content": "5"},
    ]
    assert read_fields({"input": [USER | {"type": None}]}, RESPONSES) == {"input": [USER]}


@pytest.mark.parametrize(
    ("value", "code", "param"),
    [
        ([TOOL] * 129, "array_too_long", "tools"),
        (["f"], "invalid_value", "tools[0]"),
        ([{"type": "function"}], "invalid_value", "tools[0]"),
        (
            [{"type": "function", "function": {"name": "a b"}}],
            "invalid_value", "tools[0].function.name",
        ),
        (
            [{"type": "function", "function": {"name": "f", "parameters": []}}],
            "invalid_value", "tools[0].function.parameters",
        ),
        ([tool(**nested(40))], "invalid_schema", "tools[0].function.parameters"),
        ([tool(a=list(range(20_000)))], "invalid_schema", "tools[0].function.parameters"),
        ([tool(a=list(range(9000)))] * 2, "invalid_schema", "tools"),
        ([tool(items={"$ref": "http://x/y"})], "invalid_schema", "tools[0].function.parameters"),
        ([tool(items={"$ref": "file:///etc"})], "invalid_schema", "tools[0].function.parameters"),
        ([tool(items={"$ref": "#/no"})], "invalid_schema", "tools[0].function.parameters"),
        ([tool(**{"$ref": "#"})], "invalid_schema", "tools[0].function.parameters"),
        ([tool(oneOf=[{"$ref": "#"}])], "invalid_schema", "tools[0].function.parameters"),
        ([tool(items={"$ref": "#/items"})], "invalid_schema", "tools[0].function.parameters"),
        ([tool(anyOf=[{}], items={"$ref": "#/anyOf/1"})], "invalid_schema",
         "tools[0].function.parameters"),
        ([tool(items={"$ref": 5})], "invalid_schema", "tools[0].function.parameters"),
        (
            [tool(a={"$ref": "#/$defs/x"},
                  **{"$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/x"}}})],
            "invalid_schema", "tools[0].function.parameters",
        ),
    ],
)  # fmt: skip
def test_tools_that_are_refused(value: Any, code: str, param: str) -> None:
    assert refusal(read_fields, {"tools": value}, CHAT) == (code, param)


def test_a_schema_may_refer_to_its_own_parts() -> None:
    definitions = {"x": {"type": "object", "a": {"$ref": "#/$defs/y"}}, "y": {"type": "string"}}
    given = tool(a={"$ref": "#/$defs/x"}, b={"$ref": "#/$defs/x"}, **{"$defs": definitions})
    assert read_fields({"tools": [given]}, CHAT)["tools"] == [given]


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"child": {"$ref": "#"}}},
        {"items": {"$ref": "#"}},
        {"properties": {"a": {"$ref": "#/$defs/n"}},
         "$defs": {"n": {"anyOf": [{"type": "null"}, {"items": {"$ref": "#/$defs/n"}}]}}},
        {"properties": {"$ref": {"type": "string"}, "a/b": {}, "c": {"$ref": "#/properties/a~1b"}}},
        {"anyOf": [{}], "items": {"$ref": "#/anyOf/0"}},
        {"enum": [{"$ref": "http://x"}], "default": {"$ref": 5}},
    ],
)  # fmt: skip
def test_schemas_that_are_recursive_or_look_as_if_they_referred(schema: dict[str, Any]) -> None:
    read_fields({"tools": [tool(**schema)]}, CHAT)


def test_a_loop_is_called_one() -> None:
    with pytest.raises(InvalidRequest, match=r"\$ref loop"):
        read_fields({"tools": [tool(allOf=[{"$ref": "#"}])]}, CHAT)


def test_references_to_parts_within_each_other_cost_no_more_than_the_schema() -> None:
    def took_s(schema: dict[str, Any]) -> float:
        began_s = time.thread_time()
        check_schema(schema, "x")
        return time.thread_time() - began_s

    references = [{"$ref": "#" + "/a" * depth} for depth in range(1, 29)]
    schema: Any = [0] * 14_000
    for _ in range(29):
        schema = {"a": schema}
    flat = min(took_s(schema) for _ in range(5))
    assert min(took_s(schema | {"b": references}) for _ in range(5)) < 5 * flat


@pytest.mark.parametrize("choice", ["any", 5, {"function": 5}, ["auto"], {"type": "function"}])
def test_choices_that_are_none(choice: Any) -> None:
    code, param = refusal(read_fields, {"tool_choice": choice}, CHAT)
    assert (code, param) == ("invalid_value", "tool_choice")


def test_a_choice_among_the_tools() -> None:
    def read(choice: Any, tools: list[Any]) -> Any:
        found = read_fields({"tool_choice": choice, "tools": tools}, CHAT)
        return chosen(found["tools"], found["tool_choice"])

    named = {"type": "function", "function": {"name": "f"}}
    assert not read("none", [TOOL]).is_offered
    assert read("auto", [TOOL]).is_offered and not read("auto", [TOOL]).is_forced
    assert read("required", [TOOL]).is_forced
    assert read(named, [TOOL]).function == "f"
    assert not read("auto", []).is_offered
    assert refusal(read, "required", []) == ("invalid_value", "tool_choice")
    other = {"type": "function", "function": {"name": "g"}}
    assert refusal(read, other, [TOOL]) == ("invalid_value", "tool_choice")


def test_values_reach_the_wire() -> None:
    body = {
        "temperature": 0.5, "top_p": 0.25, "top_k": -1, "min_p": 0.125, "seed": 2**63 - 1,
        "stop": "x", "stop_token_ids": [4, 9], "ignore_eos": True, "repetition_penalty": 1.5,
        "presence_penalty": -1, "frequency_penalty": 2, "logit_bias": {"7": -100, "8": 0.5},
        "min_tokens": 3, "prompt_logprobs": 2, "n": 2, "cache_salt": "s",
        "include_stop_str_in_output": True, "skip_special_tokens": False,
        "add_special_tokens": False,
    }  # fmt: skip
    wire = generate_request(read_fields(body | {"model": "m"}, COMPLETIONS), {})
    sampling = wire.sampling
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.25, 0.125)
    assert (sampling.HasField("top_k"), sampling.top_k, sampling.seed) == (True, 0, 2**63 - 1)
    assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["x"], [4, 9])
    assert dict(sampling.logit_bias) == {7: -100.0, 8: 0.5}
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.5, -1.0)
    assert (sampling.frequency_penalty, sampling.min_tokens) == (2.0, 3)
    assert (sampling.ignore_eos, sampling.prompt_logprobs) == (True, 2)
    assert (wire.n, wire.cache_salt, wire.include_stop_str_in_output) == (2, "s", True)
    assert wire.HasField("skip_special_tokens") and not wire.skip_special_tokens
    assert wire.HasField("add_special_tokens") and not wire.add_special_tokens


ENDPOINTS = {
    "chat": (CHAT, UNSUPPORTED),
    "completions": (COMPLETIONS, UNSUPPORTED),
    "responses": (RESPONSES, response_input.BODY.unsupported),
    "messages": (MESSAGES, message_input.BODY.unsupported),
}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_refusal_names_a_field_that_the_endpoint_takes(endpoint: str) -> None:
    known, unsupported = ENDPOINTS[endpoint]
    names = {name for name in unsupported if unsupported[name].instead and name not in known}
    for name in sorted(names):
        with pytest.raises(InvalidRequest) as refused:
            read_fields({name: {"a": 1}}, known, unsupported)
        hint = refused.value.message.partition(": ")[2]
        own = re.findall(r"(?:use|the name is) ([a-z_]+)", hint)
        assert own or "/v1/" in hint or " " in hint, hint
        if endpoint != "completions":  # its limit is lower, and its hints are those of a chat
            assert all(field in known for field in own), (name, hint)
            assert f"/v1/{endpoint}" not in hint, (name, hint)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_no_endpoint_ignores_what_changes_the_answer_of_another(endpoint: str) -> None:
    known, unsupported = ENDPOINTS[endpoint]
    others = {name for fields, *_ in ENDPOINTS.values() for name in fields}
    ignored = others - known.keys() - unsupported.keys()
    assert ignored <= {"metadata", "stream_options", "user"}, "they change nothing"
    for name in others - known.keys() - ignored:
        read = partial(read_fields, unsupported=unsupported)
        assert refusal(read, {name: {"a": 1}}, known) == ("unsupported_parameter", name)


@pytest.mark.parametrize(
    ("body", "constraint"),
    [
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"guided_json": {"type": "object"}}, {"json_schema": '{"type": "object"}'}),
        ({"guided_grammar": "start: A"}, {"grammar": "start: A"}),
    ],
)
def test_structured_output_of_all_endpoints(body: Any, constraint: Any) -> None:
    ((name, _),) = body.items()
    answered = read_fields(body | {"model": "m", "input": [USER]}, RESPONSES)
    message = read_fields(body | {"model": "m", "messages": [USER]}, MESSAGES)
    for fields in (
        response_input.chat_fields(answered, answered["input"]),
        message_input.chat_fields(message, ()),
    ):
        assert constraint_of(fields) == (constraint, name)


def test_anthropics_messages_take_a_chats_parameters() -> None:
    requested = {"model": "m", "messages": [USER], "max_tokens": 5, "stop_sequences": ["x"]}
    body = {
        "logit_bias": {"7": -100}, "seed": 3, "stop_token_ids": [4], "repetition_penalty": 1.5,
        "use_beam_search": True, "best_of": 2, "top_k": 5,
    }  # fmt: skip
    more = {"cache_salt": "s", "chat_template_kwargs": {"a": 1}}
    fields = message_input.chat_fields(read_fields(requested | body | more, MESSAGES), ())
    assert fields["chat_template_kwargs"] == {"a": 1}
    wire = generate_request(fields, {"max_tokens": fields["max_tokens"]})
    wanted = generate_request(
        read_fields(body | {"model": "m", "stop": "x", "cache_salt": "s"}, CHAT), {"max_tokens": 5}
    )
    assert wire == wanted


def test_options_of_a_stream_that_openai_has() -> None:
    options = {"include_usage": True, "include_obfuscation": False}
    for table in (COMPLETIONS, CHAT):
        body = {"stream_options": options}
        assert read_fields(body, table) == body


def test_null_is_absent_everywhere() -> None:
    names = {*COMPLETIONS, *CHAT, *UNSUPPORTED, *INTERNAL, "whatever"}
    assert read_fields(dict.fromkeys(names), COMPLETIONS) == {}
    assert refusal(require, {}, "model") == ("missing_required", "model")


def test_harmless_values_of_what_is_not_supported() -> None:
    for name, unsupported in UNSUPPORTED.items():
        for value in unsupported.harmless:
            if name not in COMPLETIONS:
                assert read_fields({name: value}, COMPLETIONS) == {}


def test_unknown_fields_are_ignored_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert read_fields({"wat\n": 1, "n": 1}, COMPLETIONS) == {"n": 1}
    assert "'wat\\n'" in caplog.text
