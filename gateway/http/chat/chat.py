"""POST /v1/chat/completions: messages become a prompt by the model's template, text a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from ....core.errors import InvalidRequest
from ....core.ports import Entropy, SystemEntropy
from ....proto.v1 import inference_pb2
from ...admission.front_door import RunningCall
from ...request.output_chunk import OutputChunk
from ..generate.json_fields import BOOLEAN, FieldKind
from ..generate.logprobs import prompt_logprobs
from ..generate.request_fields import (
    FRONT,
    GENERATION,
    LOGPROBS,
    MAX_TOKENS,
    SAMPLING,
    fill,
    read_fields,
    require,
)
from ..generate.request_options import label_of, model_of, stream_plan
from ..generate.responses import Choice, answer
from ..generate.run_prompts import PromptsCall
from ..generate.structured import STRUCTURED, fill_constraint
from ..protocol.app_state import APP_STATE
from ..protocol.body import read_object
from .chat_shape import ChatChoice, ChatOptions
from .chat_template import ChatPrompt, ChatTemplate
from .messages import MESSAGES
from .tool_constraints import call_grammar
from .tool_formats import FORMATS, ToolFormat, format_of_template
from .tools import TOOL_CHOICE, TOOLS, Tool, ToolChoice, chosen, shown_tools

ROUTES = web.RouteTableDef()

FIELDS: Mapping[str, FieldKind] = {
    **FRONT,
    **SAMPLING,
    **GENERATION,
    **STRUCTURED,
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
            return cls(template, FORMATS[tool_call_parser](), SystemEntropy())
        tool_format = None if template is None else format_of_template(template.text)
        return cls(template, tool_format, SystemEntropy())


CHAT_MODEL = web.AppKey("chat_model", ChatModel)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A chat as a prompt; `opening` are its last words, which belong to the answer.

    `grammar` (Lark's) is of what follows them; None: it is free.
    """

    prompt: ChatPrompt
    opening: str
    tool_format: ToolFormat | None
    grammar: str | None = None


async def prepare(
    model: ChatModel, found: Mapping[str, Any], constraint_refusal: str | None
) -> Prepared:
    """Messages, tools and the choice among them as a prompt. Raises InvalidRequest.

    `constraint_refusal`: why no grammar can be followed here, or None. A forced call of a strict
    tool then cannot be had, one of another is only begun.
    """
    messages, tools = require(found, "messages"), found.get("tools", [])
    choice = chosen(tools, found.get("tool_choice"))
    if model.template is None:
        raise InvalidRequest(
            "this model has no chat template: use /v1/completions",
            param="messages",
            code="unsupported_parameter",
        )
    if not choice.is_offered:
        return Prepared(await model.template.render(messages, ()), "", None)
    if model.tool_format is None:
        raise InvalidRequest(
            "this model's chat template knows no tools",
            param="tools",
            code="unsupported_parameter",
        )
    opening, grammar = "", None
    if choice.is_forced and constraint_refusal is None:
        opening = model.tool_format.constrained_opening(choice.function)
        grammar = call_grammar(tools, choice, model.tool_format.arguments_name)
    elif choice.is_forced:
        _check_not_strict(tools, choice, constraint_refusal)
        opening = model.tool_format.opening(choice.function)
    prompt = await model.template.render(messages, shown_tools(tools), opening=opening)
    return Prepared(prompt, opening, model.tool_format, grammar)


def _check_not_strict(
    tools: Sequence[Tool], choice: ToolChoice, constraint_refusal: str | None
) -> None:
    if any(t.get("strict") and choice.function in (None, t["function"]["name"]) for t in tools):
        raise InvalidRequest(
            f"a strict tool cannot be forced: {constraint_refusal}",
            param="tools",
            code="unsupported_parameter",
        )


