"""The tags with which model families mark their reasoning, and how text is split at them.

    prompt ...assistant\\n<think>\\n      text  Let me see.\\n</think>\\n\\nIt is 4.      OPEN
    prompt ...assistant\\n                text  <think>\\nLet me see.\\n</think>\\n\\n4   UNDECIDED
    prompt ...<think>\\n\\n</think>\\n\\n   text  It is 4.                             CLOSED
Whether a prompt ends inside reasoning is seen from its end, which only the template writes. Line
breaks next to the tags belong to neither part.

A grammar for the output after the reasoning, and a budget for the reasoning, are grammars over
tokens: they need tags that are one token each.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ....core.errors import InvalidRequest
from ....core.request.json_fields import BOOLEAN, FieldKind, integer, invalid
from .chat_template import ChatTemplate

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_SWITCHES = ("enable_thinking", "thinking")  # template variables that turn it on and off
_EFFORT = "reasoning_effort"


class Start(enum.Enum):
    """Where an answer begins relative to its reasoning."""

    OPEN = "inside its reasoning"
    UNDECIDED = "in front of it, if the model reasons at all"
    CLOSED = "behind it"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A model family's tags. `is_open`: it reasons even if neither prompt nor text has `begin`."""

    begin: str
    end: str
    is_open: bool = False

    def start(self, prompt: str, continued: str = "") -> Start:
        """Where the answer begins; `continued`: text of the answer at the prompt's end."""
        written = prompt.rstrip()
        if written.endswith(self.begin):
            return Start.OPEN
        if written.endswith(self.end):
            return Start.CLOSED
        if continued.strip():
            is_open = continued.rfind(self.begin) > continued.rfind(self.end)
            return Start.OPEN if is_open else Start.CLOSED
        return Start.OPEN if self.is_open else Start.UNDECIDED


