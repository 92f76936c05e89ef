"""POST /v1/chat/completions: messages become a prompt by the model's template, text a message."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from ....core.errors import InvalidRequest
from ....core.ports import Entropy, SystemEntropy
from ....core.request.json_fields import BOOLEAN, FieldKind
from ....core.request.request import FinishReason, TokenLogprobs
from ...admission.front_door import RunningCall
from ...request.output_chunk import OutputChunk, RequestResult
from ...validation.validation import ModelLimits, ServedModel
from ..generate.request_fields import COMMON, LOGPROBS, MAX_TOKENS, generate_request, read_body
from ..generate.responses import Response, Sample, TokenOf, prompt_logprobs
from ..generate.structured import SamplingFields, constraint_of, lark_of
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
from .chat_template import VARIABLES, ChatPrompt, ChatTemplate
from .messages import MESSAGES
from .reasoning import FORMATS as REASONING_FORMATS
from .reasoning import (
    REASONING,
    ReasoningFormat,
    ReasoningGrammar,
    ReasoningParser,
    Start,
    template_variables,
)
from .reasoning import format_of_template as reasoning_of_template
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
    "chat_template_kwargs": VARIABLES,
    **REASONING,
}


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of a sample's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatModel:
    """What the served model knows of chats. `tool_format`, `reasoning` None: it has none.

    `reasoning_grammar` None: its tags take several tokens each.
    """

    template: ChatTemplate | None
    tool_format: ToolFormat | None
    entropy: Entropy
    reasoning: ReasoningFormat | None = None
    reasoning_grammar: ReasoningGrammar | None = None

    @classmethod
    def load(cls, model: ServedModel, tool_call_parser: str, reasoning_parser: str) -> ChatModel:
        """The parsers: one of FORMATS, auto: by the template, or none."""
        template = ChatTemplate.load(model.model_dir)
        text = "" if template is None else template.text
        tool_format = FORMATS.get(tool_call_parser) or format_of_template(text)
        reasoning = REASONING_FORMATS.get(reasoning_parser)
        if reasoning_parser == "auto":
            reasoning = reasoning_of_template(text)
        if reasoning is None:
            return cls(template, tool_format, SystemEntropy())
        begin_id = model.tokenizer.token_id(reasoning.begin)
        end_id = model.tokenizer.token_id(reasoning.end)
        grammar = None
        if begin_id is not None and end_id is not None:
            grammar = ReasoningGrammar(begin_id, end_id, model.eos_token_ids)
        return cls(template, tool_format, SystemEntropy(), reasoning, grammar)


CHAT_MODEL = web.AppKey("chat_model", ChatModel)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A chat as a prompt; `opening` is its end, whose text belongs to the answer.

    `grammar` (Lark's) is of what follows them, behind the reasoning; None: it is free. `start`:
    where in its reasoning the answer begins.
    """

    prompt: ChatPrompt
    opening: str
    tool_format: ToolFormat | None
    grammar: str | None = None
    start: Start = Start.CLOSED


async def prepare(app: web.Application, found: Mapping[str, Any]) -> Prepared:
    """Messages, tools and the choice among them as a prompt. Raises InvalidRequest.

    Where no grammar can be followed, a forced call of a strict tool cannot be had, one of another
    is only begun.
    """
    model, refusal = app[CHAT_MODEL], app[APP_STATE].door.constraint_refusal
    messages, tools = found["messages"], found.get("tools", [])
    choice = chosen(tools, found.get("tool_choice"))
    if model.template is None:
        raise InvalidRequest(
            "this model has no chat template: use /v1/completions",
            "messages",
            "unsupported_parameter",
        )
    if choice.is_offered and model.tool_format is None:
        raise InvalidRequest(
            "this model's chat template knows no tools", "tools", "unsupported_parameter"
        )
    variables = template_variables(found, model.template, model.reasoning)
    shown = shown_tools(tools) if choice.is_offered else ()
    prompt = await model.template.render(messages, shown, variables)
    start = Start.CLOSED if model.reasoning is None else model.reasoning.start(prompt.text)
    if not choice.is_offered or model.tool_format is None:
        return Prepared(prompt, "", None, start=start)
    if not choice.is_forced:
        return Prepared(prompt, "", model.tool_format, start=start)
    if refusal is not None and any(tool.get("strict") for tool in choice.wanted(tools)):
        raise InvalidRequest(
            f"a strict tool cannot be forced: {refusal}", "tools", "unsupported_parameter"
        )
    opening = model.tool_format.opening(choice.function, is_constrained=refusal is None)
    grammar = None
    if refusal is None:
        grammar = call_grammar(tools, choice, model.tool_format.arguments_name)
    ended = ""
    if start is Start.OPEN and model.reasoning is not None:
        if grammar is not None and model.reasoning_grammar is not None:
            grammar = f"start: {_literal(app, opening)} %lark {{\n{grammar}\n}}"
            return Prepared(prompt, "", model.tool_format, grammar, start)
        ended = f"\n{model.reasoning.end}\n\n"
    prompt = model.template.opened(prompt, ended + opening)
    return Prepared(prompt, opening, model.tool_format, grammar)


