"""What a look at a host or a cluster finds: one line each, with a way out."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

_SUBJECT_WIDTH = 22  # so that several tables line up


class Level(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"  # it cannot serve, or not rightly


@dataclass(frozen=True, slots=True)
class Finding:
    """`subject` is what was looked at; `advice`: what to do, unless all is well."""

    level: Level
    subject: str
    text: str
    advice: str = ""


ok = partial(Finding, Level.OK)
warning = partial(Finding, Level.WARNING)
problem = partial(Finding, Level.PROBLEM)


def render(findings: Sequence[Finding]) -> str:
    """A line per finding in columns, its advice below it."""
    width, lines = _SUBJECT_WIDTH, []
    for f in findings:
        lines.append(f"{f.level:8} {f.subject:{width}}  {f.text}")
        if f.advice:
            lines.append(f"{'':8} {'':{width}}  -> {f.advice}")
    return "\n".join(lines)


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if there is a problem among them."""
    return int(any(f.level is Level.PROBLEM for f in findings))
