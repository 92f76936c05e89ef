"""A model directory's chat template: messages and tools in, the prompt out.

The prompt is a text and where it has special tokens: the template's own alone, whatever messages
and tools contain (template_marks.py).

The template comes with the model, so it runs in jinja2's immutable sandbox, and what it may cost is
bounded. It has what transformers gives templates: tojson, raise_exception, strftime_now.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ....core.errors import InvalidRequest
from ....core.model_dir import read_json
from ...text.special_tokens import NAMED_TOKENS, Spans, special_texts, token_text
from .messages import Message
from .template_marks import TemplateMarks, compile_marked
from .tools import Tool

log = logging.getLogger(__name__)

_MAX_TEMPLATE_CHARS = 1 << 20
_MAX_PROMPT_CHARS = 8 << 20
_MAX_RENDER_S = 2.0
_NUM_INLINE_MESSAGES = 32  # a longer chat is rendered on a thread
_NUM_INLINE_CHARS = 1 << 16


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """`special_at`: where `text` has special tokens."""

    text: str
    special_at: Spans


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """`text` is its source."""

    text: str
    _template: jinja2.Template
    _marks: TemplateMarks
    _variables: Mapping[str, str]

    @classmethod
    def load(cls, model_dir: Path) -> ChatTemplate | None:
        """None where there is none, or none that can be used: the log has the reason."""
        path = model_dir / "tokenizer_config.json"
        config = read_json(path) if path.is_file() else {}
        text = _source(model_dir, config)
        if text is None:
            return None
        marks = TemplateMarks(special_texts(model_dir))
        try:
            template = compile_marked(_environment(), text, marks)
        except (jinja2.TemplateError, RecursionError) as error:
            log.warning("the chat template of %s cannot be used: %s", model_dir, error)
            return None
        found = {name: token_text(config.get(name)) for name in NAMED_TOKENS}
        variables = {name: marks.mark_specials(token) for name, token in found.items() if token}
        return cls(text, template, marks, variables)

    async def render(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, opening: str = ""
    ) -> ChatPrompt:
        """The prompt, up to where the assistant's text begins, and `opening`, its beginning.

        Raises InvalidRequest.
        """
        num_chars = sum(len(message["content"]) for message in messages)
        if len(messages) <= _NUM_INLINE_MESSAGES and num_chars <= _NUM_INLINE_CHARS:
            return self._render(messages, tools, opening)
        return await asyncio.to_thread(self._render, messages, tools, opening)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Tool], opening: str
    ) -> ChatPrompt:
        deadline_s = time.monotonic() + _MAX_RENDER_S
        pieces, num_chars = [], 0
        try:
            for piece in self._template.generate(
                messages=messages,
                tools=tools or None,
                add_generation_prompt=True,
                **self._variables,
            ):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > _MAX_PROMPT_CHARS or time.monotonic() > deadline_s:
                    raise _refused("makes too much of these messages")
        except _Refused as error:
            reason = self._marks.plain(str(error))[:200]
            raise _refused(f"refuses these messages: {reason}") from error
        except InvalidRequest:
            raise
        except Exception as error:  # whatever a model's template does
            log.info("the chat template failed: %s: %s", type(error).__name__, error)
            raise _refused("cannot take these messages") from error
        text, special_at = self._marks.read("".join((*pieces, self._marks.mark_specials(opening))))
        return ChatPrompt(text, special_at)


def _refused(what: str) -> InvalidRequest:
    return InvalidRequest(f"the model's chat template {what}", "messages", "invalid_value")


def _source(model_dir: Path, config: Mapping[str, Any]) -> str | None:
    """A file of its own comes before tokenizer_config.json; of several, the one for tools."""
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
    """Multiplication is the one operator that makes much of little."""

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
    """`{% generation %}` marks the assistant's text for training; here it only passes them on."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise _Refused(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