@ROUTES.post("/v1/chat/completions")
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a chat."""
    found = read_fields(await read_object(request), FIELDS)
    model = model_of(found)
    _check(found)
    refusal = request.app[APP_STATE].door.constraint_refusal
    prepared = await prepare(request.app[CHAT_MODEL], found, refusal)
    wire = inference_pb2.GenerateRequest(
        model=model,
        request_id=label_of(request),
        text=prepared.prompt.text,
        add_special_tokens=False,
    )
    if prepared.tool_format is not None:
        wire.skip_special_tokens = False  # what begins a call may be one
    fill(wire, found)
    max_tokens_name = _max_tokens_name(found)
    if max_tokens_name in found:
        wire.sampling.max_tokens = found[max_tokens_name]
    if found.get("logprobs"):
        wire.sampling.logprobs = found.get("top_logprobs", 0)
    if prepared.grammar is not None:
        wire.sampling.grammar = prepared.grammar
    names = {"prompt": "messages", "max_tokens": max_tokens_name, "logprobs": "top_logprobs"}
    names |= fill_constraint(wire, found)
    if wire.sampling.WhichOneof("constraint") and prepared.tool_format and not prepared.grammar:
        raise InvalidRequest(
            "an output of this shape cannot call tools: set tool_choice to none",
            param=names["constraint"],
            code="unsupported_parameter",
        )
    plan = stream_plan(found, [PromptsCall(wire, names, prepared.prompt.special_at)])
    return await answer(request, plan, _Shape(request, found, prepared, plan.num_samples))


def _max_tokens_name(found: Mapping[str, Any]) -> str:
    return "max_completion_tokens" if "max_completion_tokens" in found else "max_tokens"


def _check(found: Mapping[str, Any]) -> None:
    """What the wire can say, and this endpoint cannot answer."""
    if "top_logprobs" in found and not found.get("logprobs"):
        raise InvalidRequest(
            "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value"
        )
    most = found.get("max_completion_tokens")
    if most is not None and found.get("max_tokens", most) != most:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ: give one",
            param="max_tokens",
            code="invalid_value",
        )
    if "prompt_logprobs" in found and found.get("stream"):
        raise InvalidRequest(
            "prompt_logprobs are told in a whole answer, not in a stream",
            param="prompt_logprobs",
            code="unsupported_parameter",
        )


class _Shape:
    """`answers.Shape`."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, request: web.Request, found: Mapping[str, Any], prepared: Prepared, num_samples: int
    ) -> None:
        self._token_of = request.app[APP_STATE].door.model.tokenizer.token
        self._entropy = request.app[CHAT_MODEL].entropy
        self._prepared = prepared
        self._num_samples = num_samples
        self._options = ChatOptions(
            logprobs=found.get("logprobs", False),
            return_token_ids=found.get("return_token_ids", False),
            max_tool_calls=None if found.get("parallel_tool_calls", True) else 1,
        )
        self._tells_prompt_logprobs = "prompt_logprobs" in found
        self._prompt_ids: Sequence[int] = ()
        self._extra: dict[str, Any] = {}

    async def begin(self, generations: Sequence[RunningCall]) -> Sequence[Choice]:
        self._prompt_ids = generations[0].request.prompt_token_ids
        if self._options.return_token_ids:
            self._extra["prompt_token_ids"] = list(self._prompt_ids)
        tool_format, opening = self._prepared.tool_format, self._prepared.opening
        return [
            ChatChoice(
                index,
                self._options,
                self._token_of,
                self._entropy.new_id,
                parser=None if tool_format is None else tool_format.parser(),
                opening=opening,
            )
            for index in range(self._num_samples)
        ]

    def first_chunk(self, prompt_index: int, chunk: OutputChunk) -> None:
        if self._tells_prompt_logprobs:
            self._extra["prompt_logprobs"] = prompt_logprobs(
                self._prompt_ids, chunk.prompt_logprobs, self._token_of
            )

    def extra(self) -> dict[str, Any]:
        return self._extra
