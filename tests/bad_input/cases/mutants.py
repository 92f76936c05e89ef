"""Random mutations of valid requests: JSON, HTTP heads, protobuf."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from bad_input.cases.table import to_wire

from baton.client.messages import build_request
from baton.proto.v1 import inference_pb2

_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}
_MESSAGES = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
]
_SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "stop": ["x", "y"],
    "stop_token_ids": [1], "logit_bias": {"1": 2.0}, "presence_penalty": 0.1,
    "frequency_penalty": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": True,
}  # fmt: skip
_GENERATION = {"model": "demo", "max_tokens": 1, "n": 1, "cache_salt": "s", "user": "u",
               "metadata": {"a": "b"}, "skip_special_tokens": False}  # fmt: skip

# (path, body): each returns 200, unless the model lacks a feature.
GOOD_BODIES: Sequence[tuple[str, dict[str, Any]]] = (
    ("/v1/completions", {"model": "demo", "prompt": "hello", "max_tokens": 1}),
    ("/v1/completions", {**_GENERATION, **_SAMPLING, "prompt": [1, 2, 3], "logprobs": 2}),
    ("/v1/completions", {"model": "demo", "prompt": "hi", "max_tokens": 2, "n": 2, "best_of": 4,
                         "use_beam_search": True, "length_penalty": 0.5, "early_stopping": "never",
                         "num_beam_groups": 2, "diversity_penalty": 0.5}),
    ("/v1/completions", {**_GENERATION, "prompt": ["a", "b"], "echo": True, "prompt_logprobs": 1}),
    ("/v1/completions", {**_GENERATION, "prompt": [[1], [2]], "stream": True,
                         "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {**_GENERATION, **_SAMPLING, "messages": _MESSAGES, "logprobs": True,
                              "top_logprobs": 2}),
    ("/v1/chat/completions", {"model": "demo", "max_tokens": 1, "messages": _MESSAGES,
                              "tools": [_TOOL], "tool_choice": "auto"}),
    ("/v1/chat/completions", {"model": "demo", "max_tokens": 1, "messages": [
        *_MESSAGES, {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function":
            {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "2"}]}),
    ("/v1/chat/completions", {"model": "demo", "max_tokens": 1, "messages": _MESSAGES,
                              "response_format": {"type": "json_schema", "json_schema":
                                                  {"name": "x", "schema": _SCHEMA}}}),
    ("/v1/responses", {"model": "demo", "max_output_tokens": 1, "instructions": "x", "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "y"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "2"}]}),
    ("/v1/responses", {"model": "demo", "max_output_tokens": 1, "input": "x", "store": False,
                       "text": {"format": {"type": "json_schema", "name": "x",
                                           "schema": _SCHEMA}}}),
    ("/v1/messages", {"model": "demo", "max_tokens": 1, "system": "x", "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "y", "signature": ""},
                                          {"type": "tool_use", "id": "1", "name": "f",
                                           "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1",
                                      "content": "2"}]}]}),
    ("/v1/messages/count_tokens", {"model": "demo", "messages": _MESSAGES}),
    ("/tokenize", {"model": "demo", "prompt": "hello", "return_token_strs": True}),
    ("/tokenize", {"messages": _MESSAGES, "tools": [_TOOL]}),
    ("/detokenize", {"model": "demo", "tokens": [1, 2, 3]}),
)  # fmt: skip

_WIRE_FIELDS = {k: v for k, v in _SAMPLING.items() if k != "top_k"}
GOOD_MESSAGES: Sequence[tuple[str, bytes]] = tuple(
    (f"/baton.v1.Inference/{method}", message.SerializeToString())
    for method, message in (
        ("Generate", to_wire({"prompt": "hello", "max_tokens": 1})),
        ("Generate", to_wire({**_WIRE_FIELDS, "prompt": [1, 2, 3], "max_tokens": 1, "n": 2})),
        ("Generate", to_wire({"prompt": "x", "max_tokens": 1, "regex": "[a-z]+"})),
        ("Generate", build_request(None, {"prompt_token_ids": [1, 2, 3], "max_tokens": 1})[0]),
        ("Tokenize", inference_pb2.TokenizeRequest(text="hello")),
        ("Detokenize", inference_pb2.DetokenizeRequest(ids=[1, 2, 3])),
        ("Abort", inference_pb2.AbortRequest(ids=["a" * 32])),
        ("GetModelInfo", inference_pb2.GetModelInfoRequest()),
    )
)

_BITS = (
    b"\0", b"\xff", b"\xef\xbb\xbf", b'"', b"\\", b"\\ud800", b"\\u0000", b"{", b"}", b"[", b"]",
    b",", b":", b"null", b"true", b"NaN", b"-0", b"1e999", b"9" * 400, b"-1", b"1" * 20,
    b"[" * 500, b'{"a":' * 500, b"\r\n", b"\r\n\r\n", b"A" * 5000, b"\xed\xa0\x80", b"\x80" * 11,
    b"\x0b", b"\x0c",
)  # fmt: skip
_VALUES: Sequence[Any] = (
    None, True, False, 0, -1, 1, 2, 8, 9, 1.5, -0.5, 1e308, 2**31, 2**32, 2**63, 2**64, 2**70, "",
    "a", "\0", "é", "😀", "x" * 300, "x" * 5000, [], {}, [[]], [{}], [None], [1], ["a"], [[1]],
    [["a", 1]], {"a": 1}, {"1": 1}, {"type": "text"}, {"type": "function"}, {"$ref": "#"},
    {"type": "json_object"}, "auto", "required", "none", "demo",
)  # fmt: skip


def mutated_body(rng: random.Random) -> tuple[str, bytes]:
    """A path, and a mutated body that was valid for it, or for another."""
    path, body = rng.choice(GOOD_BODIES)
    if rng.random() < 0.05:
        path = rng.choice(GOOD_BODIES)[0]
    if rng.random() < 0.6:
        body = json.loads(json.dumps(body))
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            _change_value(rng, body)
        data = json.dumps(body).encode()
        return path, data if rng.random() < 0.8 else mutated_bytes(rng, data)
    return path, mutated_bytes(rng, json.dumps(body).encode())


def mutated_message(rng: random.Random) -> tuple[str, bytes]:
    """A method, and a mutated message that was valid for it, or for another."""
    method, data = rng.choice(GOOD_MESSAGES)
    if rng.random() < 0.1:
        method = rng.choice(GOOD_MESSAGES)[0]
    return method, mutated_bytes(rng, data)


def mutated_head(rng: random.Random) -> bytes:
    """A whole request with its head mutated; possibly no HTTP at all."""
    path, body = rng.choice(GOOD_BODIES)
    data = json.dumps(body).encode()
    head = http_head(path, len(data))
    return mutated_bytes(rng, head[:-4]) + b"\r\n\r\n" + data


def http_head(path: str, num_bytes: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {num_bytes}\r\n\r\n"
    ).encode()


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """Bytes are flipped, cut off, repeated, removed or inserted."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        first = rng.randrange(len(data) + 1)
        last = min(len(data), first + rng.choice((1, 2, 4, 16, 64)))
        match rng.randrange(6):
            case 0 if first < len(data):
                flipped = bytes([data[first] ^ (1 << rng.randrange(8))])
                data = data[:first] + flipped + data[first + 1 :]
            case 1:
                data = data[:first]
            case 2:
                data = data[:last] + data[first:last] * rng.choice((1, 2, 50)) + data[last:]
            case 3:
                data = data[:first] + data[last:]
            case 4:
                data = data[:first] + rng.choice(_BITS) + data[first:]
            case _:
                data = data[:first] + rng.randbytes(rng.choice((1, 4, 30))) + data[last:]
    return data


def _change_value(rng: random.Random, body: Any) -> None:
    """Replace, remove or rename one value somewhere in it."""
    place = body
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.7:
            place = place[key]
            continue
        match rng.randrange(5):
            case 0:
                del place[key]
            case 1 if isinstance(place, dict):
                place[str(rng.choice(_VALUES))] = deepcopy(place[key])
            case 2 if isinstance(place, dict):
                place[key] = deepcopy(place[rng.choice(keys)])
            case _:
                place[key] = deepcopy(rng.choice(_VALUES))
        return
