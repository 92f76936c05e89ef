"""JSON schemas of what the HTTP front answers, for its OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .generate.json_fields import Schema

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def record(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object that has at least these fields."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
    }


_ENVELOPE = {"id": STRING, "created": INTEGER, "model": STRING}
_FINISH = {"finish_reason": or_null({"enum": ["stop", "length", "tool_calls"]})}
_CHOICE_MORE: Mapping[str, Schema] = {
    "stop_reason": or_null(STRING),
    "token_ids": array(INTEGER),
    "prompt_token_ids": array(INTEGER),
    "prompt_logprobs": array({"anyOf": [{"type": "object"}, {"type": "null"}]}),
}
_NODES = {"prefill_node": STRING, "decode_node": STRING}
_TOKEN_SCORE: Schema = record({"token": STRING, "logprob": NUMBER, "bytes": array(INTEGER)})

COMPONENTS: Mapping[str, Schema] = {
    "Error": record(
        {
            "error": record(
                {
                    "message": STRING,
                    "type": STRING,
                    "param": or_null(STRING),
                    "code": or_null(STRING),
                }
            )
        }
    ),
    "Usage": record(
        {
            "prompt_tokens": INTEGER,
            "completion_tokens": INTEGER,
            "total_tokens": INTEGER,
            "prompt_tokens_details": record({"cached_tokens": INTEGER}),
        }
    ),
    "Model": record(
        {
            "id": STRING,
            "object": {"const": "model"},
            "created": INTEGER,
            "owned_by": STRING,
            "root": STRING,
            "max_model_len": INTEGER,
        }
    ),
    "ModelList": record({"object": {"const": "list"}, "data": array(ref("Model"))}),
    "CompletionLogprobs": record(
        {
            "tokens": array(STRING),
            "token_logprobs": array(or_null(NUMBER)),
            "top_logprobs": array(
                or_null({"type": "object", "additionalProperties": {"type": "number"}})
            ),
            "text_offset": array(INTEGER),
        }
    ),
    "CompletionChoice": record(
        {
            "index": INTEGER,
            "text": STRING,
            "logprobs": or_null(ref("CompletionLogprobs")),
            **_FINISH,
        },
        _CHOICE_MORE,
    ),
    "Completion": record(
        {
            **_ENVELOPE,
            "object": {"const": "text_completion"},
            "choices": array(ref("CompletionChoice")),
        },
        {"usage": or_null(ref("Usage")), **_NODES},
    ),
    "ChatLogprobs": record(
        {
            "content": array(
                record({**_TOKEN_SCORE["properties"], "top_logprobs": array(_TOKEN_SCORE)})
            )
        }
    ),
    "ToolCall": record(
        {"function": record({"arguments": STRING}, {"name": STRING})},
        {"index": INTEGER, "id": STRING, "type": {"const": "function"}},
    ),
    "ChatMessage": record(
        {},
        {
            "role": {"const": "assistant"},
            "content": or_null(STRING),
            "tool_calls": array(ref("ToolCall")),
        },
    ),
    "ChatCompletion": record(
        {
            **_ENVELOPE,
            "object": {"const": "chat.completion"},
            "choices": array(
                record(
                    {
                        "index": INTEGER,
                        "message": ref("ChatMessage"),
                        "logprobs": or_null(ref("ChatLogprobs")),
                        **_FINISH,
                    },
                    _CHOICE_MORE,
                )
            ),
            "usage": ref("Usage"),
        },
        {"prompt_token_ids": array(INTEGER), "prompt_logprobs": array({})},
    ),
    "ChatCompletionChunk": record(
        {
            **_ENVELOPE,
            "object": {"const": "chat.completion.chunk"},
            "choices": array(
                record(
                    {
                        "index": INTEGER,
                        "delta": ref("ChatMessage"),
                        "logprobs": or_null(ref("ChatLogprobs")),
                        **_FINISH,
                    },
                    _CHOICE_MORE,
                )
            ),
        },
        {"usage": or_null(ref("Usage")), **_NODES},
    ),
    "Tokens": record(
        {"count": INTEGER, "max_model_len": INTEGER, "tokens": array(INTEGER)},
        {"token_strs": array(STRING)},
    ),
    "Text": record({"prompt": STRING}),
    "ServerInfo": record(
        {
            "version": STRING,
            "model": STRING,
            "max_model_len": INTEGER,
            "vocab_size": INTEGER,
            "eos_token_ids": array(INTEGER),
            "nodes": array(
                record(
                    {
                        "name": STRING,
                        "role": {"enum": ["prefill", "decode"]},
                        "incarnation": STRING,
                        "is_ready": {"type": "boolean"},
                        "num_blocks": INTEGER,
                        "block_size": INTEGER,
                    }
                )
            ),
        }
    ),
    "Status": record({"status": STRING}, {"reason": STRING}),
    "Version": record({"version": STRING}),
}


def json_content(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
