"""POST /v1/chat/completions: messages become a prompt by the model's template, text a message."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from ....core.errors import InvalidRequest
from ....core.ports import Entropy, SystemEntropy
from ....core.request.json_fields import BOOLEAN, FieldKind
from ....core.request.request import FinishReason, TokenLogprobs
from ...admission.front_door import RunningCall
from ...request.output_chunk import OutputChunk, RequestResult
from ..generate.request_fields import COMMON, LOGPROBS, MAX_TOKENS, generate_request, read_body
from ..generate.responses import Response, Sample, TokenOf, prompt_logprobs
from ..generate.structured import constraint_of
from ..protocol.answers import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Function,
    TokenLogprob,
    ToolCall,
    TopLogprobs,
    json_text,
)
from ..protocol.app_state import APP_STATE
from ..protocol.event_stream import TextEvent
from .chat_template import ChatPrompt, ChatTemplate
from .messages import MESSAGES
from .tool_formats import (
    FORMATS,
    Content,
    Delta,
    ToolCallParser,
    ToolDelta,
    ToolFormat,
    format_of_template,
)
from .tools import TOOL_CHOICE, TOOLS, call_grammar, chosen, shown_tools

ROUTES = web.RouteTableDef()

REQUIRED = ("model", "messages")
FIELDS: Mapping[str, FieldKind] = {
    **COMMON,
    "messages": MESSAGES,
    "max_tokens": MAX_TOKENS,
    "max_completion_tokens": MAX_TOKENS,
    "logprobs": BOOLEAN,
    "top_logprobs": LOGPROBS,
    "tools": TOOLS,
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": BOOLEAN,
}


@dataclass(frozen=True, slots=True)
class ChatModel:
    """What the served model knows of chats. `tool_format` None: it knows no tools."""

    template: ChatTemplate | None
    tool_format: ToolFormat | None
    entropy: Entropy

    @classmethod
    def load(cls, model_dir: Path, tool_call_parser: str) -> ChatModel:
        """`tool_call_parser`: one of FORMATS, or auto: by the template."""
        template = ChatTemplate.load(model_dir)
        if tool_call_parser in FORMATS:
            return cls(template, FORMATS[tool_call_parser], SystemEntropy())
        tool_format = None if template is None else format_of_template(template.text)
        return cls(template, tool_format, SystemEntropy())


CHAT_MODEL = web.AppKey("chat_model", ChatModel)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A chat as a prompt; `opening` is its end, whose text belongs to the answer.

    `grammar` (Lark's) is of what follows them; None: it is free.
    """

    prompt: ChatPrompt
    opening: str
    tool_format: ToolFormat | None
    grammar: str | None = None


async def prepare(app: web.Application, found: Mapping[str, Any]) -> Prepared:
    """Messages, tools and the choice among them as a prompt. Raises InvalidRequest.

    Where no grammar can be followed, a forced call of a strict tool cannot be had, one of another
    is only begun.
    """
    model, constraint_refusal = app[CHAT_MODEL], app[APP_STATE].door.constraint_refusal
    messages, tools = found["messages"], found.get("tools", [])
    choice = chosen(tools, found.get("tool_choice"))
    if model.template is None:
        raise InvalidRequest(
            "this model has no chat template: use /v1/completions",
            "messages",
            "unsupported_parameter",
        )
    if not choice.is_offered:
        return Prepared(await model.template.render(messages, ()), "", None)
    if model.tool_format is None:
        raise InvalidRequest(
            "this model's chat template knows no tools", "tools", "unsupported_parameter"
        )
    opening, grammar = "", None
    if choice.is_forced:
        is_constrained = constraint_refusal is None
        opening = model.tool_format.opening(choice.function, is_constrained=is_constrained)
        if is_constrained:
            grammar = call_grammar(tools, choice, model.tool_format.arguments_name)
        elif any(tool.get("strict") for tool in choice.wanted(tools)):
            raise InvalidRequest(
                f"a strict tool cannot be forced: {constraint_refusal}",
                "tools",
                "unsupported_parameter",
            )
    prompt = await model.template.render(messages, shown_tools(tools), opening=opening)
    return Prepared(prompt, opening, model.tool_format, grammar)


