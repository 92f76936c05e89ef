"""What a look at a host or a cluster finds: one line each, with a way out."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

_SUBJECT_WIDTH = 22  # so that several tables line up


class Level(enum.Enum):
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


def ok(subject: str, text: str) -> Finding:
    return Finding(Level.OK, subject, text)


def warning(subject: str, text: str, advice: str = "") -> Finding:
    return Finding(Level.WARNING, subject, text, advice)


def problem(subject: str, text: str, advice: str = "") -> Finding:
    return Finding(Level.PROBLEM, subject, text, advice)


def render(findings: Sequence[Finding]) -> str:
    """A line per finding in columns, its advice below it."""
    width, lines = _SUBJECT_WIDTH, []
    for f in findings:
        lines.append(f"{f.level.value:8} {f.subject:{width}}  {f.text}")
        if f.advice:
            lines.append(f"{'':8} {'':{width}}  -> {f.advice}")
    return "\n".join(lines)


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if there is a problem among them."""
    return int(any(f.level is Level.PROBLEM for f in findings))
