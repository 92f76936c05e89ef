"""Constraints become grammars, or refusals with a reason; the cache of grammars is bounded."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.gateway.byte_model import EOS_ID, VOCAB_SIZE, write_byte_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from baton.constraints.grammars import MAX_SOURCE_BYTES, Grammars, accept
from baton.core.errors import InvalidRequest
from baton.core.request.constraint import Constraint, ConstraintKind

SCHEMA, REGEX = ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX
GRAMMAR, CHOICE = ConstraintKind.GRAMMAR, ConstraintKind.CHOICE


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def grammars(model_dir: Path) -> Grammars:
    return Grammars(model_dir, VOCAB_SIZE, [EOS_ID])


def matches(grammars: Grammars, constraint: Constraint, text: str) -> bool:
    """Whether the constraint allows the text followed by EOS; each byte is a token."""
    matcher = grammars.compile(constraint).follow()
    try:
        accept(matcher, [*text.encode(), EOS_ID])
    except InvalidRequest:
        return False
    return True


def nested(depth: int) -> str:
    return '{"properties": {"a": ' * depth + "{}" + "}}" * depth


def loop(length: int) -> str:
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{(i + 1) % length}"} for i in range(length)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": definitions})


BAD: list[tuple[str, Constraint, str]] = [
    ("nested 1,000 deep", Constraint(SCHEMA, nested(1000)), "recursion"),
    ("5 MB", Constraint(SCHEMA, json.dumps({"enum": ["x" * (5 << 20)]})), "at most 65536"),
    ("refers to itself", Constraint(SCHEMA, '{"$ref": "#"}'), ""),
    ("refers in a circle", Constraint(SCHEMA, loop(3)), ""),
    ("refers elsewhere", Constraint(SCHEMA, '{"$ref": "http://127.0.0.1:1/s.json"}'), "127.0.0.1"),
    ("refers to a file", Constraint(SCHEMA, '{"$ref": "file:///etc/passwd"}'), "etc/passwd"),
    ("refers to nothing", Constraint(SCHEMA, '{"$ref": "#/$defs/x"}'), "does not exist"),
    ("no JSON", Constraint(SCHEMA, '{"type":'), ""),
    ("no schema", Constraint(SCHEMA, "3"), ""),
    ("unknown type", Constraint(SCHEMA, '{"type": "wat"}'), "wat"),
    ("nothing by its name", Constraint(SCHEMA, "false"), "false"),
    ("nothing matches", Constraint(SCHEMA, '{"enum": []}'), "Unsatisfiable"),
    ("no value", Constraint(SCHEMA, '{"type": "integer", "minimum": 5, "maximum": 3}'), "minimum"),
    ("unknown keyword", Constraint(SCHEMA, '{"not": {"type": "string"}}'), "not"),
    ("too large a product", Constraint(SCHEMA, json.dumps({
        "allOf": [{"properties": {f"p{i}": {"type": "string"}}} for i in range(1000)]
    })), "too large"),
    ("a divisor", Constraint(SCHEMA, '{"type": "integer", "multipleOf": 9999991}'), "9999991"),
    ("one with a point", Constraint(SCHEMA, '{"type": "integer", "multipleOf": 0.999983}'), "0.99"),
    ("2 to the 24th", Constraint(SCHEMA, '{"type": "integer", "multipleOf": 16777216}'), "1677"),
    ("two that are merged", Constraint(SCHEMA, json.dumps({
        "allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]
    })), "9973, 9967"),
    ("one in many ranges", Constraint(SCHEMA, json.dumps({
        "$defs": {"n": {"type": "integer", "multipleOf": 9973}},
        "properties": {f"p{i}": {"$ref": "#/$defs/n", "minimum": i} for i in range(1000)},
    })), "9973"),
    ("many large ones", Constraint(SCHEMA, json.dumps({
        "properties": {f"p{i}": {"type": "integer", "multipleOf": 9000 + i} for i in range(1000)},
    })), "multipleOf 9"),
    ("of what seems data", Constraint(SCHEMA, json.dumps({
        "$ref": "#/default", "default": {"type": "integer", "multipleOf": 9999991}
    })), "9999991"),
    ("in a grammar", Constraint(
        GRAMMAR, 'start: "%json {" a\na: %json\n{"title": "%json", "type": "integer", '
        '"multipleOf": 9999991, "maximum": 1e9}'
    ), "9999991"),
    ("bad pattern", Constraint(SCHEMA, '{"type": "string", "pattern": "("}'), "regex"),
    ("open bracket", Constraint(REGEX, "a("), "unclosed"),
    ("look-ahead", Constraint(REGEX, "(?=a)b"), "look-around"),
    ("back-reference", Constraint(REGEX, r"(a)\1"), ""),
    ("no rule", Constraint(GRAMMAR, 'start: "a" nope'), "nope"),
    ("no start", Constraint(GRAMMAR, 'rule: "a"'), "start"),
    ("endless", Constraint(GRAMMAR, "start: start"), ""),
    ("a file", Constraint(GRAMMAR, "%import .secrets.KEY\nstart: KEY"), ""),
    ("left out", Constraint(GRAMMAR, 'start: %json {"$ref": "http://x/y"}'), "registry"),
]  # fmt: skip


@pytest.mark.parametrize(("constraint", "why"), [row[1:] for row in BAD], ids=[r[0] for r in BAD])
@pytest.mark.timeout(10)
def test_what_cannot_be_followed_is_refused(
    grammars: Grammars, constraint: Constraint, why: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammars.compile(constraint)
    assert (refused.value.code, refused.value.param) == ("invalid_schema", "constraint")
    assert why in refused.value.message and len(refused.value.message) < 300
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 1_000_000}, {"type": "integer", "multipleOf": 86400},
        {"type": "number", "multipleOf": 0.01}, {"type": "number", "multipleOf": 1e-9},
        {"type": "object", "required": ["a", "b"], "properties": {
            "a": {"type": "number", "multipleOf": 0.001, "minimum": 0, "maximum": 1},
            "b": {"type": "integer", "multipleOf": 3600, "minimum": 0},
            "c": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        }},
        {"properties": {"multipleOf": {"type": "integer"}}},
    ],
)  # fmt: skip
def test_divisors_of_every_day_are_taken(grammars: Grammars, schema: dict[str, Any]) -> None:
    constraint = Constraint(SCHEMA, json.dumps(schema))
    assert grammars.compile(constraint).follow().compute_bitmask()


BOMBS = [
    r"(a+)+b", r"(a{1,1000}){1,1000}", r"((((a{1,100}){1,100}){1,100}){1,100})", r"(x+x+)+y",
    r".{0,5000}z.{0,5000}", r"[ab]*a[ab]{30}", r"(.*a){50}.{50}", r"(\w+\s?)*$",
]  # fmt: skip


@pytest.mark.parametrize("pattern", BOMBS)
@pytest.mark.timeout(10)
def test_a_regex_cannot_hold_a_step_up(grammars: Grammars, pattern: str) -> None:
    """A regex is compiled and followed, or refused, within 10 s, 1,000 times what it may take."""
    matcher = None
    try:
        matcher = grammars.compile(Constraint(REGEX, pattern)).follow()
        accept(matcher, b"ab" * 100)
        matcher.compute_bitmask()
    except InvalidRequest as error:
        assert error.code == "invalid_schema"


DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
AMBIGUOUS = 'start: e\ne: e "+" e | e "*" e | "(" e ")" | /[0-9]+/'
WIDE = json.dumps({
    "type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(450)},
})  # fmt: skip


@pytest.mark.parametrize(
    ("constraint", "text", "follows"),
    [
        (Constraint(GRAMMAR, 'start: s\ns: s s | "a" |'), "a" * 400, False),
        (Constraint(GRAMMAR, AMBIGUOUS), "1+" * 200, True),
        (Constraint(SCHEMA, WIDE), '{"p1": 1, "p449": 2, ', True),
    ],
)
def test_what_is_too_ambiguous_for_a_step_is_given_up(
    constraint: Constraint, text: str, follows: bool
) -> None:
    vocab_size = json.loads((DEMO / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    matcher = Grammars(DEMO, vocab_size, [0]).compile(constraint).follow()
    for token_id in tokenizer.encode(text, add_special_tokens=False).ids:
        matcher.compute_bitmask()
        if matcher.is_error():
            break
        accept(matcher, [token_id])
    assert matcher.is_error() != follows


MATCHES: list[tuple[Constraint, list[str], list[str]]] = [
    (
        Constraint(SCHEMA, '{"type": "object"}'),
        ["{}", '{"a": 1}', '{"a":1}', '{\n  "a": [1, 2]\n}', '{ "é": "日本" }'],
        ["[]", " {}", "{}\n", '{"a": 1', "{  }", '{\n\n"a": 1}'],
    ),
    (
        Constraint(SCHEMA, json.dumps({
            "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
            "additionalProperties": False,
        })),
        ['{"n": 7}', '{"n": -12}'],
        ["{}", '{"n": 1.5}', '{"n": 1, "m": 2}', '{"n": "1"}'],
    ),
    (
        Constraint(SCHEMA, json.dumps({"oneOf": [{"const": "a"}, {"type": "integer"}]})),
        ['"a"', "12"],
        ['"b"', "null"],
    ),
    (
        Constraint(SCHEMA, json.dumps({
            "type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False,
        })),
        ["{}", '{"next": {"next": {}}}'],
        ['{"next": 1}', '{"other": {}}'],
    ),
    (Constraint(SCHEMA, " true"), ["1", '"a"', '{"a": [null]}', "{\n}"], ["", "a", "{  }"]),
    (Constraint(REGEX, "[0-9]{3}-[a-f]+"), ["123-abc"], ["123-", "x123-abc", "123-abcg", ""]),
    (Constraint(GRAMMAR, 'start: "a" b*\nb: /[x-z]/'), ["a", "axyz"], ["", "ab", "ax "]),
]  # fmt: skip


@pytest.mark.parametrize(("constraint", "good", "bad"), MATCHES)
def test_exactly_what_matches_is_let_through(
    grammars: Grammars, constraint: Constraint, good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not matches(grammars, constraint, text)] == []
    assert [text for text in bad if matches(grammars, constraint, text)] == []


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(values=st.lists(texts, min_size=1, max_size=5), other=texts)
def test_a_choice_is_one_of_these_texts(grammars: Grammars, values: list[str], other: str) -> None:
    constraint = Constraint.choice(values)
    for text in (*values, other, values[0] + other):
        assert matches(grammars, constraint, text) == (text in values)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["a+b", "(ab|c)*d", "[^a]{2}", r"x\d?", "日.", "(?i)ab", "a{2,4}|b"]),
    st.text("abcdxX12日本\n", max_size=5),
)
def test_a_regex_matches_whole_outputs(grammars: Grammars, pattern: str, text: str) -> None:
    # An empty output is no match for us: at least one token precedes EOS.
    expected = re.fullmatch(pattern, text) is not None
    assert matches(grammars, Constraint(REGEX, pattern), text) == expected


def test_eos_comes_where_the_grammar_accepts_and_all_of_the_models(model_dir: Path) -> None:
    grammars = Grammars(model_dir, VOCAB_SIZE, [EOS_ID, 7])
    matcher = grammars.compile(Constraint(REGEX, "ab+")).follow()
    for text, is_end in (("a", False), ("b", True), ("b", True)):
        accept(matcher, text.encode())
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        assert (bool(bits[EOS_ID]), bool(bits[7])) == (is_end, is_end)
        assert bits[ord("b")] and not bits[EOS_ID + 1 :].any()


# --- unsupported constraints -------------------------------------------------------------------


def refusal(grammars: Grammars) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        grammars.compile(Constraint(REGEX, "a"))
    assert refused.value.code == "unsupported_parameter"
    assert grammars.refusal == refused.value.message
    return refused.value


def test_without_the_extra_the_refusal_names_it(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "baton-serve[structured]" in refusal(Grammars(model_dir, VOCAB_SIZE, [EOS_ID])).message


def test_without_a_tokenizer_or_an_end_there_are_none(model_dir: Path, tmp_path: Path) -> None:
    assert "tokenizer.json" in refusal(Grammars(tmp_path, VOCAB_SIZE, [EOS_ID])).message
    assert "end of sequence" in refusal(Grammars(model_dir, VOCAB_SIZE, [])).message


@pytest.mark.parametrize(("vocab_size", "eos_id"), [(200, 0), (VOCAB_SIZE, 260)])
def test_a_tokenizer_that_is_not_the_models_is_refused(
    model_dir: Path, vocab_size: int, eos_id: int
) -> None:
    """A tokenizer with more ids than the model, or without its EOS, is refused."""
    grammars = Grammars(model_dir, vocab_size, [eos_id])
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="tokenizer") as refused:
            grammars.compile(Constraint(REGEX, ".+"))
        assert refused.value.code == "unsupported_parameter"


def test_added_tokens_that_the_model_has_no_room_for_are_left_out(model_dir: Path) -> None:
    """E.g. a padding token added behind a vocabulary whose embedding was not enlarged."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|pad|>"])
    padded = model_dir.parent / "padded"
    padded.mkdir()
    tokenizer.save(str(padded / "tokenizer.json"))
    grammars = Grammars(padded, EOS_ID + 1, [EOS_ID])
    assert matches(grammars, Constraint(REGEX, "ab+"), "abb")
    with pytest.raises(InvalidRequest) as refused:
        grammars.compile(Constraint(GRAMMAR, f"start: <[{EOS_ID + 1}]>"))
    assert refused.value.code == "invalid_schema"


