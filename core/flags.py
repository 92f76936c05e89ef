"""Command-line flags made from configuration dataclasses, and back: one source for both.

`add_flags` adds a flag for every field; `parse` builds the dataclass from the parsed arguments,
`to_argv` turns a dataclass into the flags that would build it (how `baton up` starts its children).
The environment variable BATON_<FIELD> gives a flag's default.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import numbers
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from .errors import StartupFailed

T = TypeVar("T")

MAX_PORT = 65535

# The URL may contain a password.
SECRET_FIELDS = frozenset({"cluster_secret", "cluster_secret_also", "redis_url"})


def flag(
    default: Any,
    help: str,
    *,
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A dataclass field that is also a command-line flag."""
    metadata = {"help": help, "aliases": aliases, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def _base_type(annotation: Any) -> type:
    """The type to parse a value with: `int | None` parses as int, a tuple's values as text."""
    if typing.get_origin(annotation) is tuple:
        return tuple
    if isinstance(annotation, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    assert isinstance(annotation, type)
    return annotation


def add_flags(parser: argparse.ArgumentParser, *configs: type) -> None:
    """Add one flag per field of each dataclass; the first of two equal names wins."""
    seen: set[str] = set()
    for config in configs:
        title = (config.__doc__ or "").partition("\n")[0]
        group = parser.add_argument_group(title.removesuffix(".") or None)  # argparse adds a colon
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
    elif base_type is tuple:
        options |= {"nargs": "+", "metavar": "VALUE"}
        options["default"] = field.default if env is None else tuple(env.split())
    else:
        options["choices"] = choices = field.metadata.get("choices")
        options["type"] = _reader(field.name, base_type, choices)
    if field.name.endswith("_url"):
        options["action"] = UrlWithoutPassword
    action = group.add_argument(*(f"--{name}" for name in names), **options)
    if base_type is bool:
        action.type = _read_bool  # for the environment's value: the flag takes none


class UrlWithoutPassword(argparse.Action):
    """Refuses a password in a flag, not in its environment variable: every user of the host can
    read command lines."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if _has_password(values):
            raise argparse.ArgumentError(
                self,
                "has a password, and every user of this host can read a command line: "
                f"give it as BATON_{self.dest.upper()}",
            )
        setattr(namespace, self.dest, values)


def _has_password(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.password) or "password" in parse_qs(parts.query)
    except ValueError:
        return "@" in url  # no URL: if it has no password, connecting to it reports the error


_BOOLS = {"1": True, "true": True, "yes": True, "on": True} | {
    "": False, "0": False, "false": False, "no": False, "off": False,
}  # fmt: skip


def _read_bool(text: str) -> bool:
    try:
        return _BOOLS[text.lower()]
    except KeyError:
        raise argparse.ArgumentTypeError(f"{text[:64]!r} is neither true nor false") from None


def _reader(
    name: str, base_type: type, choices: tuple[str, ...] | None = None
) -> Callable[[str], Any]:
    """A parser of a flag's value that also checks the range, which the flag's name implies. It
    checks `choices` as well: argparse does not for defaults, such as the environment's value."""

    def read(text: str) -> Any:
        try:
            value = base_type(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:64]!r} is no {base_type.__name__}") from None
        if (name == "port" or name.endswith("_port")) and not 0 <= value <= MAX_PORT:
            raise argparse.ArgumentTypeError(f"a port is 0 to {MAX_PORT}, not {value}")
        if base_type is float and not 0 <= value < math.inf:  # NaN compares false
            raise argparse.ArgumentTypeError(f"must be a number from 0 on, not {value}")
        if base_type is int and name.startswith(("num_", "max_")) and value < 1:
            raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
        if choices is not None and value not in choices:
            raise argparse.ArgumentTypeError(f"{text[:64]!r} is none of {', '.join(choices)}")
        return value

    return read


def parse(config: type[T], arguments: argparse.Namespace) -> T:
    """Build `config` from parsed arguments; raises StartupFailed where a value is out of range."""
    fields = dataclasses.fields(config)  # type: ignore[arg-type]
    values = {field.name: getattr(arguments, field.name) for field in fields}
    return config(**{n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})


def parse_all(arguments: argparse.Namespace, *configs: type) -> list[Any]:
    return [parse(config, arguments) for config in configs]


def to_argv(
    config: Any, *, leave_out: Collection[str] = SECRET_FIELDS - {"redis_url"}
) -> list[str]:
    """The flags that differ from the defaults.

    Every user of the host can read command lines: leave SECRET_FIELDS out and pass them by
    `to_environment`.
    """
    argv: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == field.default or field.name in leave_out:
            continue
        name = field.name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            argv += [f"--{name}", *value]
        else:
            argv += [f"--{name}", str(value)]
    return argv


def environment_without(configs: Iterable[Any]) -> dict[str, str]:
    """This process's environment without the variables that set defaults of these configs' flags:
    for a child, whose command line leaves out values that equal the code's defaults."""
    names = {f"BATON_{field.name.upper()}" for c in configs for field in dataclasses.fields(c)}
    return {name: value for name, value in os.environ.items() if name not in names}


def to_environment(configs: Iterable[Any]) -> dict[str, str]:
    """The SECRET_FIELDS of these configs as environment variables."""
    fields = ((config, field.name) for config in configs for field in dataclasses.fields(config))
    values = {name: getattr(config, name) for config, name in fields if name in SECRET_FIELDS}
    return {f"BATON_{name.upper()}": value for name, value in values.items() if value is not None}


def from_json(config: type[T], values: dict[str, Any]) -> T:
    """Build `config` from a JSON object (`dataclasses.asdict`); unknown keys are an error."""
    known = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    if unknown := set(values) - known:
        raise StartupFailed(f"unknown settings for {config.__name__}: {', '.join(sorted(unknown))}")
    return config(**values)


def from_caller(config: type[T], values: Mapping[str, Any]) -> T:
    """Build `config` from values given in Python, with the checks of flags; paths and mappings
    become the text that a flag would have. Raises StartupFailed."""
    hints = typing.get_type_hints(config)
    checked = dict(values)
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        if field.name in checked:
            checked[field.name] = _checked(field, hints[field.name], checked[field.name])
    return from_json(config, checked)


def _checked(field: dataclasses.Field[Any], annotation: Any, value: Any) -> Any:
    base_type = _base_type(annotation)
    if base_type is str and isinstance(value, Mapping):
        try:
            value = json.dumps(value)
        except TypeError as error:
            raise StartupFailed(f"{field.name} cannot be {value!r:.100}: {error}") from error
    elif base_type is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    elif isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = int(value)  # numpy's
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        value = float(value)
    if value is None:
        is_optional = annotation is not base_type and base_type is not tuple
        return None if is_optional else field.default
    choices = field.metadata.get("choices")
    kinds = {int: int, float: int | float, tuple: tuple | list}.get(base_type, base_type)
    is_kind = isinstance(value, kinds) and (base_type is bool or not isinstance(value, bool))
    reason = f"it is no {base_type.__name__}"
    if is_kind and choices is not None and value not in choices:
        is_kind, reason = False, f"it is one of {', '.join(choices)}"
    if is_kind and base_type in (int, float) and value != field.default:
        try:
            _reader(field.name, base_type)(str(value))
        except argparse.ArgumentTypeError as error:
            is_kind, reason = False, str(error)
    if not is_kind:
        raise StartupFailed(f"{field.name} cannot be {value!r:.100}: {reason}")
    return tuple(value) if base_type is tuple else value
