"""Structured output through a real deployment, with OpenAI's client and with gRPC."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from deployments import Running
from engines.generation import outputs_of
from tokenizers import Tokenizer

from baton.client import Client
from baton.core.errors import InvalidRequest
from baton.core.request.constraint import Constraint, ConstraintKind
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.local import LocalEngine

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
MESSAGES: Any = [{"role": "user", "content": "a person as JSON"}]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


@dataclass
class Subject:
    """A deployment's two fronts, and one process of the same model."""

    system: Running
    http: openai.OpenAI
    grpc: Client
    local: LocalEngine
    tokenizer: Tokenizer

    def chat(self, **params: Any) -> Any:
        defaults = {"model": "demo", "messages": MESSAGES, "max_tokens": 100, "temperature": 1.0}
        return self.http.chat.completions.create(**defaults | params)


@pytest.fixture(scope="module")
def demo(demo_system: tuple[Running, LocalEngine]) -> Iterator[Subject]:
    global openai  # here: its import takes 0.7 s, and each process imports each test file
    import openai

    system, local = demo_system
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    (line,) = [line for line in system.lines if line.startswith("gateway | ready:")]
    base_url = f"{line.split()[-2]}/v1"
    with (
        Client(system.address) as grpc,
        openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as http,
    ):
        yield Subject(system, http, grpc, local, tokenizer)
    system.wait_idle()


def test_a_chats_json_matches_its_schema_streamed_and_whole(demo: Subject) -> None:
    whole = demo.chat(response_format=FORMAT, seed=1).choices[0]
    jsonschema.validate(json.loads(whole.message.content), SCHEMA)
    assert whole.finish_reason == "stop"
    stream = demo.chat(response_format=FORMAT, seed=1, stream=True)
    deltas = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(deltas) == whole.message.content and len(deltas) > 3
    free = demo.chat(response_format={"type": "json_object"}, temperature=0).choices[0]
    assert free.message.content.startswith("{")
    assert free.finish_reason == "length" or isinstance(json.loads(free.message.content), dict)
    cut = demo.chat(response_format=FORMAT, seed=1, max_tokens=4).choices[0]
    assert cut.finish_reason == "length" and whole.message.content.startswith(cut.message.content)


def test_the_tokens_are_those_of_one_process(demo: Subject) -> None:
    constraints = {
        "json_schema": json.dumps(SCHEMA),
        "regex": "[0-9]{3}-[a-f]{2,5}",
        "grammar": 'start: "<" /[a-z ]{3,9}/ ">"',
    }
    prompt = tuple(demo.tokenizer.encode("def person():\n    return").ids)
    common: dict[str, Any] = {
        "max_tokens": 80, "temperature": 0.9, "top_p": 0.95, "seed": 7, "presence_penalty": 0.3,
    }  # fmt: skip
    for number, (kind, source) in enumerate(constraints.items()):
        constraint = Constraint(ConstraintKind(kind), source)
        sampling = SamplingParams(**common, constraint=constraint)
        request = Request(f"{number:032x}", 0, prompt, sampling, fork_ids=(f"{number:031x}f",))
        expected = outputs_of(demo.local, [request])
        params: Any = {**common, kind: source, "prompt_token_ids": prompt, "n": 2}
        generation = demo.grpc.generate(**params)
        for _ in generation:
            pass
        found = [list(result.token_ids) for result in generation.results]
        assert found == [expected[sample.key] for sample in (request, *request.forks)]
        if kind == "regex":
            assert all(re.fullmatch(source, result.text) for result in generation.results)


def test_a_choice_and_vllms_names(demo: Subject) -> None:
    create = demo.http.completions.create
    for name, value in (
        ("guided_choice", ["yes", "no"]),
        ("structured_outputs", {"choice": ["yes", "no"]}),
    ):
        answer = create(model="demo", prompt="Is it so? ", n=3, seed=3, extra_body={name: value})
        assert {choice.text for choice in answer.choices} <= {"yes", "no"}
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_forced_tools_have_arguments_of_their_schema(demo: Subject) -> None:
    tools: Any = [
        {"type": "function", "function": {"name": "greet", "parameters": SCHEMA, "strict": True}},
        {"type": "function", "function": {"name": "noop"}},
    ]
    named: Any = {"type": "function", "function": {"name": "greet"}}
    for choice in (named, "required"):
        whole = demo.chat(tools=tools, tool_choice=choice, seed=4).choices[0]
        (call,) = whole.message.tool_calls
        schema = SCHEMA if call.function.name == "greet" else {"maxProperties": 0}
        jsonschema.validate(json.loads(call.function.arguments), schema)
        assert whole.finish_reason == "tool_calls"
        stream = demo.chat(tools=tools, tool_choice=choice, seed=4, stream=True)
        deltas = [d for chunk in stream for d in chunk.choices[0].delta.tool_calls or ()]
        assert deltas[0].function.name == call.function.name
        arguments = "".join(delta.function.arguments or "" for delta in deltas)
        assert arguments == call.function.arguments


@pytest.mark.parametrize(
    ("params", "code", "param"),
    [
        ({"response_format": {"type": "wat"}}, "unsupported_parameter", "response_format"),
        ({"extra_body": {"guided_regex": "a("}}, "invalid_schema", "guided_regex"),
        ({"extra_body": {"guided_json": {"$ref": "http://127.0.0.1:1/"}}}, "invalid_schema",
         "guided_json"),
        ({"extra_body": {"guided_json": {"$ref": "#"}}}, "invalid_schema", "guided_json"),
        ({"extra_body": {"guided_regex": "a", "ignore_eos": True}}, "invalid_value", "ignore_eos"),
        ({"response_format": FORMAT, "tools": [
            {"type": "function", "function": {"name": "f"}}]}, "unsupported_parameter",
         "response_format"),
        ({"response_format": FORMAT, "tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "f"}}]}, "invalid_value",
         "response_format"),
        ({"tool_choice": "required", "tools": [{"type": "function", "function": {
            "name": "f", "strict": True, "parameters": {"not": {}}}}]}, "invalid_schema",
         "tool_choice"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_a_token(
    demo: Subject, params: dict[str, Any], code: str, param: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            demo.chat(**params, stream=stream)
        assert (refused.value.code, refused.value.param) == (code, param)


def test_grpc_refuses_the_same(demo: Subject) -> None:
    with pytest.raises(InvalidRequest) as refused:
        list(demo.grpc.generate("x", regex="a("))
    assert (refused.value.code, refused.value.param) == ("invalid_schema", "constraint")
