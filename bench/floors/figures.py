"""The result of a benchmark: a measured figure beside the bound set by hardware or by a library.

Figures are medians over repeats, with minimum and maximum as a measure of noise. Does not depend on
what is measured.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_OF_ONE_RUN = ("--commit", "--out")  # arguments that the recorded command leaves out


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of a table. `samples` has one value per repeat; `bound` is a lower bound for times,
    an upper bound for rates.

    `target` is the project's goal: at most for times, at least for rates.
    """

    name: str
    unit: str
    samples: tuple[float, ...]
    bound: float | None = None
    bound_is: str = ""
    target: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def is_rate(self) -> bool:
        return self.unit.endswith("/s")

    @property
    def is_met(self) -> bool | None:
        """Whether the target is reached; None without a target."""
        if self.target is None:
            return None
        return self.median >= self.target if self.is_rate else self.median <= self.target

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "min": min(self.samples),
            "max": max(self.samples),
            "repeats": len(self.samples),
            "ceiling" if self.is_rate else "floor": self.bound,
            "bound_is": self.bound_is,
            "target": self.target,
        }


def time_s(action: Callable[[], object]) -> float:
    """The duration of one call."""
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


def repeat_s(action: Callable[[], object], repeats: int, warmups: int = 1) -> tuple[float, ...]:
    """The durations of `repeats` calls, after warm-up calls that do not count."""
    for _ in range(warmups):
        action()
    return tuple(time_s(action) for _ in range(repeats))


def table(figures: Sequence[Figure]) -> str:
    """A text table for people: one row per figure."""
    rows = [("", "median", "min - max", "bound", "target", "")]
    for f in figures:
        noise = f"{_number(min(f.samples))} - {_number(max(f.samples))}"
        target = "" if f.target is None else _number(f.target) + ("" if f.is_met else " MISSED")
        bound = "" if f.bound is None else _number(f.bound)
        rows.append((f.name, f"{_number(f.median)} {f.unit}", noise, bound, target, f.bound_is))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(map(_pad, row, widths, range(len(row)))).rstrip() for row in rows)


def _pad(cell: str, width: int, column: int) -> str:
    """Align text to the left, numbers to the right."""
    return cell.ljust(width) if column in (0, 5) else cell.rjust(width)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def machine() -> dict[str, Any]:
    """The machine on which the figures are measured."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def commit() -> str:
    """The commit that was measured; with `+` if the work tree differs from it."""
    output = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=12"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return output.stdout.strip() or "unknown"


def command_line(module: str, argv: Sequence[str]) -> str:
    """The command that repeats this run of `bench/module`, without output path and commit."""
    before = [None, *argv]
    words = (
        word
        for word, last in zip(argv, before, strict=False)
        if last not in _OF_ONE_RUN and word.partition("=")[0] not in _OF_ONE_RUN
    )
    return shlex.join(["python", "-m", f"baton.bench.{module}", *words])


def write_figures(
    path: Path, figures: Sequence[Figure], command: str, measured: str | None
) -> None:
    """Write one list of figures as JSON. `measured`: the commit, if git does not know it."""
    result = {
        "commit": measured or commit(),
        "command": command,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "figures": [figure.as_dict() for figure in figures],
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def write(
    path: Path,
    families: dict[str, Sequence[Figure]],
    where: dict[str, Any],
    module: str = "cpu",
) -> None:
    """All figures as JSON, with commit, command and machine."""
    result = {
        "commit": commit(),
        "command": command_line(module, sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": where,
        "figures": {name: [f.as_dict() for f in figures] for name, figures in families.items()},
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
