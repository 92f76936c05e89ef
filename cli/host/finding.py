"""The findings of the checks of a host or a cluster: one line each, with advice."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

_SUBJECT_WIDTH = 22  # so that several tables line up


class Level(enum.StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"  # it cannot serve, or not correctly


@dataclass(frozen=True, slots=True)
class Finding:
    """`subject`: the thing that was checked; `advice`: what to do, empty if it is ok."""

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
