"""A run as one self-contained HTML page: distributions and their course over time, drawn as SVG.

Each figure shows all runs of the report in one pair of axes, a colour for each.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..core.metrics import percentile
from .figures import ReportWindow, tbt_samples
from .records import Record

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM, _TOP = 660, 260, 60, 50, 40, 30
_COLOURS = ("#1f6feb", "#d1580a", "#2a9134", "#8250df", "#b62324", "#57606a")
_MAX_POINTS = 400
Points = Sequence[tuple[float, float]]


def write(
    path: Path, title: str, runs: Mapping[str, tuple[Sequence[Record], ReportWindow]], table: str
) -> None:
    """The page: TTFT and TBT, each as a distribution and over time."""
    parts = [
        _axes("TTFT", "ms", "share", {n: _cdf(_ttfts(*run)) for n, run in runs.items()}),
        _axes("TBT", "ms (log)", "share", _log({n: _cdf(_tbts(*run)) for n, run in runs.items()})),
        _axes("TTFT over time", "s", "ms", {n: _ttft_course(*run) for n, run in runs.items()}, "."),
        _axes("TBT p99 over time", "s", "ms", {n: _tbt_course(*run) for n, run in runs.items()}),
    ]
    legend = "".join(
        f'<span style="color:{colour}">&#9632; {html.escape(name)}</span> '
        for name, colour in zip(runs, _COLOURS, strict=False)
    )
    path.write_text(
        f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title>"
        "<style>body{font:14px sans-serif;margin:2em}svg{margin:8px}</style>"
        f"<h1>{html.escape(title)}</h1><p>{legend}</p>{''.join(parts)}"
        f"<pre>{html.escape(table)}</pre>",
        encoding="utf-8",
    )


def _ttfts(records: Sequence[Record], window: ReportWindow) -> list[float]:
    ttfts = [r.times.ttft_s for r in records if window.holds(r.sent_s)]
    return [ttft * 1e3 for ttft in ttfts if ttft is not None]


def _tbts(records: Sequence[Record], window: ReportWindow) -> list[float]:
    return [gap * 1e3 for gap in tbt_samples(records, window)]


def _cdf(samples: Sequence[float]) -> list[tuple[float, float]]:
    """At most some hundred points, the tail among them."""
    ordered = sorted(samples)
    n = len(ordered)
    ranks = {min(n - 1, round(n * i / _MAX_POINTS)) for i in range(_MAX_POINTS + 1)} if n else set()
    ranks |= {n - 1 - n // 10**k for k in range(1, 6) if n}
    return [(ordered[rank], (rank + 1) / n) for rank in sorted(ranks)]


def _log(curves: Mapping[str, Points]) -> dict[str, Points]:
    return {
        name: [(math.log10(max(x, 0.01)), y) for x, y in points] for name, points in curves.items()
    }


def _ttft_course(records: Sequence[Record], window: ReportWindow) -> list[tuple[float, float]]:
    sent = [r for r in records if window.holds(r.sent_s) and r.token_s]
    return [(r.sent_s, (r.token_s[0] - r.sent_s) * 1e3) for r in sent]


def _tbt_course(records: Sequence[Record], window: ReportWindow) -> list[tuple[float, float]]:
    seconds: dict[int, list[float]] = {}
    for record in records:
        for before_s, after_s in zip(record.token_s, record.token_s[1:], strict=False):
            if window.holds(after_s):
                seconds.setdefault(int(after_s), []).append((after_s - before_s) * 1e3)
    return [(s, percentile(gaps, 99) or 0.0) for s, gaps in sorted(seconds.items())]


def _axes(
    title: str, x_name: str, y_name: str, curves: Mapping[str, Points], mark: str = "-"
) -> str:
    """One figure; curves without points are left out."""
    drawn = {name: points for name, points in curves.items() if points}
    if not drawn:
        return ""
    xs = [x for points in drawn.values() for x, _ in points]
    ys = [y for points in drawn.values() for _, y in points]
    low_x, high_x, high_y = min(xs), max(xs), max(ys)
    if "log" not in x_name:
        low_x = 0.0
    scale_x = (_WIDTH - _LEFT - _RIGHT) / ((high_x - low_x) or 1.0)
    scale_y = (_HEIGHT - _BOTTOM - _TOP) / (high_y or 1.0)

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (x - low_x) * scale_x, _HEIGHT - _BOTTOM - y * scale_y

    body = [f'<text x="{_LEFT}" y="18" font-weight="bold">{title}</text>']
    for tick in range(6):
        x, y = low_x + (high_x - low_x) * tick / 5, high_y * tick / 5
        (at_x, floor), (_, at_y) = place(x, 0), place(low_x, y)
        shown = 10**x if "log" in x_name else x
        body.append(f'<text x="{at_x:.0f}" y="{floor + 16:.0f}" font-size="11">{shown:.3g}</text>')
        body.append(f'<text x="4" y="{at_y + 4:.0f}" font-size="11">{y:.3g}</text>')
        across = f'x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at_y:.1f}" y2="{at_y:.1f}"'
        body.append(f'<line {across} stroke="#ddd"/>')
    body.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" font-size="11">{x_name}</text>')
    body.append(f'<text x="4" y="{_TOP - 6}" font-size="11">{y_name}</text>')
    for colour, name in zip(_COLOURS, curves, strict=False):
        if name in drawn:
            body.append(_curve([place(*point) for point in drawn[name]], colour, mark))
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif">{"".join(body)}</svg>'
    )


def _curve(points: Sequence[tuple[float, float]], colour: str, mark: str) -> str:
    if mark == ".":
        return "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}"/>' for x, y in points
        )
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