THINK = ReasoningFormat("<think>", "</think>")
_MISTRAL = ReasoningFormat("[THINK]", "[/THINK]")
_SEED = ReasoningFormat("<seed:think>", "</seed:think>")
FORMATS: Mapping[str, ReasoningFormat] = {
    **dict.fromkeys(("qwen3", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2"), THINK),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", is_open=True),
    "mistral": _MISTRAL,
    "seed_oss": _SEED,
}


def format_of_template(template: str) -> ReasoningFormat | None:
    """The format whose tags a chat template has; None if it has tags of no or several families."""
    known = (THINK, _MISTRAL, _SEED)
    found = [one for one in known if one.begin in template and one.end in template]
    return found[0] if len(found) == 1 else None


class ReasoningParser:
    """Splits the text of one sample, which comes in pieces, into reasoning and other text."""

    def __init__(self, tags: ReasoningFormat, start: Start) -> None:
        self._tags = tags
        self.end = tags.end
        self._start = start
        self._has_begun = start is Start.CLOSED  # whether it is known how the text begins
        self._is_inside = start is Start.OPEN
        self._is_plain = False  # whether the text began without the tag that reasoning needs
        self._is_blank = True  # whether no reasoning but line breaks was read so far
        self._skips_breaks = False
        self._space: list[str] = []  # white space before the text, until `_has_begun`
        self._num_breaks = 0  # line breaks before `_text`: passed on if reasoning follows
        self._text = ""  # not assigned to a part yet

    @property
    def has_reasoned(self) -> bool:
        """Whether there was any reasoning so far, even if only its tag."""
        return self._start is not Start.CLOSED and self._has_begun and not self._is_plain

    @property
    def is_over(self) -> bool:
        """Whether no reasoning can follow, so that text is passed on as it is."""
        return self._has_begun and not self._is_inside and not self._skips_breaks

    def feed(self, text: str) -> tuple[str, str]:
        """Read text; returns the reasoning and the other text that are certain so far."""
        if self.is_over:
            return "", text
        if not self._has_begun and not self._text:
            begun = text.lstrip()
            self._space.append(text[: len(text) - len(begun)])
            text = begun
        self._text += text
        if not self._has_begun and not self._begin():
            return "", ""
        reasoning = self._read_inside() if self._is_inside else ""
        return reasoning, "" if self._is_inside else self._read_behind()

    def finish(self) -> tuple[str, str]:
        """At the text's end: returns what was held back, which was no tag."""
        text, self._text = "".join((*self._space, self._text)), ""
        if self._is_inside:
            return self._reasoning(text), ""
        return "", "" if self._skips_breaks else text

    def _begin(self) -> bool:
        """Whether it is decided by now if the text begins with the tag."""
        text, tag = self._text, self._tags.begin
        if len(text) < len(tag) and tag.startswith(text):
            return False
        self._text = "".join((*self._space, text))
        if text.startswith(tag):
            self._text = text.removeprefix(tag)
            self._is_inside = True
        self._space.clear()
        self._is_plain = not self._is_inside
        self._has_begun = True
        return True

    def _read_inside(self) -> str:
        if self._is_blank:
            self._text = self._text.lstrip("\n")
        reasoning, found, behind = self._text.partition(self._tags.end)
        if found:
            self._text, self._is_inside, self._skips_breaks = behind, False, True
            return self._reasoning(reasoning)
        num_certain = len(reasoning) - beginning_of(self._tags.end, reasoning)
        self._text = reasoning[num_certain:]
        return self._reasoning(reasoning[:num_certain])

    def _reasoning(self, text: str) -> str:
        """A piece of reasoning, without the line breaks at its end, which are held back."""
        shown = text.rstrip("\n")
        breaks = "\n" * self._num_breaks if shown else ""
        self._num_breaks += len(text) - len(shown) - len(breaks)
        self._is_blank = self._is_blank and not shown
        return breaks + shown

    def _read_behind(self) -> str:
        text, self._text = self._text, ""
        if self._skips_breaks:
            text = text.lstrip("\n")
            self._skips_breaks = not text
        return text


def beginning_of(tag: str, text: str) -> int:
    """How many characters at the text's end may begin the tag."""
    most = min(len(tag) - 1, len(text))
    return next((n for n in range(most, 0, -1) if text.endswith(tag[:n])), 0)


# --- what a request chooses -----------------------------------------------------------------------


def _effort(value: Any, name: str) -> str:
    if value not in _EFFORTS:
        raise invalid(name, f"one of {', '.join(_EFFORTS)}")
    return str(value)


REASONING: Mapping[str, FieldKind] = {
    "enable_thinking": BOOLEAN,
    "reasoning_effort": FieldKind({"enum": list(_EFFORTS)}, _effort),
    "thinking_token_budget": integer(0, 2**32 - 1),
}


def followed(template: ChatTemplate, grammar: ReasoningGrammar | None) -> frozenset[str]:
    """The fields of REASONING that have an effect with this template; a budget needs `grammar`."""
    found = {_EFFORT} & template.reads
    if any(name in template.reads for name in _SWITCHES):
        found |= {"enable_thinking"}
    return frozenset(found | ({"thinking_token_budget"} if grammar else set()))


def template_variables(
    found: Mapping[str, Any], template: ChatTemplate, reasoning: ReasoningFormat | None
) -> dict[str, Any]:
    """The template's variables beside messages and tools.

    Raises InvalidRequest for a choice that neither the template nor the model can follow.
    """
    variables: dict[str, Any] = dict(found.get("chat_template_kwargs", {}))
    template.check_variables(variables, "chat_template_kwargs")
    switch = next((name for name in _SWITCHES if name in template.reads), None)
    effort, wanted = found.get(_EFFORT), found.get("enable_thinking")
    if effort is not None:
        if _EFFORT in template.reads:
            variables.setdefault(_EFFORT, effort)
        elif switch is None and (reasoning is None) != (effort == "none"):
            raise _unsupported(_EFFORT, "the model's chat template has no levels of reasoning")
        if switch is not None:
            variables.setdefault(switch, effort != "none")
    if wanted is not None:
        if switch is not None:
            variables[switch] = wanted
        elif wanted != (reasoning is not None):
            raise _unsupported("enable_thinking", "the model's chat template has no switch for it")
    return variables


def _unsupported(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is not supported here: {why}", name, "unsupported_parameter")


# --- grammars over reasoning ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReasoningGrammar:
    """Makes grammars of whole outputs. The ids are the token ids of the tags and of EOS."""

    begin_id: int
    end_id: int
    eos_ids: Collection[int]

    def of(self, start: Start, body: str | None, budget: int | None = None) -> str:
        """In Lark: reasoning of at most `budget` tokens, then `body`, in Lark too; None: any text.

        `start` must not be CLOSED: then the grammar would be `body` alone.
        """
        inside = self._but(self.end_id) + ("*" if budget is None else f"{{0,{budget}}}")
        if budget == 0:
            inside = ""
        any_text = f"{self._but()}*"
        behind = any_text if body is None else r"/\n{0,2}/ body"
        reasoned = f"{inside} <[{self.end_id}]> {behind}"
        begun = f"<[{self.begin_id}]> {reasoned}"
        if start is Start.OPEN:
            rules = [f"start: {reasoned}"]
        elif body is None:  # white space, which can be any token, may come first
            rules = [f"start: {self._but(self.begin_id)}* ({begun})?"]
        else:
            rules = [f"start: {begun} | body"]
        return "\n".join([*rules, *([] if body is None else [f"body: {body}"])])

    def _but(self, *ids: int) -> str:
        """Any token but these and EOS."""
        return f"<[^{','.join(map(str, sorted({*ids, *self.eos_ids})))}]>"
