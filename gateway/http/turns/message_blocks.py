"""Anthropic's response bodies and events as structs, with Anthropic's names and order of fields."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

StopReason = Annotated[
    str,
    Meta(extra_json_schema={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]}),
]


class ContentBlock(Struct, kw_only=True):
    """A `text`, a `thinking` with an empty signature, or a `tool_use` with the other fields."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: Raw | UnsetType = UNSET


class ThinkingDetails(Struct):
    thinking_tokens: int


class MessageUsage(Struct, kw_only=True):
    """`input_tokens`: the prompt tokens that were not in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int
    output_tokens_details: ThinkingDetails | UnsetType = UNSET


class MessageBody(Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageTokens(Struct):
    input_tokens: int


class MessageEvent(Struct, kw_only=True):
    """The field of all events, the only one of ping and message_stop. Others depend on the type."""

    type: str


class MessageStart(MessageEvent, kw_only=True):
    message: MessageBody


class BlockStart(MessageEvent, kw_only=True):
    index: int
    content_block: ContentBlock


class BlockStop(MessageEvent, kw_only=True):
    index: int


class ContentDelta(Struct, kw_only=True):
    type: Literal["text_delta", "thinking_delta", "input_json_delta"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET


class BlockDelta(MessageEvent, kw_only=True):
    index: int
    delta: ContentDelta


class Stop(Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(MessageEvent, kw_only=True):
    delta: Stop
    usage: MessageUsage