# --- the cache -----------------------------------------------------------------------------------


def distinct(index: int) -> Constraint:
    properties: dict[str, Any] = {f"p{index}": {"type": "integer"}, "q": {"enum": ["x", "y"]}}
    return Constraint(SCHEMA, json.dumps({"type": "object", "properties": properties}))


def test_the_last_ones_are_kept_within_their_bound(model_dir: Path) -> None:
    grammars = Grammars(model_dir, VOCAB_SIZE, [EOS_ID], max_kept_bytes=4 << 20)
    first = distinct(0)
    kept = grammars.compile(first)
    for index in range(1, 100):
        grammars.compile(distinct(index))
        assert grammars.compile(first) is kept, "it is used all the time"
        assert grammars.num_kept_bytes <= 4 << 20
    assert grammars.is_kept(distinct(99)) and not grammars.is_kept(distinct(1))
    assert grammars.compile(distinct(1)).follow().compute_bitmask()


def test_one_that_is_too_large_to_be_kept_is_compiled_all_the_same(model_dir: Path) -> None:
    grammars = Grammars(model_dir, VOCAB_SIZE, [EOS_ID], max_kept_bytes=1000)
    assert grammars.compile(Constraint(REGEX, "a+")).follow().compute_bitmask()
    assert (grammars.num_kept_bytes, grammars.is_kept(Constraint(REGEX, "a+"))) == (0, False)


