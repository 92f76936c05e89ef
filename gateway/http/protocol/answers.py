"""The response bodies of the HTTP front as msgspec structs, from which OpenAPI's schemas are made.

A field that is UNSET is omitted; all other fields are always present, if only as null.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

FinishReason = Annotated[str, Meta(extra_json_schema={"enum": ["stop", "length", "tool_calls"]})]
Role = Annotated[str, Meta(extra_json_schema={"enum": ["prefill", "decode"]})]

_encoder = msgspec.json.Encoder()
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")


def json_text(answer: Any) -> str:
    """ASCII JSON, as json.dumps writes it, since some clients split a stream at U+2028."""
    text = _encoder.encode(answer).decode()
    return text if text.isascii() else _NOT_ASCII.sub(lambda m: json.dumps(m[0])[1:-1], text)


def answer(
    body: Struct, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """The JSON response of a route."""
    return web.json_response(body, status=status, headers=headers, dumps=json_text)


class PromptDetails(Struct):
    cached_tokens: int


class CompletionDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    """`completion_tokens_details`: only for models that reason."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TopLogprobs(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct):
    content: list[TopLogprobs]
    refusal: None = None


class CompletionLogprobs(Struct):
    """Four lists, with one item per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct):
    """In vLLM's format; `rank` is null for a token that is not among the requested top tokens."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # for each prompt token, by token id


class ChoiceFields(Struct, kw_only=True):
    """The fields that choices of both endpoints share."""

    index: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class CompletionChoice(ChoiceFields, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Function(Struct):
    """`name`: in a stream, only in the first delta of a call."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCall(Struct):
    function: Function
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatMessage(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatDelta(ChoiceFields, kw_only=True):
    delta: ChatMessage
    logprobs: ChatLogprobs | None = None


class ChatChoice(ChoiceFields, kw_only=True):
    message: ChatMessage
    logprobs: ChatLogprobs | None = None


class AnswerFields(Struct, kw_only=True):
    """The fields beside the choices, in a stream or a whole answer, which always has `usage`."""

    id: str
    created: int
    model: str
    usage: Usage | UnsetType | None = UNSET
    prefill_node: str | UnsetType = UNSET
    decode_node: str | UnsetType = UNSET


class Completion(AnswerFields, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ChatCompletion(AnswerFields, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatCompletionChunk(AnswerFields, kw_only=True):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatDelta]


class Model(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "baton"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(Struct):
    data: list[Model]
    object: Literal["list"] = "list"


class Node(Struct):
    name: str
    role: Role
    incarnation: str
    is_ready: bool
    num_blocks: int
    block_size: int


class ServerInfo(Struct):
    version: str
    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    nodes: list[Node]


class Tokens(Struct):
    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | UnsetType = UNSET


class Text(Struct):
    prompt: str


class Status(Struct):
    status: str
    reason: str | UnsetType = UNSET


class ServerLoad(Struct):
    """`server_load`: calls in flight at this gateway; the other fields cover the deployment."""

    server_load: int
    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage_perc: float


class Version(Struct):
    version: str


class ErrorDetails(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    error: ErrorDetails
