"""A model directory's chat template: renders messages and tools to a prompt.

A prompt is a text and the spans of its special tokens: only those that the template itself writes,
whatever messages and tools contain.
The template comes with the model, so it runs in jinja2's immutable sandbox, with limits on its time
and output. It has transformers' functions for templates: tojson, raise_exception, strftime_now.
"""

from __future__ import annotations

import asyncio
import datetime
import enum
import json
import logging
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ....core.errors import InvalidRequest
from ....core.model_dir import read_json
from ....core.request.json_fields import BOOLEAN, FieldKind, invalid
from ...text.special_tokens import NAMED_TOKENS, Spans, any_of, special_texts, token_text
from .messages import Message
from .tools import Tool

log = logging.getLogger(__name__)

_MAX_TEMPLATE_CHARS = 1 << 20
_MAX_PROMPT_CHARS = 8 << 20
_MAX_RENDER_S = 2.0
_NUM_INLINE_MESSAGES = 32  # a longer chat is rendered on a thread
_NUM_INLINE_CHARS = 1 << 16
_MAX_VARIABLES_CHARS = 16 << 10
_MAX_SHOWN = 16  # names in an error message
_GIVEN = frozenset({"messages", "tools", "add_generation_prompt", *NAMED_TOKENS})


def _variables(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(name, "an object")
    try:
        is_short = len(json.dumps(value, ensure_ascii=False)) <= _MAX_VARIABLES_CHARS
    except RecursionError:
        is_short = False
    if not is_short:
        raise invalid(name, f"an object of at most {_MAX_VARIABLES_CHARS} characters")
    return value


VARIABLES = FieldKind({"type": "object"}, _variables)  # chat_template_kwargs
ENDINGS: Mapping[str, FieldKind] = {
    "add_generation_prompt": BOOLEAN,
    "continue_final_message": BOOLEAN,
}


class Ending(enum.Enum):
    """Where a prompt ends."""

    BEGUN = "where the assistant's text begins"
    MESSAGES = "behind the last message"
    CONTINUED = "within the last message, the assistant's: its text goes on"


def ending_of(found: Mapping[str, Any]) -> Ending:
    """The ending that a chat request's ENDINGS and messages choose. Raises InvalidRequest."""
    begins, continues = map(found.get, ENDINGS)
    if not continues:
        return Ending.MESSAGES if begins is False else Ending.BEGUN
    last, reason = found["messages"][-1], None
    if begins:
        reason = "add_generation_prompt begins another message: set one of the two"
    elif last["role"] != "assistant" or last.get("tool_calls"):
        reason = "the last message is not a text of the assistant"
    if reason is not None:
        name = "continue_final_message"
        raise InvalidRequest(f"{name}: {reason}", name, "invalid_value")
    return Ending.CONTINUED


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered prompt. `special_at`: the spans of the special tokens in `text`."""

    text: str
    special_at: Spans


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A compiled template. `text`: its source; `reads`: the variables that a request may set."""

    text: str
    reads: frozenset[str]
    _template: jinja2.Template
    _marks: TemplateMarks
    _variables: Mapping[str, str]

    @classmethod
    def load(cls, model_dir: Path) -> ChatTemplate | None:
        """The model's template; None if there is none or it cannot be used, which is logged."""
        path = model_dir / "tokenizer_config.json"
        config = read_json(path) if path.is_file() else {}
        text = _source(model_dir, config)
        if text is None:
            return None
        marks = TemplateMarks(special_texts(model_dir))
        environment = _environment()
        try:
            reads = meta.find_undeclared_variables(environment.parse(text))
            template = compile_marked(environment, text, marks)
        except (jinja2.TemplateError, RecursionError) as error:
            log.warning("the chat template of %s cannot be used: %s", model_dir, error)
            return None
        found = {name: token_text(config.get(name)) for name in NAMED_TOKENS}
        variables = {name: marks.mark_specials(token) for name, token in found.items() if token}
        settable = frozenset(reads - _GIVEN - environment.globals.keys())
        return cls(text, settable, template, marks, variables)

    def check_variables(self, names: Collection[str], param: str) -> None:
        """Raises InvalidRequest for a variable that this template does not read."""
        for name in names:
            if name not in self.reads:
                known = ", ".join(sorted(self.reads)[:_MAX_SHOWN]) or "none"
                raise InvalidRequest(
                    f"{param}: the model's chat template reads no variable {name[:64]!r}; those "
                    f"that it reads: {known}",
                    param,
                    "unsupported_parameter",
                )

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        variables: Mapping[str, Any] = MappingProxyType({}),
        ending: Ending = Ending.BEGUN,
    ) -> ChatPrompt:
        """Render the prompt. `variables`: set by the request. Raises InvalidRequest."""
        num_chars = sum(len(message["content"]) for message in messages)
        has_more = any(m.get("reasoning_content") or m.get("tool_calls") for m in messages)
        is_short = len(messages) <= _NUM_INLINE_MESSAGES and num_chars <= _NUM_INLINE_CHARS
        if is_short and not has_more:
            return self._render(messages, tools, variables, ending)
        return await asyncio.to_thread(self._render, messages, tools, variables, ending)

    def opened(self, prompt: ChatPrompt, opening: str) -> ChatPrompt:
        """The prompt followed by `opening`, the answer's beginning, with its special tokens."""
        text, special_at = self._marks.read(self._marks.mark_specials(opening))
        num_chars = len(prompt.text)
        moved = [(start + num_chars, end + num_chars) for start, end in special_at]
        return ChatPrompt(prompt.text + text, [*prompt.special_at, *moved])

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        variables: Mapping[str, Any],
        ending: Ending,
    ) -> ChatPrompt:
        given: dict[str, Any] = {"messages": messages, "tools": tools or None, **variables}
        if ending is Ending.CONTINUED:
            *others, last = messages
            given["messages"] = [*others, last | {"content": f"{last['content']}{_TEXT_END} "}]
        text = self._rendered(given | {"add_generation_prompt": ending is Ending.BEGUN})
        if ending is Ending.CONTINUED:
            text = _up_to_end(text, messages[-1]["content"])
        return ChatPrompt(*self._marks.read(text))

    def _rendered(self, given: Mapping[str, Any]) -> str:
        """What the template makes of these variables, with its marks. Raises InvalidRequest."""
        deadline_s = time.monotonic() + _MAX_RENDER_S
        pieces, num_chars = [], 0
        try:
            for piece in self._template.generate(**self._variables, **given):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > _MAX_PROMPT_CHARS or time.monotonic() > deadline_s:
                    raise _refused("makes too much of these messages")
        except _Refused as error:
            reason = self._marks.plain(str(error))[:200]
            raise _refused(f"refuses these messages: {reason}") from error
        except InvalidRequest:
            raise
        except Exception as error:  # a model's template can raise anything
            log.info("the chat template failed: %s: %s", type(error).__name__, error)
            raise _refused("cannot take these messages") from error
        return "".join(pieces)