@ROUTES.post("/v1/chat/completions")
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a chat."""
    found = await read_body(request, FIELDS, REQUIRED)
    _check(found)
    return await _Chat(request, found, await prepare(request.app, found)).run()


def _check(found: Mapping[str, Any]) -> None:
    """What the wire can carry, and this endpoint cannot answer."""
    if "top_logprobs" in found and not found.get("logprobs"):
        raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs", "invalid_value")
    most = found.get("max_completion_tokens")
    if most is not None and found.get("max_tokens", most) != most:
        message = "max_tokens and max_completion_tokens differ: give one"
        raise InvalidRequest(message, "max_tokens", "invalid_value")


class _Chat(Response):
    id_prefix = "chatcmpl-"
    answer_type = ChatCompletion
    chunk_type = ChatCompletionChunk

    def __init__(self, request: web.Request, found: Mapping[str, Any], prepared: Prepared) -> None:
        super().__init__(request, found)
        constraint, constrained_by = constraint_of(found, prepared.grammar)
        if constraint and prepared.tool_format and not prepared.grammar:
            raise InvalidRequest(
                "an output of this shape cannot call tools: set tool_choice to none",
                constrained_by,
                "unsupported_parameter",
            )
        max_tokens_name = "max_tokens"
        if "max_completion_tokens" in found:
            max_tokens_name = "max_completion_tokens"
        sampling: dict[str, Any] = {**constraint, "max_tokens": found.get(max_tokens_name)}
        if found.get("logprobs"):
            sampling["logprobs"] = found.get("top_logprobs", 0)
        self.names = {
            "prompt": "messages",
            "max_tokens": max_tokens_name,
            "logprobs": "top_logprobs",
            "constraint": constrained_by,
        }
        wire = generate_request(
            found,
            sampling,
            request_id=self.label,
            text=prepared.prompt.text,
            add_special_tokens=False,
            # What begins a call may be a special token.
            skip_special_tokens=None if prepared.tool_format is None else False,
        )
        self.prompts = [wire]
        self.special_at = prepared.prompt.special_at
        self._found = found
        self._prepared = prepared
        self._token_of = self.app[APP_STATE].door.model.tokenizer.token
        self._prompt_ids: Sequence[int] = ()

    async def samples(self, calls: Sequence[RunningCall]) -> Sequence[Sample]:
        found, prepared = self._found, self._prepared
        self._prompt_ids = calls[0].request.prompt_token_ids
        if found.get("return_token_ids"):
            self.extra["prompt_token_ids"] = list(self._prompt_ids)
        return [
            ChatSample(
                index,
                found,
                self._token_of,
                self.app[CHAT_MODEL].entropy.new_id,
                parser=None if prepared.tool_format is None else prepared.tool_format.parser(),
                opening=prepared.opening,
            )
            for index in range(self.num_samples)
        ]

    def first_chunk(self, prompt_index: int, chunk: OutputChunk) -> None:
        if "prompt_logprobs" in self._found:
            scores = prompt_logprobs(self._prompt_ids, chunk.prompt_logprobs, self._token_of)
            self.extra["prompt_logprobs"] = scores


class ChatSample(Sample):
    """One sample. `parser` None: all text is content; `opening` is text that the prompt forced."""

    def __init__(
        self,
        index: int,
        found: Mapping[str, Any],
        token_of: TokenOf,
        new_id: Callable[[], str],
        parser: ToolCallParser | None = None,
        opening: str = "",
    ) -> None:
        super().__init__(index, found, token_of)
        self._has_logprobs: bool = found.get("logprobs", False)
        self._max_calls = math.inf if found.get("parallel_tool_calls", True) else 1
        self._new_id = new_id
        self._parser = parser
        self._opening = opening
        self._num_calls = 0
        if parser is None and not (self._has_logprobs or self._returns_ids):
            self.text_event = TextEvent(
                f'{{"index":{index},"delta":{{"content":', '},"logprobs":null,"finish_reason":null}'
            )

    # --- in a stream ------------------------------------------------------------------------------

    def events(self, chunk: OutputChunk) -> list[str]:
        """The role comes first of all."""
        events = []
        if self._is_first:
            self._is_first = False
            role = ChatMessage(role="assistant", content="")
            events.append(json_text(ChatDelta(index=self._index, delta=role)))
        if self.text_event is not None and chunk.result is None:
            return [*events, self.text_event.of(chunk.text)] if chunk.text else events
        deltas = [self._delta(delta) for delta in self._deltas(chunk)]
        has_more = bool(chunk.token_ids) and (self._has_logprobs or self._returns_ids)
        if not deltas and (has_more or chunk.result is not None):
            deltas.append(ChatMessage())
        choices = [ChatDelta(index=self._index, delta=delta) for delta in deltas]
        if choices:
            self._add_tokens(choices[0], chunk)
            self._add_ending(choices[-1], chunk.result)
        return events + [json_text(choice) for choice in choices]

    def _delta(self, delta: Delta) -> ChatMessage:
        if isinstance(delta, Content):
            return ChatMessage(content=delta.text)
        call = ToolCall(Function(delta.arguments), delta.index)
        if delta.name is not None:
            call = self._new_call(delta.name, delta.arguments)
            call.index = delta.index
        return ChatMessage(tool_calls=[call])

    # --- whole ------------------------------------------------------------------------------------

    def choice(self, chunk: OutputChunk) -> ChatChoice:
        """The choice of a whole answer, of all its chunks as one."""
        content = ""
        calls: list[ToolCall] = []
        for delta in self._deltas(chunk):
            if isinstance(delta, Content):
                content += delta.text
            elif delta.name is not None:
                calls.append(self._new_call(delta.name, delta.arguments))
            else:
                calls[-1].function.arguments += delta.arguments
        message = ChatMessage("assistant", content)
        if calls:
            message = ChatMessage("assistant", content or None, calls)
        choice = ChatChoice(index=self._index, message=message)
        self._add_tokens(choice, chunk)
        self._add_ending(choice, chunk.result)
        return choice

    # --- both -------------------------------------------------------------------------------------

    def _deltas(self, chunk: OutputChunk) -> Sequence[Delta]:
        if self._parser is None:
            return [Content(chunk.text)] if chunk.text else []
        opening, self._opening = self._opening, ""
        deltas = self._parser.feed(opening + chunk.text)
        if chunk.result is not None:
            deltas += self._parser.finish()
        kept = [d for d in deltas if isinstance(d, Content) or d.index < self._max_calls]
        self._num_calls += sum(isinstance(d, ToolDelta) and d.name is not None for d in kept)
        return kept

    def _add_tokens(self, choice: ChatDelta | ChatChoice, chunk: OutputChunk) -> None:
        """What goes beside the text."""
        if self._has_logprobs and chunk.token_ids:
            choice.logprobs = chat_logprobs(chunk.token_ids, chunk.logprobs, self._token_of)
        if self._returns_ids and chunk.token_ids:
            choice.token_ids = chunk.token_ids

    def _add_ending(self, choice: ChatDelta | ChatChoice, result: RequestResult | None) -> None:
        if result is not None:
            is_call = self._num_calls and result.finish_reason is FinishReason.STOP
            choice.finish_reason = "tool_calls" if is_call else result.finish_reason.value
            choice.stop_reason = result.matched_stop

    def _new_call(self, name: str, arguments: str) -> ToolCall:
        call_id = f"call_{self._new_id()[:24]}"
        return ToolCall(Function(arguments, name), id=call_id, type="function")


def chat_logprobs(
    token_ids: Sequence[int], scores: Sequence[TokenLogprobs], token_of: TokenOf
) -> ChatLogprobs:
    """/v1/chat/completions: one object a token."""

    def of(token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        token = token_of(token_id)
        return token.text, logprob, list(token.data)

    return ChatLogprobs(
        [
            TopLogprobs(
                *of(token_id, score.logprob), [TokenLogprob(*of(*other)) for other in score.top]
            )
            for token_id, score in zip(token_ids, scores, strict=True)
        ]
    )