def _literal(app: web.Application, text: str) -> str:
    """A text in Lark; a grammar knows a tag that is one token by its id alone."""
    tag, found, rest = text.partition(">")
    token_id = app[APP_STATE].door.model.tokenizer.token_id(tag + found)
    if not found or token_id is None:
        return json.dumps(text)
    return f"<[{token_id}]> {json.dumps(rest)}"


def _constraint(
    found: Mapping[str, Any], prepared: Prepared, model: ChatModel, limits: ModelLimits
) -> tuple[SamplingFields, str]:
    """What the whole output must look like, its reasoning included, and the client's field."""
    constraint, constrained_by = constraint_of(found, prepared.grammar)
    if constraint and prepared.tool_format and not prepared.grammar:
        raise InvalidRequest(
            "an output of this shape cannot call tools: set tool_choice to none",
            constrained_by,
            "unsupported_parameter",
        )
    budget = found.get("thinking_token_budget")
    if prepared.start is Start.CLOSED or not (constraint or budget is not None):
        return constraint, constrained_by
    constrained_by = constrained_by if constraint else "thinking_token_budget"
    if model.reasoning_grammar is None:
        raise InvalidRequest(
            f"{constrained_by} needs tags around the reasoning that are one token each, which this "
            "model's are not",
            constrained_by,
            "unsupported_parameter",
        )
    body = lark_of(constraint, constrained_by) if constraint else None
    most = None if budget is None else min(budget, limits.max_model_len)
    return {"grammar": model.reasoning_grammar.of(prepared.start, body, most)}, constrained_by


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
        model, door = self.app[CHAT_MODEL], self.app[APP_STATE].door
        constraint, constrained_by = _constraint(found, prepared, model, door.limits)
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
            # What begins a call, or ends reasoning, may be a special token.
            skip_special_tokens=False if prepared.tool_format or model.reasoning else None,
        )
        self.prompts = [wire]
        self.special_at = prepared.prompt.special_at
        self._found = found
        self._prepared = prepared
        self._token_of = door.model.tokenizer.token
        self._prompt_ids: Sequence[int] = ()

    async def samples(self, calls: Sequence[RunningCall]) -> Sequence[Sample]:
        found, prepared, model = self._found, self._prepared, self.app[CHAT_MODEL]
        self._prompt_ids = calls[0].request.prompt_token_ids
        if found.get("return_token_ids"):
            self.extra["prompt_token_ids"] = list(self._prompt_ids)
        tags = model.reasoning
        return [
            ChatSample(
                index,
                found,
                self._token_of,
                model.entropy.new_id,
                parser=None if prepared.tool_format is None else prepared.tool_format.parser(),
                opening=prepared.opening,
                reasoning=None if tags is None else ReasoningParser(tags, prepared.start),
            )
            for index in range(self.num_samples)
        ]

    def first_chunk(self, prompt_index: int, chunk: OutputChunk) -> None:
        if "prompt_logprobs" in self._found:
            scores = prompt_logprobs(self._prompt_ids, chunk.prompt_logprobs, self._token_of)
            self.extra["prompt_logprobs"] = scores


