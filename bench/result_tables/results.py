"""Reading a file of results, and writing numbers, tables and where they come from in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"

Row = Sequence[str]


def load(name: str) -> dict[str, Any]:
    """A file of bench/results/ by its name without `.json`."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def figures(name: str, family: str | None = None) -> dict[str, dict[str, Any]]:
    """The figures of a file, or of one of its families, by their names."""
    found = load(name)["figures"]
    return {figure["name"]: figure for figure in (found[family] if family else found)}


def number(value: float | None, unit: str = "") -> str:
    """Three digits; nothing where there is no value."""
    if value is None:
        return ""
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{text} {unit}".strip()


def pair(low: float, high: float) -> str:
    return f"{number(low)} / {number(high)}"


def table(head: Row, rows: Iterable[Row]) -> str:
    """A table whose numbers stand to the right."""
    lines = [_line(head), _line(["---", *["---:"] * (len(head) - 1)])]
    return "\n".join([*lines, *map(_line, rows)]) + "\n"


def _line(cells: Row) -> str:
    return f"| {' | '.join(cells)} |"


def source(name: str, **more: str) -> str:
    """Where a table comes from: the file, the commit that was measured, the card, the command."""
    result = load(name) | more
    parts = [str(result[key]) for key in ("commit", "date", "gpu") if result.get(key)]
    where = f"[{name}.json]({{results}}/{name}.json)"
    command = f" `{result['command']}`" if result.get("command") else ""
    return f"{where}, {', '.join(parts)}{',' if command else ''}{command}\n"


def bound_of(figure: dict[str, Any]) -> float | None:
    found: float | None = figure.get("floor", figure.get("ceiling"))
    return found


def is_met(figure: dict[str, Any]) -> bool:
    """Whether a figure that has a target reaches it: at least for rates, at most for times."""
    if figure["unit"].endswith("/s"):
        return bool(figure["median"] >= figure["target"])
    return bool(figure["median"] <= figure["target"])


def target(figure: dict[str, Any]) -> str:
    """The target, and whether it is missed."""
    if figure["target"] is None:
        return ""
    return number(figure["target"]) + ("" if is_met(figure) else ", missed")


def figure_table(found: Iterable[dict[str, Any]]) -> str:
    """Any figures, one a row: median, spread, bound, target."""
    return table(
        ("", "median", "min - max", "bound", "what bounds it", "target"),
        [
            (
                figure["name"].strip(),
                number(figure["median"], figure["unit"]),
                f"{number(figure['min'])} - {number(figure['max'])}" if _has_spread(figure) else "",
                number(bound_of(figure)),
                figure["bound_is"] if bound_of(figure) is not None else "",
                target(figure),
            )
            for figure in found
        ],
    )


def _has_spread(figure: dict[str, Any]) -> bool:
    return bool(figure["repeats"] > 1)
