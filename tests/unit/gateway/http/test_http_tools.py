"""Tool calls in a model's text: the same deltas however the text was cut into pieces."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.gateway.http.chat.tool_formats import (
    HERMES,
    LLAMA3_JSON,
    Content,
    ToolFormat,
    format_of_template,
)


@dataclass
class Received:
    """Deltas added up."""

    content: str = ""
    calls: list[list[str]] = field(default_factory=list)  # [name, arguments]


def parsed(tool_format: ToolFormat, pieces: list[str]) -> Received:
    parser, found = tool_format.parser(), Received()
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    for delta in deltas + parser.finish():
        if isinstance(delta, Content):
            found.content += delta.text
        elif delta.name is not None:
            assert delta.index == len(found.calls)
            found.calls.append([delta.name, delta.arguments])
        else:
            assert delta.index == len(found.calls) - 1
            found.calls[-1][1] += delta.arguments
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
CASES = [(HERMES, *case) for case in HERMES_CASES] + [(LLAMA3_JSON, *case) for case in LLAMA]


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
    """Wherever the generation was cut."""
    whole = parsed(tool_format, [begun])
    assert whole.calls == [["a", "{}"]]
    for end in range(len(rest)):
        assert parsed(tool_format, [begun + rest[:end]]) == whole


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from([HERMES, LLAMA3_JSON]),
    st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "\n", " ", '{"name": "f", "arguments": {"a": 1}}', "{",
             "}", '"', "x", ";", '{"name": "g", "parameters": {}}', "<|python_tag|>", "<tool", ","]
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
    """Not by the square of it: that would be half a minute, in which nobody else is served."""
    text = hermes("write", {"text": "a" * 1_500_000})
    began_s = time.perf_counter()
    assert len(parsed(HERMES, [text]).calls[0][1]) > 1_500_000
    assert time.perf_counter() - began_s < 8


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
    llama = '{% if tools %}{"name": function name, "parameters": dictionary}{% endif %}'
    assert format_of_template(llama) is LLAMA3_JSON
    assert format_of_template("{{ messages }}") is None
