"""Structured output over HTTP and gRPC: each request has one constraint or one refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.clock import FakeClock
from fakes.gateway.byte_model import EOS_ID, VOCAB_SIZE, write_byte_model

from baton.constraints.grammars import Grammars, accept
from baton.core.errors import BatonError, InvalidRequest, Overloaded
from baton.core.membership import Member, Role
from baton.core.request.constraint import Constraint, ConstraintKind
from baton.gateway.engines.engine_table import EngineTable
from baton.gateway.engines.linked_engine import LinkedEngine
from baton.gateway.engines.reported_load import ReportedLoad
from baton.gateway.http.chat.chat import BODY
from baton.gateway.http.chat.tool_call_parsers import DeltaKind
from baton.gateway.http.chat.tool_formats import FORMATS, HERMES, ToolFormat
from baton.gateway.http.chat.tools import TOOLS, ToolChoice, call_grammar
from baton.gateway.http.generate.request_fields import Body
from baton.gateway.http.generate.structured import constraint_of, lark_of
from baton.gateway.validation.constraints import ConstraintCheck
from baton.gateway.validation.validation import check_sampling
from baton.prefix_index.mirror import PrefixMirror
from baton.proto.v1 import common_pb2

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
KIND = ConstraintKind
OF_SCHEMA = Constraint(KIND.JSON_SCHEMA, json.dumps(SCHEMA))
ANY_OBJECT = Constraint(KIND.JSON_SCHEMA, '{"type": "object"}')


def grammar_of(tools: Any, choice: ToolChoice, tool_format: ToolFormat = HERMES) -> str:
    """The grammar of a forced call, for tags that are not single tokens."""
    return call_grammar(tools, choice, tool_format.middle, tool_format.end, json.dumps)


def read(body: dict[str, Any]) -> tuple[Constraint | None, str | None]:
    """The validated request, and the field name that errors use."""
    fields, name = constraint_of(Body(BODY.fields).read_fields(body))
    constraint = check_sampling(common_pb2.SamplingParams(**fields), 100).constraint
    return constraint, None if constraint is None else name


WAYS: list[tuple[dict[str, Any], Constraint | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None}, None),
    ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
    ({"response_format": SCHEMA_FORMAT}, OF_SCHEMA),
    ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, OF_SCHEMA),
    ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
    ({"structured_outputs": {"regex": "a+", "json": None}}, Constraint(KIND.REGEX, "a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Constraint.choice(["a", "b"])),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Constraint(KIND.GRAMMAR, 'start: "a"')),
    ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, OF_SCHEMA),
    ({"guided_regex": "a+"}, Constraint(KIND.REGEX, "a+")),
    ({"guided_choice": ["a"]}, Constraint.choice(["a"])),
    ({"guided_grammar": 'start: "a"'}, Constraint(KIND.GRAMMAR, 'start: "a"')),
]


@pytest.mark.parametrize(("body", "constraint"), WAYS)
def test_each_way_becomes_its_constraint(
    body: dict[str, Any], constraint: Constraint | None
) -> None:
    found, name = read(body)
    assert found == constraint
    assert name == (None if constraint is None else next(iter(body)))


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "wat"}}, "unsupported_parameter", "response_format"),
    ({"response_format": {"type": "structural_tag"}}, "unsupported_parameter", "response_format"),
    ({"response_format": "json"}, "unsupported_parameter", "response_format"),
    (
        {"response_format": {"type": "json_schema"}},
        "missing_required",
        "response_format.json_schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
        "missing_required",
        "response_format.json_schema",
    ),
    ({"structured_outputs": {}}, "invalid_value", "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "invalid_value", "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "invalid_value", "structured_outputs"),
    ({"structured_outputs": {"wat": 1}}, "unknown_parameter", "structured_outputs"),
    ({"structured_outputs": {"json": 3}}, "invalid_value", "structured_outputs.json"),
    ({"guided_json": 3}, "invalid_value", "guided_json"),
    ({"guided_regex": ["a"]}, "invalid_value", "guided_regex"),
    ({"guided_choice": "a"}, "invalid_value", "guided_choice"),
    ({"guided_choice": ["a"] * 1025}, "array_too_long", "guided_choice"),
    ({"guided_json": {"enum": ["x" * (1 << 20)]}}, "invalid_schema", "guided_json"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "invalid_value", "guided_choice"),
    ({"response_format": SCHEMA_FORMAT, "guided_regex": "a"}, "invalid_value", "guided_regex"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "code", "param"), BAD)
def test_what_makes_no_sense_is_refused(body: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(body)
    assert (refused.value.code, refused.value.param) == (code, param)


@pytest.mark.parametrize("given", ["tools", "tool_choice"])
def test_calls_and_another_form_are_refused_by_the_fields_that_were_sent(given: str) -> None:
    with pytest.raises(InvalidRequest, match=f"give one of {given} and guided_regex") as refused:
        constraint_of({"guided_regex": {"regex": "a"}, given: ()}, "start: A")
    assert refused.value.param == "guided_regex"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"regex": ""}, "invalid_schema", "constraint"),
        ({"json_schema": ""}, "invalid_schema", "constraint"),
        ({"choice": common_pb2.Choices()}, "invalid_schema", "constraint"),
        ({"choice": common_pb2.Choices(values=["a", ""])}, "invalid_schema", "constraint"),
        ({"choice": common_pb2.Choices(values=["a"] * 1025)}, "array_too_long", "constraint"),
        ({"regex": "a", "ignore_eos": True}, "invalid_value", "ignore_eos"),
    ],
)
def test_the_validator_of_both_fronts(fields: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_sampling(common_pb2.SamplingParams(**fields), 100)
    assert (refused.value.code, refused.value.param) == (code, param)


# --- tools ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return Grammars(write_byte_model(tmp_path_factory.mktemp("m")), VOCAB_SIZE, [EOS_ID])


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


OFFERED = [
    tool("now", parameters={"properties": {"zone": {"enum": ["UTC"]}}, "required": ["zone"]}),
    tool("stop.all"),
    tool("loose", parameters={"properties": {"a": {"type": "string", "format": "wat"}}}),
]


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
@pytest.mark.parametrize(
    ("function", "rest", "is_good"),
    [
        ("now", ' {"zone": "UTC"}}', True),
        ("now", '{"zone": "UTC"}}', True),
        ("now", ' {"zone": "CET"}}', False),
        ("now", " {}}", False),
        ("stop.all", " {}}", True),
        ("stop.all", ' {"a": 1}}', False),
        ("loose", ' {"a": "b"}}', True),
        (None, 'now", "ARGUMENTS": {"zone": "UTC"}}', True),
        (None, 'stop.all", "ARGUMENTS": {}}', True),
        (None, 'stop.all", "ARGUMENTS": {"zone": "UTC"}}', False),
        (None, 'other", "ARGUMENTS": {}}', False),
    ],
)
def test_a_forced_call_is_one_of_the_tools_with_arguments_of_its_schema(
    grammars: Grammars, name: str, function: str | None, rest: str, is_good: bool
) -> None:
    tool_format = FORMATS[name]
    rest = rest.replace("ARGUMENTS", "parameters" if name == "llama3_json" else "arguments")
    choice = ToolChoice(True, True, function)
    source = grammar_of(TOOLS.read(OFFERED, "tools"), choice, tool_format)
    matcher = grammars.compile(Constraint(KIND.GRAMMAR, source)).follow()
    try:
        accept(matcher, [*rest.encode(), EOS_ID])
    except InvalidRequest:
        assert not is_good
        return
    assert is_good
    parser = tool_format.parser([])
    deltas = (
        parser.feed(tool_format.opening(function, is_constrained=True) + rest) + parser.finish()
    )
    called = [delta.name for delta in deltas if delta.name is not None]
    assert called == [function or rest.partition('"')[0]]
    arguments = "".join(delta.text for delta in deltas if delta.kind is DeltaKind.CALL)
    assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    ("schema", "good"),
    [
        ({"type": ["object", "null"], "properties": {"a": {"type": "integer"}}}, '{"a": 1}'),
        ({"type": "string"}, '{"a": "b"}'),
        ({"anyOf": [{"type": "array"}, {"type": "object"}]}, "{}"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": ["object", "integer"]}}}, "{}"),
    ],
)
def test_arguments_are_an_object_whatever_the_schema_says(
    grammars: Grammars, schema: dict[str, Any], good: str
) -> None:
    tools = TOOLS.read([tool("f", parameters=schema)], "tools")
    source = grammar_of(tools, ToolChoice(True, True, "f"))
    grammar = grammars.compile(Constraint(KIND.GRAMMAR, source))
    end = HERMES.end
    accept(grammar.follow(), [*f" {good}{end}".encode(), EOS_ID])
    for bad in ("null", '"a"', "[1]", "7"):
        with pytest.raises(InvalidRequest):
            accept(grammar.follow(), [*f" {bad}{end}".encode(), EOS_ID])


def test_a_strict_tools_schema_must_be_understood(grammars: Grammars) -> None:
    strict = TOOLS.read(
        [tool("f", strict=True, parameters=OFFERED[2]["function"]["parameters"])], "tools"
    )
    choice = ToolChoice(True, True, "f")
    source = grammar_of(strict, choice)
    with pytest.raises(InvalidRequest, match="format"):
        grammars.compile(Constraint(KIND.GRAMMAR, source))


# --- what the gateway checks before it contacts a node -------------------------------------------


def linked(incarnation: str, role: Role, can_constrain: bool) -> LinkedEngine:
    member = Member(
        incarnation, role, "n", "h:1", "demo", "fp", 200, 16, 100, can_constrain=can_constrain
    )
    load = ReportedLoad(0, 0, 0, 90, 90, False, frozenset())
    return LinkedEngine(member, None, load)  # type: ignore[arg-type]


def test_a_role_of_which_no_engine_takes_constraints_is_named() -> None:
    table = EngineTable(PrefixMirror(FakeClock()))
    assert table.lacks_constraints() is None, "nobody is known: that is another error"
    table.add(linked("a", Role.PREFILL, True))
    table.add(linked("b", Role.DECODE, False))
    assert table.lacks_constraints() is Role.DECODE
    table.add(linked("c", Role.DECODE, True))
    assert table.lacks_constraints() is None


async def test_the_check_says_what_is_wrong_and_remembers_what_is_not(grammars: Grammars) -> None:
    check = ConstraintCheck(grammars)
    good = Constraint(KIND.REGEX, "check[ed]+")
    await check.check(good)
    assert grammars.is_kept(good)
    with pytest.raises(InvalidRequest, match="unclosed"):
        await check.check(Constraint(KIND.REGEX, "a("))
    check.close()


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"type": "object", "anyOf": [{"$ref": "#"}]},
        {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/x"}}},
    ],
)
def test_a_schema_with_a_loop_is_told_so(grammars: Grammars, schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"\$ref loop"):
        grammars.compile(Constraint(KIND.JSON_SCHEMA, json.dumps(schema)))


TREE = {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False}


def test_a_recursive_schema_works_as_a_format_and_in_a_forced_call(grammars: Grammars) -> None:
    text = '{"child": {"child": {}}}'
    matcher = grammars.compile(Constraint(KIND.JSON_SCHEMA, json.dumps(TREE))).follow()
    accept(matcher, [*text.encode(), EOS_ID])
    source = grammar_of(
        TOOLS.read([tool("f", parameters=TREE)], "tools"), ToolChoice(True, True, "f")
    )
    call = grammars.compile(Constraint(KIND.GRAMMAR, source))
    accept(call.follow(), [*f"{text}}}".encode(), EOS_ID])
    with pytest.raises(InvalidRequest):
        accept(call.follow(), [*b'{"child": 1}}', EOS_ID])


async def test_the_check_is_bounded(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.gateway.validation.constraints._MAX_WAITING", 0)
    check = ConstraintCheck(grammars)
    with pytest.raises(Overloaded):
        await check.check(Constraint(KIND.REGEX, "new"))
    check.close()


async def test_without_grammars_the_check_refuses(tmp_path: Path) -> None:
    check = ConstraintCheck(Grammars(tmp_path, VOCAB_SIZE, [EOS_ID]))
    with pytest.raises(BatonError, match="missing") as refused:
        await check.check(Constraint(KIND.REGEX, "a"))
    assert refused.value.code == "unsupported_parameter"
    check.close()


@pytest.mark.parametrize("name", ["mistral", "deepseek_v3", "deepseek_v31", "kimi_k2"])
def test_forced_calls_of_formats_with_tags(grammars: Grammars, name: str) -> None:
    tool_format = FORMATS[name]
    for function in ("now", None):
        choice = ToolChoice(True, True, function)
        source = grammar_of(TOOLS.read(OFFERED, "tools"), choice, tool_format)
        grammar = grammars.compile(Constraint(KIND.GRAMMAR, source))
        head = "" if function else f"now{tool_format.middle}"
        rest = head + '{"zone": "UTC"}' + tool_format.end
        accept(grammar.follow(), [*rest.encode(), EOS_ID])
        opening = tool_format.opening(function, is_constrained=True)
        parser = tool_format.parser([])
        deltas = parser.feed(opening + rest) + parser.finish()
        assert [delta.name for delta in deltas if delta.name is not None] == ["now"]
        arguments = "".join(delta.text for delta in deltas if delta.kind is DeltaKind.CALL)
        assert json.loads(arguments) == {"zone": "UTC"}
        with pytest.raises(InvalidRequest):
            accept(grammar.follow(), [*(head + '{"zone": "CET"}').encode()])


@pytest.mark.parametrize(
    ("source", "inside"),
    [
        ("a/b", r"a\/b"),
        (r"a\/b", r"a\/b"),
        (r"a\\/b", r"a\\\/b"),
        ("[\\\\/]+", r"[\\\/]+"),
        ("a\nb", r"a\nb"),
        (r"\d+\\", r"\d+\\"),
    ],
)
def test_a_regex_between_slashes(source: str, inside: str) -> None:
    assert lark_of({"regex": source}, "regex") == f"/{inside}/"


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ("(?x) a # comment", "a", "a # comment"),
        ("a|b", "b", "c"),
        ("(?i)a|b", "B", "c"),
        ("/|b", "/", "a"),
        ("/*", "//", "*"),
    ],
)
def test_a_regex_as_a_part_of_a_grammar(
    grammars: Grammars, source: str, good: str, bad: str
) -> None:
    text = f'start: "<" r ">"\nr: {lark_of({"regex": source}, "regex")}'
    grammar = grammars.compile(Constraint(KIND.GRAMMAR, text))
    accept(grammar.follow(), [*f"<{good}>".encode(), EOS_ID])
    with pytest.raises(InvalidRequest):
        accept(grammar.follow(), [*f"<{bad}>".encode(), EOS_ID])


@pytest.mark.parametrize("source", ["a)(b", ")|(", "a)"])
def test_a_regex_that_is_none_is_none_in_a_grammar_either(grammars: Grammars, source: str) -> None:
    with pytest.raises(InvalidRequest):
        grammars.compile(Constraint(KIND.GRAMMAR, f"start: {lark_of({'regex': source}, 'regex')}"))
