"""Tool calls in a model's text: the deltas are the same for any chunking of the text."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import SOON_S

from baton.gateway.http.chat.tool_call_parsers import DeltaKind
from baton.gateway.http.chat.tool_formats import (
    FORMATS,
    HERMES,
    LLAMA3_JSON,
    ToolFormat,
    format_of_template,
)

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "typed", "parameters": {"type": "object",
     "properties": {"n": {"type": "integer"}, "l": {"type": "array"}, "s": {"type": "string"},
                    "u": {"type": ["string", "null"]}, "b": {"type": "boolean"}}}}},
    {"type": "function", "function": {"name": "bare"}},
]  # fmt: skip


@dataclass
class Received:
    """The sum of the deltas."""

    content: str = ""
    calls: list[list[str]] = field(default_factory=list)  # [name, arguments]


def parsed(tool_format: ToolFormat, pieces: list[str]) -> Received:
    parser, found = tool_format.parser(TOOLS), Received()
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    for delta in deltas + parser.finish():
        if delta.kind is DeltaKind.TEXT:
            found.content += delta.text
        elif delta.name is not None:
            assert delta.call == len(found.calls)
            found.calls.append([delta.name, delta.text])
        else:
            assert delta.call == len(found.calls) - 1
            found.calls[-1][1] += delta.text
    return found


def hermes(name: str, arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


HERMES_CASES = [
    ("just text", "just text", []),
    ("", "", []),
    (" \n", " \n", []),
    ("a < b <tool and </tool_call>", "a < b <tool and </tool_call>", []),
    (hermes("now", {}), "", [["now", "{}"]]),
    ("Let me see. " + hermes("now", {"a": "}{\"\\"}), "Let me see. ",
     [["now", json.dumps({"a": "}{\"\\"})]]),
    (hermes("a", {"x": [1, {"y": 2}]}) + "\n" + hermes("b", {"z": "é"}) + "\n", "",
     [["a", '{"x": [1, {"y": 2}]}'], ["b", '{"z": "\\u00e9"}']]),
    (hermes("a", {}) + "\nand then  text", "and then  text", [["a", "{}"]]),
    ('<tool_call>{"arguments": {"a": 1}, "name": "late"}</tool_call>', "",
     [["late", '{"a": 1}']]),
    ('<tool_call>{"name": "n", "extra": [","], "arguments": {"a": 1} }</tool_call>', "",
     [["n", '{"a": 1}']]),
    ('<tool_call>{"name": "cut", "arguments": {"a": "b', "", [["cut", '{"a": "b']]),
    ('<tool_call>{"nam', '<tool_call>{"nam', []),
    ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
    ('<tool_call>{"name": 5, "arguments": {}}</tool_call>',
     '<tool_call>{"name": 5, "arguments": {}}</tool_call>', []),
    ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    ("<tool_call>{}</tool_call> x", "<tool_call>{}</tool_call> x", []),
    ('<tool_call>{"name": "a", "name": 5}</tool_call>' + hermes("b", {}), "",
     [["a", "{}"], ["b", "{}"]]),
    ('<tool_call>{"name": "a", "name": "b", "arguments": {}}</tool_call>', "", [["a", "{}"]]),
]  # fmt: skip
LLAMA = [
    ("just text", "just text", []),
    (" {", " {", []),
    ("", "", []),
    ('{"name": "now", "parameters": {}}', "", [["now", "{}"]]),
    ('<|python_tag|>{"name": "now", "parameters": {"a": "}"}}', "", [["now", '{"a": "}"}']]),
    ('\n{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"x": 1}}', "",
     [["a", "{}"], ["b", '{"x": 1}']]),
    ('{"name": "a", "parameters": {}} that was it {"name": "b"}', "", [["a", "{}"]]),
    ('{"name": "a", "parameters": {}}<|python_tag|>', "", [["a", "{}"]]),
    ('{"some": "json"}', '{"some": "json"}', []),
    ('{"some": "json"} {"name": "a", "parameters": {}}',
     '{"some": "json"} {"name": "a", "parameters": {}}', []),
    ('text {"name": "a", "parameters": {}}', 'text {"name": "a", "parameters": {}}', []),
]  # fmt: skip
XML = (
    "<tool_call>\n<function=typed>\n<parameter=n>\n5\n</parameter>\n<parameter=s>\n5\n</parameter>\n"
    "<parameter=l>\n[1, {}]\n</parameter>\n<parameter=u>\nnull\n</parameter>\n<parameter=b>\nTrue\n"
    "</parameter>\n</function>\n</tool_call>"
)
XML_ARGUMENTS = '{"n": 5, "s": "5", "l": [1, {}], "u": "null", "b": true}'
OTHERS: list[tuple[str, str, str, Any]] = [
    ("qwen3_coder", "so " + XML + "\n" + XML, "so ", [["typed", XML_ARGUMENTS]] * 2),
    ("qwen3_coder", "<tool_call>\n<function=bare>\n</function>\n</tool_call> x", "x",
     [["bare", "{}"]]),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>\nx\n</function>\n\"\n</parameter>"
     "</function></tool_call>", "", [["f", '{"a": "x\\n</function>\\n\\""}']]),
    ("qwen3_coder", "<tool_call>\n<function=typed>\n<parameter=n>\nmany\n</parameter>\n</function>",
     "", [["typed", '{"n": "many"}']]),
    ("qwen3_coder", "<tool_call><function=f><parameter=a\nx\n</parameter><parameter=b>y</parameter>"
     "</function></tool_call> z", "z", [["f", '{"a": "x", "b": "y"}']]),
    ("qwen3_coder", "<tool_call><function=f><parameter=>x</parameter><parameter=" + "a" * 300 + ">x"
     "</parameter> <parameter=b>y</parameter></function></tool_call>", "", [["f", '{"b": "y"}']]),
    ("qwen3_coder", "<tool_call>\nno</tool_call>", "<tool_call>\nno</tool_call>", []),
    ("qwen3_coder", "<tool_call>\n<function=", "<tool_call>\n<function=", []),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "]"}[TOOL_CALLS]g[ARGS]{}', "",
     [["f", '{"a": "]"}'], ["g", "{}"]]),
    ("mistral", 'so [TOOL_CALLS]f[CALL_ID]1a[ARGS]{"a": {"b": 1}}', "so ",
     [["f", '{"a": {"b": 1}}']]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", '
     '"arguments": {}}]', "", [["f", '{"a": 1}'], ["g", "{}"]]),
    ("mistral", "[1] and [TOOL_", "[1] and [TOOL_", []),
    ("mistral", "[TOOL_CALLS]a b[ARGS]{}", "[TOOL_CALLS]a b[ARGS]{}", []),
    ("deepseek_v3", "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
     '```json\n{"a": "`"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n'
     "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "Hm.",
     [["f", '{"a": "`"}'], ["g", "{}"]]),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
     '{"a": [1]}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
     "<｜tool▁calls▁end｜>", "", [["f", '{"a": [1]}'], ["g", "{}"]]),
    ("deepseek_v31", "a <｜tool", "a <｜tool", []),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
     '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.g.h:1'
     "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>", "",
     [["f", '{"a": 1}'], ["g.h", "{}"]]),
    ("pythonic", '[f(a=1, b="x)\\"", c=[True, None, {"k": -1.5}]), g()]', "",
     [["f", '{"a": 1, "b": "x)\\"", "c": [true, null, {"k": -1.5}]}'], ["g", "{}"]]),
    ("pythonic", "<|python_tag|>[f(a='é', b=true)]", "", [["f", '{"a": "é", "b": true}']]),
    ("pythonic", "[1, 2] are two", "[1, 2] are two", []),
    ("pythonic", "[note] f(a=1)", "[note] f(a=1)", []),
    ("pythonic", "[f(a=open('/etc/passwd'))]", "[f(a=open('/etc/passwd'))]", []),
    ("pythonic", "[f(1)]", "[f(1)]", []),
    ("pythonic", "[f(**x)]", "[f(**x)]", []),
    ("pythonic", "[f(a=1e999)]", "[f(a=1e999)]", []),
    ("pythonic", "text [f(a=1)]", "text [f(a=1)]", []),
]  # fmt: skip
CASES = [(FORMATS[name], *case) for name, *case in OTHERS]
CASES += [(HERMES, *case) for case in HERMES_CASES] + [(LLAMA3_JSON, *case) for case in LLAMA]


@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), CASES)
def test_calls_in_text(tool_format: ToolFormat, text: str, content: str, calls: Any) -> None:
    whole = parsed(tool_format, [text])
    assert (whole.content.strip(), whole.calls) == (content.strip(), calls)
    assert parsed(tool_format, list(text)) == whole, "letter by letter"


@pytest.mark.parametrize(
    ("tool_format", "begun", "rest"),
    [
        (HERMES, "Well. " + hermes("a", {})[:-12], "\n</tool_call>\n<tool_call>"),
        (LLAMA3_JSON, '{"name": "a", "parameters": {}}', " ; <|python_tag|>"),
    ],
)
def test_no_piece_of_a_tag_behind_a_call_is_content(
    tool_format: ToolFormat, begun: str, rest: str
) -> None:
    """Wherever the generation is cut, no part of a tag after a call becomes content."""
    whole = parsed(tool_format, [begun])
    assert whole.calls == [["a", "{}"]]
    for end in range(len(rest)):
        assert parsed(tool_format, [begun + rest[:end]]) == whole


@given(
    st.sampled_from(list(FORMATS.values())),
    st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "\n", " ", '{"name": "f", "arguments": {"a": 1}}', "{",
             "}", '"', "x", ";", '{"name": "g", "parameters": {}}', "<|python_tag|>", "<tool", ",",
             "[TOOL_CALLS]", "f[ARGS]", "[", "]", "<function=f>", "<parameter=a>", "</parameter>",
             "</function>", "f(a=1)", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
             "<｜tool▁calls▁begin｜>", "functions.f:0<|tool_call_argument_begin|>",
             "<|tool_call_begin|>"]
        ),
        max_size=12,
    ),
    st.data(),
)  # fmt: skip
def test_cuts_do_not_matter(tool_format: ToolFormat, words: list[str], data: Any) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(tool_format, pieces) == parsed(tool_format, [text])


def test_a_long_call_takes_time_by_its_length() -> None:
    """Parsing a long call takes linear time; quadratic time would block the event loop for half a
    minute."""
    text = hermes("write", {"text": "a" * 1_500_000})
    began_s = time.perf_counter()
    assert len(parsed(HERMES, [text]).calls[0][1]) > 1_500_000
    assert time.perf_counter() - began_s < 8


def test_many_calls_that_are_none_in_one_piece() -> None:
    """Many malformed calls in one chunk take linear time; copying the rest for each character would
    take half a minute."""
    tag = "<｜tool▁call▁begin｜>"
    began_s = time.thread_time()
    assert parsed(FORMATS["deepseek_v31"], [tag * 32_000]).content == tag * 32_000
    assert time.thread_time() - began_s < SOON_S


@pytest.mark.parametrize(
    ("name", "before", "behind"),
    [
        *((name, "", "x") for name in FORMATS), ("hermes", hermes("f", {}), "x"),
        ("llama3_json", '{"name": "f", "parameters": {}};', '{"name": "g", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS]", '[{"name": "f", "arguments": {}}]'),
        ("mistral", "so [TOOL_CALLS][", '{"name": "f", "arguments": {}}]'),
        ("pythonic", "[", "f()]"), ("qwen3_coder", "<tool_call>", "<function=f></function>"),
        ("qwen3_coder", "<tool_call>", "no"),
        ("qwen3_coder", "<tool_call><function=f>", "</functional></function>"),
    ],
)  # fmt: skip
def test_white_space_that_never_ends_is_read_once(name: str, before: str, behind: str) -> None:
    began_s = time.thread_time()
    found = parsed(FORMATS[name], [before, *[" " * 64] * 30_000, behind])
    assert time.thread_time() - began_s < SOON_S
    few = parsed(FORMATS[name], [before, "  ", behind])
    assert (found.content.split(), found.calls) == (few.content.split(), few.calls)
    assert len(found.content) - len(few.content) == (0 if few.calls else 64 * 30_000 - 2)


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA3_JSON])
def test_openings_are_read_as_the_beginning_of_a_call(tool_format: ToolFormat) -> None:
    assert parsed(
        tool_format, [tool_format.opening("f", is_constrained=False), '"a": 1}', "}"]
    ).calls == [["f", '{"a": 1}']]
    name = "parameters" if tool_format is LLAMA3_JSON else "arguments"
    rest = f'g", "{name}": {{}}}}'
    assert parsed(tool_format, [tool_format.opening(None, is_constrained=False), rest]).calls == [
        ["g", "{}"]
    ]


def test_the_template_tells_the_format() -> None:
    assert format_of_template("... <tool_call> ...") is HERMES
    assert format_of_template("<tool_call>\n<function=x>") is FORMATS["qwen3_coder"]
    for text, name in (
        ("[TOOL_CALLS]", "mistral"), ("<|tool_call_begin|>", "kimi_k2"),
        ("<｜tool▁call▁begin｜>", "deepseek_v31"), ("<｜tool▁call▁begin｜>```json", "deepseek_v3"),
    ):  # fmt: skip
        assert format_of_template(text) is FORMATS[name]
    llama = '{% if tools %}{"name": function name, "parameters": dictionary}{% endif %}'
    assert format_of_template(llama) is LLAMA3_JSON
    assert format_of_template("{{ messages }}") is None


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("mistral", '"a": 1}'),
        ("deepseek_v3", '"a": 1}\n```'),
        ("deepseek_v31", '"a": 1}'),
        ("kimi_k2", '"a": 1}'),
        ("qwen3_coder", "<parameter=a>\n1\n</parameter>\n</function>"),
        ("pythonic", "a=1)]"),
    ],
)
def test_every_formats_opening_begins_a_call(name: str, rest: str) -> None:
    opening = FORMATS[name].opening("f", is_constrained=False)
    (call,) = parsed(FORMATS[name], [opening, *rest]).calls
    assert call[0] == "f"
    assert json.loads(call[1]) == {"a": "1" if name == "qwen3_coder" else 1}


def test_tags_that_are_one_token_are_named_by_it() -> None:
    ids = {"<tool_call>": 7, "[ARGS]": 8}
    assert HERMES.literal('<tool_call>\n{"name": "', ids.get) == '<[7]> "\\n{\\"name\\": \\""'
    assert FORMATS["mistral"].literal("f[ARGS]", ids.get) == '"f" <[8]>'
    assert LLAMA3_JSON.literal("x", ids.get) == '"x"'
    assert HERMES.literal("</tool_call>", ids.get) == '"</tool_call>"'


# --- model output with any arguments, cut at any point --------------------------------------------

_TAGS = (
    "</tool_call>",
    "<tool_call>",
    "```",
    "<｜tool▁call▁end｜>",
    "[/",
    "]",
    "}",
    '"',
    "\\",
    "\n",
)
_STRINGS = st.lists(st.sampled_from([*_TAGS, "a", "é", "{", " "]), max_size=4).map("".join)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | _STRINGS,
    lambda inside: st.lists(inside, max_size=2) | st.dictionaries(_STRINGS, inside, max_size=2),
    max_leaves=5,
)
_ARGUMENTS = st.dictionaries(st.sampled_from(["a", "b", "c"]), _VALUES, max_size=3)
_CALLS_OF = st.lists(
    st.tuples(st.sampled_from(["f", "g.h", "get-it"]), _ARGUMENTS), min_size=1, max_size=3
)
Calls = list[tuple[str, dict[str, Any]]]


def _objects(calls: Calls, key: str) -> list[str]:
    return [json.dumps({"name": name, key: arguments}) for name, arguments in calls]


def _sections(calls: Calls, name: str, begin: str, middle: str, end: str) -> str:
    return "".join(f"{begin}{name % n}{middle}{json.dumps(a)}{end}" for n, a in calls)


WRITTEN: dict[str, Any] = {
    "hermes": lambda calls: "\n".join(
        f"<tool_call>\n{one}\n</tool_call>" for one in _objects(calls, "arguments")
    ),
    "llama3_json": lambda calls: "; ".join(_objects(calls, "parameters")),
    "mistral": lambda calls: _sections(calls, "%s", "[TOOL_CALLS]", "[ARGS]", ""),
    "deepseek_v3": lambda calls: "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>".format(
        _sections(calls, "function<｜tool▁sep｜>%s", "<｜tool▁call▁begin｜>", "\n```json\n",
                  "\n```<｜tool▁call▁end｜>")
    ),
    "deepseek_v31": lambda calls: "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>".format(
        _sections(calls, "%s", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
    ),
    "kimi_k2": lambda calls: "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>".format(
        _sections(calls, "functions.%s:0", "<|tool_call_begin|>",
                  "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    ),
    "older mistral": lambda calls: f"[TOOL_CALLS] [{', '.join(_objects(calls, 'arguments'))}]",
    "pythonic": lambda calls: "[{}]".format(
        ", ".join(
            f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"
            for name, arguments in calls
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=40, deadline=None)
@given(calls=_CALLS_OF, data=st.data())
def test_calls_are_read_however_they_are_cut(name: str, calls: Calls, data: Any) -> None:
    if name == "pythonic":  # its names are identifiers with dots
        calls = [(called.replace("-", "_"), arguments) for called, arguments in calls]
    text = WRITTEN[name](calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = parsed(FORMATS[name.removeprefix("older ")], pieces)
    assert [(called, json.loads(arguments)) for called, arguments in found.calls] == calls
    assert not found.content.strip()


@pytest.mark.parametrize("name", ["hermes", "deepseek_v31", "kimi_k2"])
def test_many_calls_in_one_piece_take_time_by_their_number(name: str) -> None:
    """Parsing many calls takes linear time; quadratic time would block the event loop for 12 to 17
    s."""
    text = WRITTEN[name]([("f", {})] * 50_000)
    began_s = time.thread_time()
    found = parsed(FORMATS[name], [text])
    assert time.thread_time() - began_s < SOON_S
    assert found.calls == [["f", "{}"]] * 50_000 and not found.content.strip()


def test_every_format_is_written() -> None:
    assert set(FORMATS) - set(WRITTEN) == {"qwen3_coder"}  # its values depend on the schema: CASES


_NOW = ["now", '{"zone": "UTC"}']
_BROKEN_FIRST = {
    "qwen3_coder": "Like <tool_call>...</tool_call>:\n<tool_call>\n<function=now>\n"
    "<parameter=zone>\nUTC\n</parameter>\n</function>\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.bad name:0"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_begin|>functions.now:1"
    '<|tool_call_argument_begin|>{"zone": "UTC"}<|tool_call_end|><|tool_calls_section_end|>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>bad name<｜tool▁sep｜>{}"
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>"
    '{"zone": "UTC"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "hermes": "Like <tool_call>...</tool_call>:\n" + hermes("now", {"zone": "UTC"}),
}


@pytest.mark.parametrize("name", _BROKEN_FIRST)
def test_a_call_behind_what_is_none_is_found_however_it_is_cut(name: str) -> None:
    text = _BROKEN_FIRST[name]
    whole = parsed(FORMATS[name], [text])
    assert whole.calls == [_NOW] and whole == parsed(FORMATS[name], [*text])
    assert whole == parsed(FORMATS[name], [text[:40], text[40:45], text[45:]])


@pytest.mark.parametrize("cuts", ["whole", "characters"])
def test_objects_that_are_not_quite_calls(cuts: str) -> None:
    def read(tool_format: ToolFormat, text: str) -> Received:
        return parsed(tool_format, [text] if cuts == "whole" else [*text])

    answer = '{"name": "Alice", "age": 30}'
    assert read(LLAMA3_JSON, answer) == Received(answer, [])
    assert read(LLAMA3_JSON, '{"name": "now", "parameters": {}}').calls == [["now", "{}"]]
    assert read(LLAMA3_JSON, '{"parameters": {"zone": "UTC"}, "name": "now"}').calls == [_NOW]
    assert read(HERMES, '<tool_call>{"name": "now"}</tool_call>').calls == [["now", "{}"]]
    forgotten = '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}</tool_call>'
    assert read(HERMES, forgotten + hermes("now", {"zone": "UTC"})).calls == [_NOW, _NOW]
    unescaped = '{"name": "now", "reason": "he said "hi"", "arguments": {"zone": "UTC"}}'
    assert read(HERMES, f"<tool_call>{unescaped}</tool_call>").calls == [_NOW]
    deep = '<tool_call>{"name": ' + "[" * 1500 + "]" * 1500 + ', "arguments": {}}</tool_call>'
    assert read(HERMES, deep).calls == []
