"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, implemented as a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web
from msgspec import Raw, Struct

from ....core.request.request import FinishReason
from ...admission.text_calls import tokenize
from ...request.output_chunk import RequestResult
from ..chat.chat_model import CHAT_MODEL, prepare
from ..chat.reasoning import followed
from ..chat.tool_call_parsers import DeltaKind
from ..generate.generated_answer import renaming
from ..protocol.answers import answer
from ..protocol.app_state import APP_STATE, CALLER
from . import message_blocks as blocks
from .message_input import BODY, COUNTED_BODY, chat_fields
from .turn import Block, Turn, call_arguments

ROUTES = web.RouteTableDef()

_NAMES = {
    "continue_final_message": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
}


@ROUTES.post("/v1/messages")
async def messages(request: web.Request) -> web.StreamResponse:
    """Generate the next turn of a conversation."""
    found = await BODY.read(request)
    fields = _chat_fields(request.app, found)
    with renaming(_NAMES):
        return await _Message(request, fields, await prepare(request, fields)).run()


@ROUTES.post("/v1/messages/count_tokens")
async def count_tokens(request: web.Request) -> web.Response:
    """How many tokens the prompt of this conversation has."""
    found = await COUNTED_BODY.read(request)
    fields = _chat_fields(request.app, found)
    with renaming(_NAMES):
        prompt = (await prepare(request, fields)).prompt
        ids = await tokenize(
            request.app[APP_STATE].door,
            fields["model"],
            prompt.text,
            request[CALLER],
            adds_special_tokens=False,
            special_at=prompt.special_at,
            param="messages",
        )
    return answer(blocks.MessageTokens(len(ids)))


def _chat_fields(app: web.Application, found: Mapping[str, Any]) -> dict[str, Any]:
    model, door = app[CHAT_MODEL], app[APP_STATE].door
    if model.template is None:
        return chat_fields(found, ())
    grammar = None if door.constraint_refusal else model.reasoning_grammar
    return chat_fields(found, followed(model.template, grammar))


class _Message(Turn):
    id_prefix = "msg_"

    def begun(self) -> Sequence[Struct]:
        start = blocks.MessageStart(type="message_start", message=self._message())
        return [start, blocks.MessageEvent(type="ping")]

    def block_begun(self, block: Block) -> Sequence[Struct]:
        start = _content(block)
        return [
            blocks.BlockStart(type="content_block_start", index=block.index, content_block=start)
        ]

    def block_grew(self, block: Block, text: str) -> Sequence[Struct]:
        match block.kind:
            case DeltaKind.TEXT:
                piece = blocks.ContentDelta(type="text_delta", text=text)
            case DeltaKind.REASONING:
                piece = blocks.ContentDelta(type="thinking_delta", thinking=text)
            case DeltaKind.CALL:
                piece = blocks.ContentDelta(type="input_json_delta", partial_json=text)
        return [blocks.BlockDelta(type="content_block_delta", index=block.index, delta=piece)]

    def block_ended(self, block: Block, *, is_cut: bool) -> Sequence[Struct]:
        return [blocks.BlockStop(type="content_block_stop", index=block.index)]

    def ended(self, result: RequestResult) -> Sequence[Struct]:
        usage = self._message_usage()
        delta = blocks.MessageDelta(type="message_delta", delta=self._stop(result), usage=usage)
        return [delta, blocks.MessageEvent(type="message_stop")]

    def body(self, result: RequestResult) -> blocks.MessageBody:
        message, stop = self._message(), self._stop(result)
        message.content = [_content(block) for block in self.blocks]
        message.stop_reason, message.stop_sequence = stop.stop_reason, stop.stop_sequence
        return message

    def _message(self) -> blocks.MessageBody:
        return blocks.MessageBody(
            id=self._envelope["id"],
            model=self._envelope["model"],
            content=[],
            usage=self._message_usage(),
        )

    def _stop(self, result: RequestResult) -> blocks.Stop:
        if isinstance(result.matched_stop, str):
            return blocks.Stop("stop_sequence", result.matched_stop)
        if result.finish_reason is FinishReason.LENGTH:
            return blocks.Stop("max_tokens", None)
        has_call = any(block.kind is DeltaKind.CALL for block in self.blocks)
        is_call = has_call and not self.sample.is_cut(result)
        return blocks.Stop("tool_use" if is_call else "end_turn", None)

    def _message_usage(self) -> blocks.MessageUsage:
        """The usage so far; the cached tokens are known at the end."""
        usage = self._usage()
        num_cached = usage.prompt_tokens_details.cached_tokens
        found = blocks.MessageUsage(
            input_tokens=usage.prompt_tokens - num_cached,
            cache_read_input_tokens=num_cached,
            output_tokens=usage.completion_tokens,
        )
        if (num_reasoning := self.sample.num_reasoning_tokens) is not None:
            found.output_tokens_details = blocks.ThinkingDetails(num_reasoning)
        return found


def _content(block: Block) -> blocks.ContentBlock:
    """The block in Anthropic's form, with its text so far."""
    match block.kind:
        case DeltaKind.TEXT:
            return blocks.ContentBlock(type="text", text=block.text)
        case DeltaKind.REASONING:
            return blocks.ContentBlock(type="thinking", thinking=block.text, signature="")
    return blocks.ContentBlock(
        type="tool_use",
        id=f"toolu_{block.id[:24]}",
        name=block.name,
        input=Raw(block.text.encode() if call_arguments(block.text) else b"{}"),
    )
