"""/v1/responses: OpenAI's Responses API, implemented as a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web
from msgspec import Raw, Struct

from ....core.errors import InvalidRequest
from ....core.request.request import FinishReason
from ....core.request.sampling_params import SamplingParams
from ...request.output_chunk import RequestResult
from ..chat.chat_model import Prepared, prepare
from ..chat.messages import Message
from ..chat.tool_call_parsers import DeltaKind
from ..generate.generated_answer import renaming
from ..protocol.answers import answer, json_text
from ..protocol.app_state import CALLER
from ..protocol.body import read_object
from . import response_items as items
from .response_input import BODY, chat_fields, namespaces
from .response_store import ResponseStore
from .turn import Block, Turn, call_arguments

ROUTES = web.RouteTableDef()
RESPONSE_STORE = web.AppKey("response_store", ResponseStore)

_DEFAULTS = SamplingParams()
_ID_PREFIX = {DeltaKind.REASONING: "rs_", DeltaKind.TEXT: "msg_", DeltaKind.CALL: "fc_"}
_TYPE = {
    DeltaKind.REASONING: "reasoning",
    DeltaKind.TEXT: "message",
    DeltaKind.CALL: "function_call",
}
_TEXT_NAME = {DeltaKind.REASONING: "reasoning_text", DeltaKind.TEXT: "output_text"}
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_ID_IN_PATH = {"previous_response_id": "response_id"}


@ROUTES.post("/v1/responses")
async def responses(request: web.Request) -> web.StreamResponse:
    """Generate the next turn of a conversation, and store it for the turn after."""
    body = await read_object(request)
    found = BODY.read_fields(body)
    earlier: Sequence[Message] = ()
    if (previous := found.get("previous_response_id")) is not None:
        earlier = request.app[RESPONSE_STORE].messages(request[CALLER].tenant, previous)
    conversation = [*earlier, *found["input"]]
    fields = chat_fields(found, conversation)
    with renaming(_NAMES):
        prepared = await prepare(request, fields)
        return await _Response(request, fields, prepared, body, conversation).run()


@ROUTES.get("/v1/responses/{response_id}")
async def kept_response(request: web.Request) -> web.Response:
    """A stored response, as it was sent."""
    for name in ("stream", "starting_after"):
        if request.query.get(name, "false") not in ("false", "0"):
            message = f"{name} is not supported: a response that is kept is complete"
            raise InvalidRequest(message, name, "unsupported_parameter")
    with renaming(_ID_IN_PATH):
        body = request.app[RESPONSE_STORE].body(*_kept(request))
    return web.Response(body=body, content_type="application/json")


@ROUTES.delete("/v1/responses/{response_id}")
async def delete_response(request: web.Request) -> web.Response:
    """Delete a stored response."""
    with renaming(_ID_IN_PATH):
        request.app[RESPONSE_STORE].delete(*_kept(request))
    return answer(items.DeletedResponse(request.match_info["response_id"]))


def _kept(request: web.Request) -> tuple[str, str]:
    return request[CALLER].tenant, request.match_info["response_id"]


class _Response(Turn):
    id_prefix = "resp_"

    def __init__(
        self,
        request: web.Request,
        found: Mapping[str, Any],
        prepared: Prepared,
        request_body: Mapping[str, Any],
        conversation: Sequence[Message],
    ) -> None:
        super().__init__(request, found, prepared)
        self._request_body = request_body
        self._conversation = conversation
        self._namespaces = namespaces(request_body.get("tools") or [])

    # --- events -----------------------------------------------------------------------------------

    def begun(self) -> Sequence[Struct]:
        body = self._body("in_progress")
        names = ("response.created", "response.in_progress")
        return [items.ResponseEvent(type=name, response=body) for name in names]

    def block_begun(self, block: Block) -> Sequence[Struct]:
        item = self._item(block, "in_progress")
        events: list[Struct] = [
            items.ItemEvent(type="response.output_item.added", output_index=block.index, item=item)
        ]
        if block.kind is not DeltaKind.CALL:
            item.content = []
            events.append(self._part("added", block))
        return events

    def block_grew(self, block: Block, text: str) -> Sequence[Struct]:
        return [self._text(block, "delta", delta=text)]

    def block_ended(self, block: Block, *, is_cut: bool) -> Sequence[Struct]:
        done = items.ItemEvent(
            type="response.output_item.done",
            output_index=block.index,
            item=self._item(block, "incomplete" if is_cut else "completed"),
        )
        if block.kind is DeltaKind.CALL:
            return [self._text(block, "done", name=done.item.name, arguments=block.text), done]
        return [self._text(block, "done", text=block.text), self._part("done", block), done]

    def _text(self, block: Block, what: str, **text: Any) -> Struct:
        """The event for a block's text; `what`: delta or done."""
        where = {"item_id": _id(block), "output_index": block.index, **text}
        if block.kind is DeltaKind.CALL:
            return items.ArgumentsEvent(type=f"response.function_call_arguments.{what}", **where)
        event = items.TextEvent(type=f"response.{_TEXT_NAME[block.kind]}.{what}", **where)
        if block.kind is DeltaKind.TEXT:
            event.logprobs = ()
        return event

    def _part(self, what: str, block: Block) -> items.PartEvent:
        return items.PartEvent(
            type=f"response.content_part.{what}",
            item_id=_id(block),
            output_index=block.index,
            part=_content(block),
        )

    def ended(self, result: RequestResult) -> Sequence[Struct]:
        body = self.body(result)
        return [items.ResponseEvent(type=f"response.{body.status}", response=body)]

    # --- whole ------------------------------------------------------------------------------------

    def body(self, result: RequestResult) -> items.ResponseBody:
        """The whole response, stored before the client can continue it."""
        is_cut = result.finish_reason is FinishReason.LENGTH
        body = self._body("incomplete" if is_cut else "completed")
        body.incomplete_details = items.Incomplete() if is_cut else None
        body.output = [self._item(block, "completed") for block in self.blocks]
        if body.output and self.sample.is_cut(result):
            body.output[-1].status = "incomplete"
        body.usage = self._response_usage()
        if self._found.get("store", True):
            self._keep(body)
        return body

    def _body(self, status: str) -> items.ResponseBody:
        request_body, found = self._request_body, self._found
        text = request_body.get("text") or {}
        return items.ResponseBody(
            id=self._envelope["id"],
            created_at=self._envelope["created"],
            status=status,
            instructions=request_body.get("instructions"),
            max_output_tokens=request_body.get("max_output_tokens"),
            metadata=request_body.get("metadata") or {},
            model=self._envelope["model"],
            output=[],
            parallel_tool_calls=found.get("parallel_tool_calls", True),
            previous_response_id=request_body.get("previous_response_id"),
            reasoning={"effort": found.get("reasoning_effort"), "summary": None},
            store=found.get("store", True),
            temperature=found.get("temperature", _DEFAULTS.temperature),
            text=_raw({"format": text.get("format") or {"type": "text"}}),
            tool_choice=_raw(request_body.get("tool_choice") or "auto"),
            tools=_raw(request_body.get("tools") or []),
            top_p=found.get("top_p", _DEFAULTS.top_p),
            user=request_body.get("user"),
        )

    def _item(self, block: Block, status: str) -> items.Item:
        """The block as an item of the output, with its text so far."""
        item = items.Item(id=_id(block), type=_TYPE[block.kind], status=status)
        if block.kind is DeltaKind.CALL:
            item.call_id, item.name, item.arguments = _call_id(block), block.name, block.text
            if (found := self._namespaces.get(block.name)) is not None:
                item.namespace, item.name = found
            return item
        item.content = [_content(block)]
        if block.kind is DeltaKind.TEXT:
            item.role = "assistant"
        else:
            item.summary = ()
        return item

    def _response_usage(self) -> items.ResponseUsage:
        usage, num_reasoning = self._usage(), self.sample.num_reasoning_tokens or 0
        return items.ResponseUsage(
            usage.prompt_tokens,
            items.CachedDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            items.ReasoningDetails(num_reasoning),
            usage.total_tokens,
        )

    def _keep(self, body: items.ResponseBody) -> None:
        messages = [*self._conversation, *map(_message, self.blocks)]
        tenant, data = self._request[CALLER].tenant, json_text(body).encode()
        self.app[RESPONSE_STORE].put(tenant, body.id, messages, data)


def _raw(value: Any) -> Raw:
    return Raw(json.dumps(value).encode())


def _id(block: Block) -> str:
    return _ID_PREFIX[block.kind] + block.id


def _content(block: Block) -> items.ContentPart:
    if block.kind is DeltaKind.TEXT:
        return items.ContentPart(text=block.text, type="output_text", annotations=(), logprobs=())
    return items.ContentPart(text=block.text, type="reasoning_text")


def _call_id(block: Block) -> str:
    return f"call_{block.id[:24]}"


def _message(block: Block) -> Message:
    """The block as a message for the template of the next turn."""
    message: Message = {"role": "assistant", "content": ""}
    if block.kind is DeltaKind.TEXT:
        message["content"] = block.text
    elif block.kind is DeltaKind.REASONING:
        message["reasoning_content"] = block.text
    else:
        function = {"name": block.name, "arguments": call_arguments(block.text)}
        call = {"id": _call_id(block), "type": "function", "function": function}
        message["tool_calls"] = [call]
    return message
