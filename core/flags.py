"""Command-line flags made from configuration dataclasses, and back: one source for both.

`add_flags` adds a flag for every field; `parse` builds the dataclass from the parsed arguments,
`to_argv` turns a dataclass into the flags that would build it (how `baton up` starts its children).
The environment variable BATON_<FIELD> gives a flag's default.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import types
import typing
from typing import Any, TypeVar

from .errors import StartupFailed

T = TypeVar("T")


def _base_type(annotation: Any) -> type:
    """The type to parse a value with: `int | None` parses as int."""
    if isinstance(annotation, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    assert isinstance(annotation, type)
    return annotation


def add_flags(parser: argparse.ArgumentParser, *configs: type) -> None:
    """Add one flag per field of each dataclass; the first of two equal names wins."""
    seen: set[str] = set()
    for config in configs:
        group = parser.add_argument_group(
            config.__doc__.splitlines()[0] if config.__doc__ else None
        )
        hints = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            if field.name in seen:
                continue
            seen.add(field.name)
            _add_flag(group, field, _base_type(hints[field.name]))


def _add_flag(
    group: argparse._ArgumentGroup, field: dataclasses.Field[Any], base_type: type
) -> None:
    names = [field.name.replace("_", "-"), *field.metadata.get("aliases", ())]
    env = os.environ.get(f"BATON_{field.name.upper()}")
    options: dict[str, Any] = {
        "dest": field.name,
        "help": field.metadata["help"] + ("" if field.default is None else " (%(default)s)"),
        "default": field.default if env is None else env,
    }
    if base_type is bool:
        options["action"] = argparse.BooleanOptionalAction
        if env is not None:
            options["default"] = env.lower() in ("1", "true", "yes")
    else:
        options |= {"type": base_type, "choices": field.metadata.get("choices")}
    group.add_argument(*(f"--{name}" for name in names), **options)


def parse(config: type[T], arguments: argparse.Namespace) -> T:
    """Build `config` from parsed arguments; raises StartupFailed where a value is out of range."""
    fields = dataclasses.fields(config)  # type: ignore[arg-type]
    return config(**{field.name: getattr(arguments, field.name) for field in fields})


def to_argv(config: Any) -> list[str]:
    """The flags that differ from the defaults. Secrets do not belong on a command line: skipped."""
    argv: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == field.default or field.name == "cluster_secret":
            continue
        name = field.name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no-{name}")
        else:
            argv += [f"--{name}", str(value)]
    return argv


def from_json(config: type[T], values: dict[str, Any]) -> T:
    """Build `config` from a JSON object (`dataclasses.asdict`); unknown keys are an error."""
    known = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    if unknown := set(values) - known:
        raise StartupFailed(f"unknown settings for {config.__name__}: {', '.join(sorted(unknown))}")
    return config(**values)
