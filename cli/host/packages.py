"""Are the packages that Baton needs here, in versions that it can use? Read from metadata alone."""

from __future__ import annotations

import importlib.metadata
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .finding import Finding, ok, problem

DISTRIBUTION = "baton-serve"

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_CLAUSE = re.compile(r"(>=|<=|==|!=|<|>)\s*([0-9][^,;\s]*)")
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}


def required() -> list[str]:
    """What the installed distribution says it needs, extras left out."""
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [line for line in lines if "extra ==" not in line]


def installed(name: str) -> str | None:
    """The version of a distribution, if it is there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_requirements(
    requirements: Sequence[str], version_of: Callable[[str], str | None] = installed
) -> list[Finding]:
    """One finding for each requirement like `grpcio>=1.71.2`."""
    if not requirements:
        return [
            problem(DISTRIBUTION, "is not installed, only lies there", "pip install -e . beside it")
        ]
    return [_check(requirement, version_of) for requirement in requirements]


def _check(requirement: str, version_of: Callable[[str], str | None]) -> Finding:
    match = _NAME.match(requirement)
    assert match is not None, requirement
    name, specifier = match[0], requirement[match.end() :].split(";")[0].strip()
    version, advice = version_of(name), f"pip install '{name}{specifier}'"
    if version is None:
        return problem(name, "is missing", advice)
    if not satisfies(version, specifier):
        return problem(name, f"{version}, but {specifier} is needed", advice)
    return ok(name, version)


def satisfies(version: str, specifier: str) -> bool:
    """Whether all clauses hold, comparing the numbers of the release: 2.13.0+cpu is 2.13."""
    return all(
        _COMPARE[sign](_release(version), _release(bound))
        for sign, bound in _CLAUSE.findall(specifier)
    )


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    parts = [int(part) for part in numbers[0].split(".")] if numbers else [0]
    while len(parts) > 1 and parts[-1] == 0:
        parts.pop()
    return tuple(parts)