def _resident_bytes(code: str, *arguments: str) -> list[int]:
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    return [int(word) for word in run.stdout.split()]


_CODE = """
import json, resource, sys
from pathlib import Path
from baton.constraints.grammars import Grammars
from baton.core.request.constraint import Constraint, ConstraintKind

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

grammars = Grammars(Path(sys.argv[1]), int(sys.argv[2]), [int(sys.argv[3])])
for index in range(int(sys.argv[4])):
    schema = {"type": "object", "properties": {f"p{index}": {"type": "integer"},
              "q": {"enum": ["x", "y"]}}}
    grammars.compile(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)))
    if index in (0, int(sys.argv[4]) // 2):
        print(resident())
print(resident(), grammars.num_kept_bytes)
"""


@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_distinct_schemas_in_a_row_fill_no_memory(model_dir: Path, count: int) -> None:
    """The cache counts at least the memory of its grammars, and frees that of evicted ones."""
    arguments = (str(model_dir), str(VOCAB_SIZE), str(EOS_ID), str(count))
    first, half, last, counted = _resident_bytes(_CODE, *arguments)
    assert counted <= 64 << 20
    assert last - first < 96 << 20
    assert last - half < 16 << 20


_SHORT_CODE = """
import sys
from pathlib import Path
from baton.constraints.grammars import Grammars
from baton.core.request.constraint import Constraint, ConstraintKind

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

grammars = Grammars(
    Path(sys.argv[1]), int(sys.argv[2]), [int(sys.argv[3])], max_kept_bytes=1 << 40
)
kind, source = ConstraintKind(sys.argv[4]), sys.argv[5]
for index in range(9):
    grammars.compile(Constraint(kind, source.replace("NUMBER", str(int(sys.argv[6]) + index))))
    if index == 0:
        print(resident(), grammars.num_kept_bytes)
print(resident(), grammars.num_kept_bytes)
"""