class ChatSample(Sample):
    """One sample. `parser` None: all text is content; `opening` is text that the prompt forced.

    `reasoning` None: the model does not reason.
    """

    def __init__(
        self,
        index: int,
        found: Mapping[str, Any],
        token_of: TokenOf,
        new_id: Callable[[], str],
        parser: ToolCallParser | None = None,
        opening: str = "",
        reasoning: ReasoningParser | None = None,
    ) -> None:
        super().__init__(index, found, token_of)
        self._has_logprobs: bool = found.get("logprobs", False)
        self._max_calls = math.inf if found.get("parallel_tool_calls", True) else 1
        self._new_id = new_id
        self._parser = parser
        self._opening = opening
        self._num_calls = 0
        self._reasoning = reasoning
        self._is_reasoning = True  # as far as tokens were counted
        self._num_read = 0
        self._tail = ""
        if reasoning is not None:
            self.num_reasoning_tokens = 0
        if parser is None and reasoning is None and not (self._has_logprobs or self._returns_ids):
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
        deltas = [self._delta(delta) for delta in self.deltas(chunk)]
        has_more = bool(chunk.token_ids) and (self._has_logprobs or self._returns_ids)
        if not deltas and (has_more or chunk.result is not None):
            deltas.append(ChatMessage())
        choices = [ChatDelta(index=self._index, delta=delta) for delta in deltas]
        if choices:
            self._add_tokens(choices[0], chunk)
            self._add_ending(choices[-1], chunk.result)
        return events + [json_text(choice) for choice in choices]

    def _delta(self, delta: Delta | Reasoning) -> ChatMessage:
        if isinstance(delta, Content):
            return ChatMessage(content=delta.text)
        if isinstance(delta, Reasoning):
            return ChatMessage(reasoning_content=delta.text)
        call = ToolCall(Function(delta.arguments), delta.index)
        if delta.name is not None:
            call = self._new_call(delta.name, delta.arguments)
            call.index = delta.index
        return ChatMessage(tool_calls=[call])

    # --- whole ------------------------------------------------------------------------------------

    def choice(self, chunk: OutputChunk) -> ChatChoice:
        """The choice of a whole answer, of all its chunks as one."""
        content = reasoning = ""
        calls: list[ToolCall] = []
        for delta in self.deltas(chunk):
            if isinstance(delta, Content):
                content += delta.text
            elif isinstance(delta, Reasoning):
                reasoning += delta.text
            elif delta.name is not None:
                calls.append(self._new_call(delta.name, delta.arguments))
            else:
                calls[-1].function.arguments += delta.arguments
        message = ChatMessage("assistant", content)
        if calls or reasoning:
            message.content = content or None
        if reasoning:
            message.reasoning_content = reasoning
        if calls:
            message.tool_calls = calls
        choice = ChatChoice(index=self._index, message=message)
        self._add_tokens(choice, chunk)
        self._add_ending(choice, chunk.result)
        return choice

    # --- both -------------------------------------------------------------------------------------

    def deltas(self, chunk: OutputChunk) -> Sequence[Delta | Reasoning]:
        """What this chunk, the next one, brings."""
        opening, self._opening = self._opening, ""
        reasoning, text = self._told_apart(chunk)
        before = [Reasoning(reasoning)] if reasoning else []
        if self._parser is None:
            return [*before, Content(text)] if text else before
        deltas = self._parser.feed(opening + text)
        if chunk.result is not None:
            deltas += self._parser.finish()
        kept = [d for d in deltas if isinstance(d, Content) or d.index < self._max_calls]
        self._num_calls += sum(isinstance(d, ToolDelta) and d.name is not None for d in kept)
        return [*before, *kept]

    def _told_apart(self, chunk: OutputChunk) -> tuple[str, str]:
        """Reasoning, and all other text."""
        parser = self._reasoning
        if parser is None or parser.is_over:
            return "", chunk.text
        reasoning, text = parser.feed(chunk.text)
        self._count_reasoning(parser, chunk.token_ids)
        if chunk.result is not None:
            last, rest = parser.finish()
            reasoning, text = reasoning + last, text + rest
        return reasoning, text

    def _count_reasoning(self, parser: ReasoningParser, token_ids: Sequence[int]) -> None:
        """Up to its end tag, which may be several tokens."""
        for token_id in token_ids:
            if not self._is_reasoning:
                break
            self._num_read += 1
            self._tail = (self._tail + self._token_of(token_id).text)[-2 * len(parser.end) :]
            self._is_reasoning = parser.end not in self._tail
        if parser.has_reasoned:
            self.num_reasoning_tokens = self._num_read

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
