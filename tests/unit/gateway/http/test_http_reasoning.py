"""Separation of reasoning and answer, for any chunking, with templates and grammars."""

from __future__ import annotations

import functools
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import SOON_S
from tokenizers import AddedToken, Tokenizer

from baton.core.errors import InvalidRequest
from baton.gateway.http.chat.chat import BODY
from baton.gateway.http.chat.chat_template import ChatTemplate
from baton.gateway.http.chat.reasoning import (
    FORMATS,
    THINK,
    ReasoningFormat,
    ReasoningGrammar,
    ReasoningParser,
    Start,
    format_of_template,
    template_variables,
)
from baton.gateway.http.chat.tool_formats import HERMES
from baton.gateway.http.chat.tools import TOOLS, ToolChoice, call_grammar, strict_grammar
from baton.gateway.http.generate.request_fields import Body
from baton.gateway.http.generate.structured import constraint_of, lark_of

DEMO = Path(__file__).resolve().parents[4] / "models" / "demo" / "tokenizer.json"
OPEN, UNDECIDED, CLOSED = Start.OPEN, Start.UNDECIDED, Start.CLOSED


def told_apart(start: Start, pieces: list[str], tags: ReasoningFormat = THINK) -> tuple[str, str]:
    parser = ReasoningParser(tags, start)
    parts = [*(parser.feed(piece) for piece in pieces), parser.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


CASES = [
    (OPEN, "why</think>so", ("why", "so")),
    (OPEN, "\nwhy\n\nnot\n</think>\n\nso\n", ("why\n\nnot", "so\n")),
    (OPEN, "<think>\nwhy</think>", ("why", "")),
    (OPEN, "never ends </thin", ("never ends </thin", "")),
    (OPEN, "a < b </ c </thinker> d</think>e</think>f", ("a < b </ c </thinker> d", "e</think>f")),
    (OPEN, "", ("", "")),
    (UNDECIDED, "<think>why</think>so", ("why", "so")),
    (UNDECIDED, "\n <think>\n\n</think>\n\nso", ("", "so")),
    (UNDECIDED, "so <think>it</think> is", ("", "so <think>it</think> is")),
    (UNDECIDED, " <thi", ("", " <thi")),
    (UNDECIDED, "", ("", "")),
    (CLOSED, "\n<think>so</think>", ("", "\n<think>so</think>")),
]


@pytest.mark.parametrize(("start", "text", "wanted"), CASES)
def test_reasoning_is_told_from_text(start: Start, text: str, wanted: tuple[str, str]) -> None:
    assert told_apart(start, [text]) == wanted
    assert told_apart(start, list(text)) == wanted, "letter by letter"


@given(
    st.sampled_from(list(Start)),
    st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "x", "<", "</thi"]), max_size=9),
    st.data(),
)
def test_cuts_do_not_matter(start: Start, words: list[str], data: Any) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert told_apart(start, pieces) == told_apart(start, [text])


@pytest.mark.parametrize(
    ("start", "before", "piece", "behind", "wanted"),
    [
        (UNDECIDED, "", " " * 64, "<think>why", ("why", "")),
        (UNDECIDED, "", " " * 64, "so", ("", " " * 64 * 30_000 + "so")),
        (OPEN, "", "\n" * 64, "why", ("why", "")),
        (OPEN, "why", "\n" * 64, "not", ("why" + "\n" * 64 * 30_000 + "not", "")),
        (OPEN, "why", "\n" * 64, "</think>so", ("why", "so")),
        (OPEN, "why</think>", "\n" * 64, "so", ("why", "so")),
    ],
)
def test_white_space_that_never_ends_is_read_once(
    start: Start, before: str, piece: str, behind: str, wanted: tuple[str, str]
) -> None:
    began_s = time.thread_time()
    assert told_apart(start, [before, *[piece] * 30_000, behind]) == wanted
    assert time.thread_time() - began_s < SOON_S


def test_the_prompts_end_says_where_an_answer_begins() -> None:
    qwen, deepseek = FORMATS["qwen3"], FORMATS["deepseek_r1"]
    assert qwen.start("user: <think>\nassistant\n") is UNDECIDED
    assert qwen.start("assistant\n<think>\n") is OPEN
    assert qwen.start("assistant\n<think>\n\n</think>\n\n") is CLOSED
    assert deepseek.start("assistant\n") is OPEN
    assert deepseek.start("assistant<think></think>") is CLOSED


@pytest.mark.parametrize(
    ("continued", "start"),
    [
        ("It is", CLOSED), ("<think>\nLet me", OPEN), ("<think>", OPEN), ("a</think>", CLOSED),
        ("<think>a</think>b", CLOSED), ("<think>a</think>b<think>c", OPEN), (" ", UNDECIDED),
    ],
)  # fmt: skip
def test_where_an_answer_that_goes_on_is(continued: str, start: Start) -> None:
    assert THINK.start(f"user: <think>\nassistant\n{continued}", continued) is start
    deepseek = FORMATS["deepseek_r1"]
    is_open = start is UNDECIDED
    assert deepseek.start(f"assistant\n{continued}", continued) is (OPEN if is_open else start)


