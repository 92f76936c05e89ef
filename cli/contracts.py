"""The code in docs/contracts.md: public parts of classes, taken from their source by name.

A part of the page is named `path/to/file.py: Class Class ...`. A class is shown with what others
may use: fields, properties, methods and their docstrings. Imports nothing of what it shows.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from .made_parts import refresh

_ROOT = Path(__file__).resolve().parent.parent
_WIDTH = 100


def refresh_contracts_page(page: str) -> str:
    """docs/contracts.md with its code made anew. Raises KeyError for a class that is gone."""
    return refresh(page, code_of)


def code_of(part: str) -> str:
    """A block of code for `path: Name Name ...`."""
    path, _, wanted = part.partition(": ")
    found = dict(_named(ast.parse((_ROOT / path).read_text())))
    shown = "\n\n".join("\n".join(_shown(found[name])) for name in wanted.split())
    return f"```python\n# {path}\n{shown}\n```\n"


def _named(module: ast.Module) -> Iterator[tuple[str, ast.ClassDef | ast.AnnAssign]]:
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node


def _shown(node: ast.ClassDef | ast.AnnAssign) -> Iterator[str]:
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
