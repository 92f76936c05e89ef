"""The pages that are made from the code.

    python -m baton.bench.pages.reference docs       (or `make docs`)

reference.md is made whole from the parsers and the .proto files; of errors.md, sampling.md,
metrics.md and contracts.md, which people write, only each error's line of facts, the tables and the
code. A test fails while a page is not what would be made.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.cli.launch import gateway_parser, node_parser
from baton.cli.main import build_parser
from baton.core import errors
from baton.core.errors import BatonError
from baton.core.membership import Role
from baton.core.request.sampling_params import OPTIONS, SAMPLING, Parameter
from baton.gateway.telemetry.metrics.metric_table import GROUPS

_ROOT = Path(__file__).resolve().parents[2]
_PROTO = _ROOT / "proto" / "v1"
_WIDTH = 100
_PART = re.compile(r"(<!-- made: (.+?) -->\n).*?(<!-- /made -->)", re.S)
_OWN_GROUPS = ("options", "positional arguments")  # argparse's names for what has no group

_PARAMETERS = "| parameter | range | default | what it does |"

_HEAD = """\
# Reference

Made from the code by `make docs`: edit the code. Errors are in [errors.md](errors.md).

## Commands

Every flag in one of the tables [below](#flags) can also be given as an environment variable,
`BATON_` and its name in capitals: `BATON_REDIS_URL` for `--redis-url`, `BATON_LOG_JSON=true` for
`--log-json`. The cluster's secret belongs there, not on a command line.
"""


def reference_page() -> str:
    """docs/reference.md."""
    with _no_baton_environment():
        parsers = _parsers()
        commands = "\n".join(_command(parser) for parser in parsers)
        groups = "\n".join(_shared_groups(parsers))
    return f"{_HEAD}\n{commands}\n## Flags\n\n{groups}\n{_services()}"


@contextmanager
def _no_baton_environment() -> Iterator[None]:
    """Flags take their defaults from there; the page shows those of the code."""
    saved = {name: value for name, value in os.environ.items() if name.startswith("BATON_")}
    for name in saved:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(saved)


def _parsers() -> list[argparse.ArgumentParser]:
    """One for each command that a user can type."""
    baton = build_parser()
    (commands,) = (a for a in baton._actions if isinstance(a, argparse._SubParsersAction))
    nodes = [node_parser(role) for role in Role]
    return [*commands.choices.values(), gateway_parser(), *nodes]


def _command(parser: argparse.ArgumentParser) -> str:
    own = [
        row for group in parser._action_groups if group.title in _OWN_GROUPS for row in _rows(group)
    ]
    shared = [_link(group) for group in parser._action_groups if group.title not in _OWN_GROUPS]
    parts = [f"### {parser.prog}\n\n{parser.description}\n"]
    if own:
        parts.append(_table(own))
    if shared:
        parts.append(f"Takes the flags of {', '.join(shared)}.\n")
    return "\n".join(parts)


def _link(group: argparse._ArgumentGroup) -> str:
    title = _title(group)
    return f"[{title}](#{re.sub(r'[^a-z0-9 -]', '', title.lower()).replace(' ', '-')})"


def _title(group: argparse._ArgumentGroup) -> str:
    """The beginning of the configuration class's docstring, up to a colon or full stop."""
    assert group.title is not None
    return re.split(r"[:.]", group.title)[0]


def _shared_groups(parsers: list[argparse.ArgumentParser]) -> Iterator[str]:
    """Every group of flags once: where a command names a flag twice, the first group has it."""
    rows: dict[str, dict[str, str]] = {}
    for parser in parsers:
        for group in parser._action_groups:
            if group.title not in _OWN_GROUPS:
                rows.setdefault(_title(group), {}).update((row, "") for row in _rows(group))
    for title, found in rows.items():
        yield f"### {title}\n\n{_table(list(found))}"


def _table(rows: list[str]) -> str:
    return "\n".join(["| flag | default | |", "|---|---|---|", *rows]) + "\n"


def _rows(group: argparse._ArgumentGroup) -> list[str]:
    return [_row(action) for action in group._group_actions if action.dest != "help"]


def _row(action: argparse.Action) -> str:
    names = " ".join(f"`{name}`" for name in action.option_strings) or f"`{action.dest}`"
    choices = f" {{{', '.join(map(str, action.choices))}}}" if action.choices else ""
    default = "" if action.default in (None, argparse.SUPPRESS) else f"`{_shown(action.default)}`"
    text = re.sub(r" \((%\(default\)s|[0-9.]+|demo)\)$", "", action.help or "")
    return f"| {names}{choices} | {default} | {text} |"


def _shown(default: object) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _services() -> str:
    """Every gRPC method with the comment above it."""
    parts = ["## Services\n\nThe messages are in `proto/v1/*.proto`.\n"]
    for path in sorted(_PROTO.glob("*.proto")):
        for name, body in re.findall(r"^service (\w+) \{\n(.*?)^\}", path.read_text(), re.M | re.S):
            parts.append(f"### baton.v1.{name} (`{path.name}`)\n\n{_methods(body)}")
    return "\n".join(parts)


def _methods(body: str) -> str:
    lines, comment = [], ""
    for line in map(str.strip, body.splitlines()):
        if line.startswith("//"):
            comment += " " + line.removeprefix("//").strip()
        elif match := re.match(r"rpc (\w+)\((.*?)\) returns \((.*?)\)", line):
            method, takes, gives = match.groups()
            lines.append(f"- `{method}({takes}) -> {gives}`{comment and ':'}{comment}")
            comment = ""
    return "\n".join(lines) + "\n"


def error_classes() -> list[type[BatonError]]:
    """Every error of core/errors.py, in its order."""
    found = (value for value in vars(errors).values() if isinstance(value, type))
    return [cls for cls in found if issubclass(cls, BatonError)]


def refresh_errors_page(page: str) -> str:
    """docs/errors.md with each error's line of facts made anew; a missing error gets a heading."""
    for cls in error_classes():
        facts = error_facts(cls)
        heading = f"### `{cls.code}`\n\n"
        if heading not in page:
            codes, title, starts = page.partition("\n## What a process says")
            page = f"{codes}\n{heading}\n{title}{starts}"
        before, _, after = page.partition(heading)
        page = before + heading + facts + "\n" + after.partition("\n")[2]
    return page


def error_facts(cls: type[BatonError]) -> str:
    """One line: the class, its statuses, whether to try again."""
    again = "try again later" if cls.is_retryable else "do not retry as it is"
    return f"`{cls.__name__}` · gRPC `{cls.grpc_status}` · HTTP {cls.http_status} · {again}"


def refresh_metrics_page(page: str) -> str:
    """docs/metrics.md with its tables made anew, one a group of metrics."""

    def table(group: str) -> str:
        rows = [
            f"| `baton_{metric.name}` | {metric.kind} | "
            f"{', '.join(f'`{label}`' for label in metric.labels)} | {metric.help} |"
            for metric in GROUPS[group]
        ]
        return "\n".join(["| name | kind | labels | meaning |", "|---|---|---|---|", *rows])

    return refresh_parts(page, table)


def refresh_sampling_page(page: str) -> str:
    """docs/sampling.md with the table of request parameters made anew."""
    rows = [_parameter_row(*item) for item in {**SAMPLING, **OPTIONS}.items()]
    table = "\n".join([_PARAMETERS, "|---|---|---|---|", *rows])
    before, _, after = page.partition(_PARAMETERS)
    return before + table + "\n\n" + after.partition("\n\n")[2]


def _parameter_row(name: str, parameter: Parameter) -> str:
    default = parameter.default
    absent = f"{default:g}" if isinstance(default, float) else json.dumps(default)
    if parameter.absent is not None or default in (None, (), ""):
        absent = parameter.absent or ""
    note = f"; {parameter.over_http}" if parameter.over_http else ""
    return f"| `{name}` | {parameter.kind.range} | {absent} | {parameter.help}{note} |"


def refresh_contracts_page(page: str) -> str:
    """docs/contracts.md with its code made anew. Raises KeyError for a class that is gone."""
    return refresh_parts(page, code_of)


def code_of(part: str) -> str:
    """A block of code for `path/to/file.py: Class Class ...`, by its source alone: the public
    fields, properties and methods of each class, and their docstrings."""
    path, _, wanted = part.partition(": ")
    found = dict(_named(ast.parse((_ROOT / path).read_text())))
    shown = "\n\n".join("\n".join(_shown_class(found[name])) for name in wanted.split())
    return f"```python\n# {path}\n{shown}\n```\n"


def _named(module: ast.Module) -> Iterator[tuple[str, ast.ClassDef | ast.AnnAssign]]:
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node


def _shown_class(node: ast.ClassDef | ast.AnnAssign) -> Iterator[str]:
    if isinstance(node, ast.AnnAssign):
        assert node.value is not None, "a type alias"
        yield from _wrapped(f"{ast.unparse(node.target)} = {ast.unparse(node.value)}", "")
    elif any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        yield from _value(node)
    else:
        bases = ", ".join(map(ast.unparse, node.bases))
        yield f"class {node.name}({bases}):" if bases else f"class {node.name}:"
        yield from _comment(node, "    ")
        for member in node.body:
            yield from _member(member)


def _value(node: ast.ClassDef) -> Iterator[str]:
    """A dataclass as the call that makes it."""
    fields = [ast.unparse(part) for part in node.body if isinstance(part, ast.AnnAssign)]
    yield from _wrapped(f"{node.name}({', '.join(fields)})", "")
    yield from _comment(node, "    ")


def _member(member: ast.stmt) -> Iterator[str]:
    if isinstance(member, ast.AnnAssign):
        yield f"    {ast.unparse(member)}"
    elif isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
        if member.name.startswith("_"):
            return
        if any(ast.unparse(decorator) == "property" for decorator in member.decorator_list):
            returns = ast.unparse(member.returns) if member.returns else "object"
            yield f"    {member.name}: {returns}"
        else:
            yield from _wrapped(_signature(member), "    ")
        yield from _comment(member, "        ")


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = ast.unparse(function.args).removeprefix("self").removeprefix(", ")
    arguments = re.sub(r"(?<=[\w\]])=(?=\S)", " = ", arguments)
    begin = "async def" if isinstance(function, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"{begin} {function.name}({arguments}){returns}"


def _comment(
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, indent: str
) -> Iterator[str]:
    """The docstring, as comments."""
    for line in (ast.get_docstring(node) or "").splitlines():
        yield f"{indent}# {line}".rstrip() if line else f"{indent}#"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "        ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def refresh_parts(page: str, make: Callable[[str], str]) -> str:
    """The page with every part as `make` makes it by its name; the rest is left alone.

    A part stands between `<!-- made: NAME -->` and `<!-- /made -->`.
    """

    def made(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        return f"{begin}\n{make(name).strip()}\n\n{end}"

    return _PART.sub(made, page)


def main(folder: Path) -> int:
    """Write the pages."""
    (folder / "reference.md").write_text(reference_page())
    parts = {
        "errors": refresh_errors_page,
        "metrics": refresh_metrics_page,
        "sampling": refresh_sampling_page,
        "contracts": refresh_contracts_page,
    }
    for name, made_anew in parts.items():
        path = folder / f"{name}.md"
        path.write_text(made_anew(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
