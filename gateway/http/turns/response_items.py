"""The Responses API's bodies and events as structs, with OpenAI's names and order of fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

Status = Annotated[
    str, Meta(extra_json_schema={"enum": ["in_progress", "completed", "incomplete"]})
]


class ContentPart(Struct, kw_only=True):
    """An `output_text`, which alone has annotations and logprobs, or a `reasoning_text`."""

    text: str
    type: Literal["output_text", "reasoning_text"]
    annotations: tuple[()] | UnsetType = UNSET
    logprobs: tuple[()] | UnsetType = UNSET


class Item(Struct, kw_only=True):
    """One item of the output: messages and reasoning have `content`, calls `call_id` to the end."""

    id: str
    type: str
    status: Status
    role: Literal["assistant"] | UnsetType = UNSET
    content: list[ContentPart] | UnsetType = UNSET
    summary: tuple[()] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    namespace: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CachedDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class ReasoningDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: CachedDetails
    output_tokens: int
    output_tokens_details: ReasoningDetails
    total_tokens: int


class Incomplete(Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseBody(Struct, kw_only=True):
    """Repeats the request's fields, some of them as raw JSON, whose numbers may be of any size."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    error: None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: Raw
    tool_choice: Raw
    tools: Raw
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    background: bool = False


class DeletedResponse(Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class StreamEvent(Struct, kw_only=True):
    """The fields of all events. The others depend on the type."""

    type: str
    sequence_number: int = 0


class ResponseEvent(StreamEvent, kw_only=True):
    """response.created, .in_progress, .completed, .incomplete."""

    response: ResponseBody


class ItemEvent(StreamEvent, kw_only=True):
    """response.output_item.added, .done."""

    output_index: int
    item: Item


class PartEvent(StreamEvent, kw_only=True):
    """response.content_part.added, .done."""

    item_id: str
    output_index: int
    content_index: int = 0
    part: ContentPart


class TextEvent(StreamEvent, kw_only=True):
    """response.output_text and response.reasoning_text: .delta has `delta`, .done has `text`."""

    item_id: str
    output_index: int
    content_index: int = 0
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: tuple[()] | UnsetType = UNSET


class ArgumentsEvent(StreamEvent, kw_only=True):
    """response.function_call_arguments: .delta has `delta`, .done has `name` and `arguments`."""

    item_id: str
    output_index: int
    delta: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
