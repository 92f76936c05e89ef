"""How model families write tool calls: the texts before, within and after a call.

hermes        <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>, any number of them
llama3_json   {"name": "now", "parameters": {}} as the whole answer; several with ; between them
mistral       [TOOL_CALLS]now[ARGS]{}; older: [TOOL_CALLS] [{"name": "now", "arguments": {}}]
deepseek_v3   <calls><call>function<sep>now\n```json\n{}\n```</call></calls>
deepseek_v31  <calls><call>now<sep>{}</call></calls>
kimi_k2       <section><call>functions.now:0<arguments>{}</call></section>
qwen3_coder   <tool_call>\n<function=now>\n<parameter=zone>\nUTC\n</parameter>\n</function>
pythonic      [now(zone="UTC"), f()] as the whole answer
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ...text.special_tokens import any_of
from .call_scanners import CallScanner, TaggedScanner, XmlScanner
from .schema_values import ArgumentValues
from .tool_call_parsers import (
    Llama3Parser,
    MistralParser,
    PythonicParser,
    TagParser,
    ToolCallParser,
)
from .tools import Tool

TokenIdOf = Callable[[str], int | None]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A family's format: `begin` NAME `middle` arguments `end`. `is_json`: the arguments are a JSON
    object; only then can a grammar constrain them.

    `parser`: makes the parser of a sample that is offered these tools.
    """

    begin: str
    middle: str
    end: str
    parser: Callable[[Sequence[Tool]], ToolCallParser]
    tags: Sequence[str] = ()  # that the texts above contain; some are one token
    is_json: bool = True

    def opening(self, function: str | None, *, is_constrained: bool) -> str:
        """The beginning of a call of this function, or of any: the prompt's end if a call is
        forced. If a grammar constrains the output, the opening ends before the arguments."""
        if function is None:
            return self.begin
        named = f"{self.begin}{function}{self.middle}"
        if is_constrained or not self.is_json:
            return named
        return f"{named} {{" if self.middle.endswith(":") else f"{named}{{"

    def begin_tag(self) -> tuple[str, str]:
        """The last tag before a call's name, and the text between them; empty if there is none."""
        found = [match.end() for match in any_of(self.tags).finditer(self.begin)]
        if not self.tags or not found:
            return "", ""
        tag = next(tag for tag in self.tags if self.begin[: found[-1]].endswith(tag))
        return tag, self.begin[found[-1] :]

    def literal(self, text: str, token_id: TokenIdOf) -> str:
        """A text in Lark; a tag that is one token can only be written by its token id."""
        pieces, last = [], 0
        for match in any_of(self.tags).finditer(text) if self.tags else ():
            if (found := token_id(match[0])) is not None:
                pieces += [json.dumps(text[last : match.start()]), f"<[{found}]>"]
                last = match.end()
        return " ".join(one for one in (*pieces, json.dumps(text[last:])) if one != '""') or '""'


def _values(tools: Sequence[Tool]) -> Mapping[str, ArgumentValues]:
    functions = [tool["function"] for tool in tools]
    return {one["name"]: ArgumentValues(one.get("parameters") or {}) for one in functions}


def _tagged(
    begin: str, middle: str, name_in: str, behind: Sequence[str] = (), section: Sequence[str] = ()
) -> Callable[[Sequence[Tool]], ToolCallParser]:
    scanner = partial(TaggedScanner, middle, re.compile(name_in))
    return lambda tools: TagParser(scanner, begin, behind, section)


_HERMES, _HERMES_END = "<tool_call>", "</tool_call>"
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_DEEPSEEK = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEP)
_JSON_BLOCK = "\n```json\n"
_KIMI = tuple(
    f"<|{name}|>"
    for name in (
        *("tool_calls_section_begin", "tool_calls_section_end", "tool_call_begin"),
        *("tool_call_argument_begin", "tool_call_end"),
    )
)
_MISTRAL, _ARGS = "[TOOL_CALLS]", "[ARGS]"
_MISTRAL_SCANNER = partial(TaggedScanner, _ARGS, re.compile(r"([^\[]*)(?:\[CALL_ID\].*)?"))

HERMES = ToolFormat(
    f'{_HERMES}\n{{"name": "',
    '", "arguments":',
    "}",
    lambda tools: TagParser(CallScanner, _HERMES, (_HERMES_END,)),
    (_HERMES, _HERMES_END),
)
LLAMA3_JSON = ToolFormat('{"name": "', '", "parameters":', "}", lambda tools: Llama3Parser())
FORMATS: Mapping[str, ToolFormat] = {
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "mistral": ToolFormat(
        _MISTRAL, _ARGS, "", lambda tools: MistralParser(_MISTRAL_SCANNER, _MISTRAL),
        (_MISTRAL, _ARGS),
    ),
    "deepseek_v3": ToolFormat(
        f"{_CALLS}{_CALL}function{_SEP}", _JSON_BLOCK, f"\n```{_CALL_END}{_CALLS_END}",
        _tagged(
            _CALL, _JSON_BLOCK, f"function{_SEP}(.*)", ("```", _CALL_END), (_CALLS, _CALLS_END)
        ),
        _DEEPSEEK,
    ),
    "deepseek_v31": ToolFormat(
        f"{_CALLS}{_CALL}", _SEP, f"{_CALL_END}{_CALLS_END}",
        _tagged(_CALL, _SEP, "(.*)", (_CALL_END,), (_CALLS, _CALLS_END)),
        _DEEPSEEK,
    ),
    "kimi_k2": ToolFormat(
        f"{_KIMI[0]}{_KIMI[2]}functions.", f":0{_KIMI[3]}", f"{_KIMI[4]}{_KIMI[1]}",
        _tagged(_KIMI[2], _KIMI[3], r"(?:functions\.)?(.*?)(?::\d+)?", (_KIMI[4],), _KIMI[:2]),
        _KIMI,
    ),
    "qwen3_coder": ToolFormat(
        f"{_HERMES}\n<function=", ">\n", "",
        lambda tools: TagParser(partial(XmlScanner, _values(tools)), _HERMES, (_HERMES_END,)),
        is_json=False,
    ),
    "pythonic": ToolFormat("[", "(", "", lambda tools: PythonicParser(), is_json=False),
}  # fmt: skip


def format_of_template(template: str) -> ToolFormat | None:
    """The format that a chat template uses for calls; None if it has no tools."""
    if _HERMES in template:
        return FORMATS["qwen3_coder"] if "<function=" in template else HERMES
    if _CALL in template:
        return FORMATS["deepseek_v3" if "```json" in template else "deepseek_v31"]
    for tag, name in ((_KIMI[2], "kimi_k2"), (_MISTRAL, "mistral")):
        if tag in template:
            return FORMATS[name]
    if '"parameters"' in template and "tools" in template:
        return LLAMA3_JSON
    return None
