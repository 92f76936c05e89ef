"""The served model's chat formats; converts a chat request to a prompt and a constraint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from ....core.errors import InvalidRequest
from ....core.ports import Entropy
from ...admission.front_door import FrontDoor
from ...validation.served_model import ModelLimits, ServedModel
from ..generate.structured import SamplingFields, constraint_of, lark_of
from ..protocol.app_state import APP_STATE, CALLER
from .chat_template import ChatPrompt, ChatTemplate, Ending, ending_of
from .reasoning import FORMATS as REASONING_FORMATS
from .reasoning import ReasoningFormat, ReasoningGrammar, Start, template_variables
from .reasoning import format_of_template as reasoning_of_template
from .tool_formats import FORMATS, ToolFormat, format_of_template
from .tools import Tool, ToolChoice, call_grammar, chosen, shown_tools, strict_grammar


@dataclass(frozen=True, slots=True)
class ChatModel:
    """The served model's chat template and formats. `tool_format`, `reasoning` None: it has none.

    `reasoning_grammar` None: there are no reasoning tags, or they are not one token each.
    """

    template: ChatTemplate | None
    tool_format: ToolFormat | None
    entropy: Entropy
    reasoning: ReasoningFormat | None = None
    reasoning_grammar: ReasoningGrammar | None = None

    @classmethod
    def load(cls, model: ServedModel, tool_call_parser: str, reasoning_parser: str) -> ChatModel:
        """`tool_call_parser`, `reasoning_parser`: a name in FORMATS, or auto: by the template;
        `reasoning_parser` may be none."""
        template = ChatTemplate.load(model.model_dir)
        text = "" if template is None else template.text
        tool_format = FORMATS.get(tool_call_parser) or format_of_template(text)
        reasoning = REASONING_FORMATS.get(reasoning_parser)
        if reasoning_parser == "auto":
            reasoning = reasoning_of_template(text)
        grammar = None
        if reasoning is not None:
            begin_id, end_id = map(model.tokenizer.token_id, (reasoning.begin, reasoning.end))
            if begin_id is not None and end_id is not None:
                grammar = ReasoningGrammar(begin_id, end_id, model.eos_token_ids)
        return cls(template, tool_format, Entropy(), reasoning, grammar)


CHAT_MODEL = web.AppKey("chat_model", ChatModel)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A chat as a prompt; `opening`: the end of the prompt, whose text belongs to the answer.

    `grammar` (Lark) constrains the output after the prompt and the reasoning; None: unconstrained.
    `start`: whether the answer begins before, inside or after its reasoning.
    """

    prompt: ChatPrompt
    opening: str
    tool_format: ToolFormat | None
    grammar: str | None = None
    start: Start = Start.CLOSED


async def prepare(request: web.Request, found: Mapping[str, Any]) -> Prepared:
    """Messages, tools and the choice among them as a prompt. Raises InvalidRequest, RateLimited.

    Where no grammar can be used, a forced call of a strict tool is refused, and the prompt only
    begins a forced call of another tool.
    """
    app, caller = request.app, request[CALLER]
    model, door = app[CHAT_MODEL], app[APP_STATE].door
    if caller.tenant:
        door.tenancy.check(caller)
    messages, tools = found["messages"], found.get("tools", [])
    choice, ending = chosen(tools, found.get("tool_choice")), ending_of(found)
    if model.template is None:
        message = "this model has no chat template: use /v1/completions"
        raise InvalidRequest(message, "messages", "unsupported_parameter")
    if choice.is_offered and model.tool_format is None:
        raise InvalidRequest(
            "this model's chat template does not support tools", "tools", "unsupported_parameter"
        )
    variables = template_variables(found, model.template, model.reasoning)
    shown = shown_tools(tools) if choice.is_offered else ()
    prompt = await model.template.render(messages, shown, variables, ending)
    begun = messages[-1]["content"] if ending is Ending.CONTINUED else ""
    start = Start.CLOSED if model.reasoning is None else model.reasoning.start(prompt.text, begun)
    if not choice.is_offered or model.tool_format is None:
        return Prepared(prompt, "", None, start=start)
    calls = _calls_grammar(door, model.tool_format, tools, choice)
    if not choice.is_forced:
        return Prepared(prompt, "", model.tool_format, calls, start)
    is_constrained = calls is not None
    if not is_constrained and any(tool.get("strict") for tool in choice.wanted(tools)):
        reason = door.constraint_refusal or "this model's tool calls are not JSON"
        raise InvalidRequest(
            f"a strict tool cannot be forced: {reason}", "tools", "unsupported_parameter"
        )
    opening = model.tool_format.opening(choice.function, is_constrained=is_constrained)
    if start is not Start.CLOSED and calls is not None and model.reasoning_grammar is not None:
        begin = model.tool_format.literal(opening, door.model.tokenizer.token_id)
        whole = f"start: {begin} call\ncall: %lark {{\n{calls}\n}}"
        return Prepared(prompt, "", model.tool_format, whole, start)
    ended = ""
    if start is Start.OPEN and model.reasoning is not None:
        ended = f"\n{model.reasoning.end}\n\n"
    prompt = model.template.opened(prompt, ended + opening)
    return Prepared(prompt, opening, model.tool_format, calls)


def _calls_grammar(
    door: FrontDoor, one: ToolFormat, tools: Sequence[Tool], choice: ToolChoice
) -> str | None:
    """The grammar of a forced call after its opening; else, if a tool is strict, of an answer with
    any number of calls. None: the output is unconstrained."""
    token_id = door.model.tokenizer.token_id
    if not one.is_json or door.constraint_refusal is not None:
        return None
    literal = partial(one.literal, token_id=token_id)
    calls = call_grammar(tools, choice, one.middle, one.end, literal)
    if choice.is_forced:
        return calls
    tag, rest = one.begin_tag()
    tag_id = token_id(tag) if tag else None
    if tag_id is None or not any(tool.get("strict") for tool in tools):
        return None
    no_tag = ",".join(map(str, sorted({tag_id, *door.model.eos_token_ids})))
    return strict_grammar(f"<[{tag_id}]>", f"<[^{no_tag}]>", literal(rest), calls)


def constraint_behind(
    found: Mapping[str, Any], prepared: Prepared, model: ChatModel, limits: ModelLimits
) -> tuple[SamplingFields, str]:
    """The constraint on the whole output, its reasoning included, and the client's field for it."""
    constraint, constrained_by = constraint_of(found, prepared.grammar)
    if constraint and prepared.tool_format and not prepared.grammar:
        message = "an output of this shape cannot call tools: set tool_choice to none"
        raise InvalidRequest(message, constrained_by, "unsupported_parameter")
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