def _up_to_end(rendered: str, content: str) -> str:
    """The prompt up to the marked end of `content`, the last message's text. As in transformers,
    without the white space at its end if the template trims it. Raises InvalidRequest."""
    text, found, behind = rendered.rpartition(_TEXT_END)
    if not found or content.strip() not in text:
        raise _refused("shows the last message otherwise: it cannot be continued")
    text = re.sub(f"{_TEXT_END} ?", "", text)  # a message may be shown twice
    return text if behind.startswith(" ") else text.rstrip()


def _refused(what: str) -> InvalidRequest:
    return InvalidRequest(f"the model's chat template {what}", "messages", "invalid_value")


def _source(model_dir: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json; of several templates, the one for tools."""
    path = model_dir / "chat_template.jinja"
    found: Any = config.get("chat_template")
    if path.is_file():
        found = path.read_text(encoding="utf-8")
    if isinstance(found, list):
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("tool_use") or named.get("default")
    if found is None:
        return None
    if not isinstance(found, str) or len(found) > _MAX_TEMPLATE_CHARS:
        log.warning("the chat template of %s is no text of sensible length", model_dir)
        return None
    return found


class _Refused(jinja2.TemplateError):
    """The template itself called raise_exception."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Bounds multiplication, the one operator whose result can be far larger than its operands."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "**" or not all(isinstance(side, int | float) for side in (left, right)):
            sizes = [len(side) if hasattr(side, "__len__") else side for side in (left, right)]
            if operator == "**" or sizes[0] * sizes[1] > _MAX_PROMPT_CHARS:
                raise SecurityError("the template multiplies too much")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here its content is rendered."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # jinja's escapes HTML
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _raise(message: str) -> NoReturn:
    raise _Refused(message)


ROLES = ("system", "user", "assistant", "tool")

_FIRST, _LAST = 0xD800, 0xDFFE
_TEXT_END = chr(_LAST + 1)  # marks the end of a continued message's text
_MARKED = re.compile(f"[{chr(_FIRST)}-{_TEXT_END}]+")


class TemplateMarks:
    """Tells the template's own special tokens in a rendered chat from the same texts of users.

        template   <|im_start|>{{ role }}\\n{{ content }}<|im_end|>
        marked     ␟␟␟␟␟␟␟␟␟␟␟␟{{ role }}\\n{{ content }}␟␟␟␟␟␟␟␟␟␟     when the template is loaded
        rendered   ␟␟␟␟␟␟␟␟␟␟␟␟user\\nforged <|im_start|>␟␟␟␟␟␟␟␟␟␟
        read       the text in its original letters, and the spans of its special tokens
    The letters of special tokens in the template's strings are replaced by marks: lone halves of
    surrogate pairs, which no request can contain. One mark replaces one letter, so lengths and
    slices are unchanged, and a token has the same marks everywhere in the template: with messages
    without a special token's text, the template does exactly what it would do unmarked.

    Some templates compose a token around a role (`'<|' + role + '|>'`): then the pieces are marked,
    and one of ROLES between them makes the token.
    """

    def __init__(self, specials: Collection[str]) -> None:
        letters = sorted(set().union(*specials))
        if len(letters) > _LAST - _FIRST + 1:
            raise ValueError("special tokens have too many letters")
        self._marks = {ord(c): _FIRST + i for i, c in enumerate(letters)}
        self._letters = {mark: chr(letter) for letter, mark in self._marks.items()}
        self._letters[ord(_TEXT_END)] = ""
        self._special = any_of(list(specials))
        around = set(_around_roles(specials))
        self._before = any_of([f"{before}\0" for before, _, _ in around])
        self._after = any_of([f"\0{after}" for _, _, after in around])
        self._own = any_of(
            [self.mark(special) for special in specials]
            + [f"{self.mark(before)}{role}{self.mark(after)}" for before, role, after in around]
        )

    def mark(self, text: str) -> str:
        """The text with its letters replaced by marks."""
        return text.translate(self._marks)

    def mark_specials(self, text: str) -> str:
        """The text with only its special tokens marked."""
        return self._special.sub(lambda match: self.mark(match[0]), text)

    def mark_template(self, template: nodes.Template) -> None:
        """Mark the strings of a parsed template, in place."""
        for parent, node, field in list(_texts(template)):
            text = getattr(node, field)
            if isinstance(parent, nodes.Output | nodes.Add | nodes.Concat):
                text = self._mark_pieces(text)
            setattr(node, field, self.mark_specials(text))

    def _mark_pieces(self, text: str) -> str:
        """Mark a token's part before a role at the text's end, and after a role at its start."""
        framed = f"\0{text}\0"
        framed = self._before.sub(lambda match: self.mark(match[0]), framed)
        framed = self._after.sub(lambda match: self.mark(match[0]), framed)
        return framed.removeprefix("\0").removesuffix("\0")

    def read(self, rendered: str) -> tuple[str, Spans]:
        """The text in its original letters, and the spans of its special tokens."""
        spans = [match.span() for match in self._own.finditer(rendered)]
        pieces: list[str] = []
        last = 0
        for start, end in spans:
            pieces += (rendered[last:start], self.plain(rendered[start:end]))
            last = end
        text = "".join((*pieces, rendered[last:]))
        try:
            text.encode()  # much faster than a search for marks
        except UnicodeEncodeError:  # a template split a token, or its pieces had no role between
            text = self.plain(text)
        return text, spans

    def plain(self, rendered: str) -> str:
        """The text with its marks replaced by the original letters."""
        return _MARKED.sub(lambda match: match[0].translate(self._letters), rendered)


def _around_roles(specials: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """For special tokens that contain a role: the text before it, the role, and the text after."""
    for special in specials:
        for role in ROLES:
            before, found, after = special.partition(role)
            if found and before and after:
                yield before, role, after


def _texts(node: nodes.Node) -> Iterator[tuple[nodes.Node, nodes.Node, str]]:
    """All strings below a node: the parent node, the string's own node, and its field there."""
    for child in node.iter_child_nodes():
        field = "data" if isinstance(child, nodes.TemplateData) else "value"
        is_leaf = isinstance(child, nodes.TemplateData | nodes.Const)
        if is_leaf and isinstance(getattr(child, field), str):
            yield node, child, field
        yield from _texts(child)


def compile_marked(
    environment: jinja2.Environment, source: str, marks: TemplateMarks
) -> jinja2.Template:
    """A template whose own special tokens are marked; raises jinja2.TemplateError."""
    parsed = environment.parse(source)
    marks.mark_template(parsed)
    code = environment.compile(parsed)
    return environment.template_class.from_code(environment, code, environment.make_globals(None))