def test_families_are_known_by_their_templates() -> None:
    assert format_of_template("{{ '<think>' }}{{ x.split('</think>') }}") is THINK
    assert format_of_template("[THINK]{{ x }}[/THINK]") is FORMATS["mistral"]
    assert format_of_template("{{ messages }}") is None
    assert format_of_template("<think></think>[THINK][/THINK]") is None, "not certain"
    assert format_of_template("no <think>") is None


# --- request options ------------------------------------------------------------------------------


def template(folder: Path, text: str) -> ChatTemplate:
    (folder / "chat_template.jinja").write_text(text)
    found = ChatTemplate.load(folder)
    assert found is not None
    return found


SWITCH = "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
LEVELS = "{{ reasoning_effort | default('medium') }}{{ range(2) | list }}{{ bos_token }}"


@pytest.mark.parametrize(
    ("text", "body", "variables"),
    [
        (SWITCH, {}, {}),
        (SWITCH, {"enable_thinking": False}, {"enable_thinking": False}),
        (SWITCH, {"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        (SWITCH, {"reasoning_effort": "none"}, {"enable_thinking": False}),
        (SWITCH, {"reasoning_effort": "high"}, {"enable_thinking": True}),
        ("{{ thinking }}", {"enable_thinking": True}, {"thinking": True}),
        (LEVELS, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ("x", {"enable_thinking": True, "reasoning_effort": "high"}, {}),
    ],
)
def test_choices_become_the_templates_variables(
    tmp_path: Path, text: str, body: dict[str, Any], variables: dict[str, Any]
) -> None:
    found = Body(BODY.fields).read_fields(body)
    assert template_variables(found, template(tmp_path, text), THINK) == variables


@pytest.mark.parametrize(
    ("text", "body", "reasoning"),
    [
        ("x", {"enable_thinking": False}, THINK),
        ("x", {"enable_thinking": True}, None),
        ("x", {"reasoning_effort": "high"}, None),
        ("x", {"reasoning_effort": "none"}, THINK),
        (SWITCH, {"chat_template_kwargs": {"documents": []}}, THINK),
        (LEVELS, {"chat_template_kwargs": {"range": 1}}, THINK),
        (LEVELS, {"chat_template_kwargs": {"bos_token": "x"}}, THINK),
        ("{{ messages }}{{ tools }}", {"chat_template_kwargs": {"messages": []}}, THINK),
    ],
)
def test_what_cannot_be_followed_is_refused(
    tmp_path: Path, text: str, body: dict[str, Any], reasoning: ReasoningFormat | None
) -> None:
    with pytest.raises(InvalidRequest) as error:
        template_variables(Body(BODY.fields).read_fields(body), template(tmp_path, text), reasoning)
    (name,) = body
    assert (error.value.code, error.value.param) == ("unsupported_parameter", name)


async def test_variables_reach_the_template_and_forge_no_token(tmp_path: Path) -> None:
    config = {"added_tokens": [{"id": 0, "content": "<|end|>", "special": True}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(config))
    found = template(tmp_path, "<|end|>{{ custom }}{{ more.list[0] }}")
    variables = {"custom": "<|end|>", "more": {"list": [7]}}
    prompt = await found.render([{"role": "user", "content": ""}], (), variables)
    assert (prompt.text, list(prompt.special_at)) == ("<|end|><|end|>7", [(0, 7)])


# --- grammars -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vocabulary() -> Tokenizer:
    found = Tokenizer.from_file(str(DEMO))
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    found.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return found


@functools.cache
def library_of(vocabulary: Tokenizer) -> Any:
    llguidance = pytest.importorskip("llguidance")
    return llguidance.LLTokenizer(vocabulary.to_str(), eos_token=[0])


def follow(vocabulary: Tokenizer, grammar: str, text: str) -> tuple[str, bool]:
    """How much of the text the grammar accepts, and whether it may end there."""
    llguidance = pytest.importorskip("llguidance")
    matcher = llguidance.LLMatcher(library_of(vocabulary), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = vocabulary.encode(text, add_special_tokens=False).ids
    taken = matcher.try_consume_tokens(ids)
    return vocabulary.decode(ids[:taken], skip_special_tokens=False), matcher.is_accepting()


JSON = '{"a": 5}'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
WAYS: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": SCHEMA}, JSON, "b"),
    ({"response_format": {"type": "json_object"}}, '{"x": []}', "[1]"),
    ({"guided_regex": r"a/b|\d+\/c"}, "12/c", "d"),
    ({"guided_choice": ["yes", 'no "é"']}, 'no "é"', "an"),
    ({"guided_grammar": 'start: "{" A "}"\nA: /[}x]/'}, "{x}", "x"),
]


@pytest.mark.parametrize(("body", "good", "bad"), WAYS)
def test_the_mask_begins_behind_the_reasoning(
    vocabulary: Tokenizer, body: dict[str, Any], good: str, bad: str
) -> None:
    fields, name = constraint_of(Body(BODY.fields).read_fields(body))
    ids = vocabulary.token_to_id("<think>"), vocabulary.token_to_id("</think>")
    grammar = ReasoningGrammar(*ids, (0,))
    for start, begin in ((OPEN, ""), (UNDECIDED, "<think>\n"), (UNDECIDED, "<think>")):
        text = grammar.of(start, lark_of(fields, name))
        before = f"{begin}is it 1 or {{ \n so?\n</think>"
        assert follow(vocabulary, text, before) == (before, False)
        for breaks in ("", "\n", "\n\n"):
            whole = before + breaks + good
            assert follow(vocabulary, text, whole) == (whole, True)
        assert follow(vocabulary, text, before + bad)[0] == before
        assert follow(vocabulary, text, begin + "<|endoftext|>")[0] == begin, "it must answer"
    plain = grammar.of(UNDECIDED, lark_of(fields, name))
    assert follow(vocabulary, plain, good) == (good, True)
    assert follow(vocabulary, plain, f"\n{good}")[0] == "", "it would have to reason behind that"


def test_a_budget_ends_reasoning_and_nothing_else(vocabulary: Tokenizer) -> None:
    ids = vocabulary.token_to_id("<think>"), vocabulary.token_to_id("</think>")
    grammar = ReasoningGrammar(*ids, (0,))
    words = " a b c d e f g h"
    begins = ("<think>", "\n<think>", " \n\n <think>", "\t\n" * 99 + "<think>")
    for start, begin in ((OPEN, ""), *((UNDECIDED, begin) for begin in begins)):
        for budget in (0, 3):
            text = grammar.of(start, None, budget)
            assert follow(vocabulary, text, begin + words) == (begin + words[: 2 * budget], False)
            whole = begin + words[: 2 * budget] + "</think>" + words * 9
            assert follow(vocabulary, text, whole) == (whole, True)
    plain = grammar.of(UNDECIDED, None, 3)
    assert follow(vocabulary, plain, words * 9) == (words * 9, True)
    assert follow(vocabulary, plain, "") == ("", True)


def test_strict_tools_bound_each_call_and_no_text(vocabulary: Tokenizer) -> None:
    schema = {"properties": {"zone": {"enum": ["UTC"]}}, "required": ["zone"]}
    function = {"name": "now", "parameters": schema, "strict": True}
    tools = TOOLS.read([{"type": "function", "function": function}], "tools")
    literal = partial(HERMES.literal, token_id=vocabulary.token_to_id)
    calls = call_grammar(tools, ToolChoice(True), HERMES.middle, HERMES.end, literal)
    tag, rest = HERMES.begin_tag()
    tag_id = vocabulary.token_to_id(tag)
    text = strict_grammar(f"<[{tag_id}]>", f"<[^{tag_id},0]>", literal(rest), calls)
    call = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
    for whole in ("hi {", call, f"so {call}\n{call} and {{"):
        assert follow(vocabulary, text, whole) == (whole, True)
    for bad in (call.replace("UTC", "CET"), call.replace("now", "then"), "<tool_call>no"):
        assert not follow(vocabulary, text, bad)[1]
    ids = vocabulary.token_to_id("<think>"), vocabulary.token_to_id("</think>")
    behind = ReasoningGrammar(*ids, (0,)).of(OPEN, lark_of({"grammar": text}, "tools"), 50)
    whole = f"<tool_call>? yes</think>\n\nso {call}"
    assert follow(vocabulary, behind, whole) == (whole, True)
    assert not follow(vocabulary, behind, whole.replace("UTC", "CET"))[1]


@pytest.mark.parametrize("family", FORMATS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_each_familys_reasoning_however_it_is_cut(family: str, data: Any) -> None:
    tags = FORMATS[family]
    words = st.lists(st.sampled_from(["why", " ", "\n", "<", "[", "</", tags.begin[:-1], "é"]))
    inside = data.draw(words.map("".join)).strip("\n")
    behind = data.draw(words.map("".join)).lstrip("\n")
    for start, text in (
        (OPEN, f"{inside}\n{tags.end}\n\n{behind}"),
        (UNDECIDED, f"{tags.begin}\n{inside}{tags.end}{behind}"),
        (OPEN if tags.is_open else UNDECIDED, f"{tags.begin}{inside}\n{tags.end}{behind}"),
    ):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert told_apart(start, pieces, tags) == (inside, behind)