@pytest.mark.parametrize(
    ("kind", "source", "number"),
    [
        (REGEX, "a{NUMBER}", 1_000_000), (REGEX, "a{NUMBER}", 10_000), (REGEX, "a{NUMBER}", 1000),
        (REGEX, "((a{99}){99}){NUMBER}", 10), (REGEX, r"\p{L}\p{N}bNUMBER", 1),
        (SCHEMA, '{"type": "integer", "multipleOf": 86400, "title": "NUMBER"}', 1),
        (SCHEMA, '{"type": "integer", "multipleOf": NUMBER}', 19_980),
    ],
)  # fmt: skip
def test_short_sources_of_large_grammars_are_counted_as_such(
    model_dir: Path, kind: ConstraintKind, source: str, number: int
) -> None:
    arguments = (str(model_dir), str(VOCAB_SIZE), str(EOS_ID), kind.value, source, str(number))
    first, first_counted, last, counted = _resident_bytes(_SHORT_CODE, *arguments)
    assert last - first < counted - first_counted + (4 << 20)


@pytest.mark.timeout(20)
def test_the_largest_source_compiles_in_time(grammars: Grammars) -> None:
    properties: dict[str, Any] = {}
    while len(json.dumps({"properties": properties})) < MAX_SOURCE_BYTES - 100:
        properties[f"property_{len(properties)}"] = {"type": "string", "maxLength": 20}
    source = json.dumps({"properties": properties})
    assert grammars.compile(Constraint(SCHEMA, source)).follow().compute_bitmask()
