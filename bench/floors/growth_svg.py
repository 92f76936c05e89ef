"""The growth of a decode step with batch and context, as an SVG next to its JSON results.

The JSON file is written by `python -m baton.bench.gpu --growth`.

python -m baton.bench.floors.growth_svg [RESULTS.json]
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from .figures import ROOT

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 300, 240, 60, 40, 110
_DECODE = re.compile(r"decode (\d+) x (\d+)$")
_BATCH_OF_CONTEXTS, _CONTEXT_OF_BATCHES = 16, 1024
Points = Sequence[tuple[int, float]]


def main(argv: list[str]) -> int:
    """Draw one results file."""
    source = Path(argv[0]) if argv else ROOT / "bench" / "results" / "gpu.json"
    result = json.loads(source.read_text())
    rows = [
        (int(found[1]), int(found[2]), figure["median"], figure["floor"])
        for figure in result["figures"]
        if (found := _DECODE.match(figure["name"]))
    ]
    by_batch = sorted(row for row in rows if row[1] == _CONTEXT_OF_BATCHES)
    by_context = sorted(row for row in rows if row[0] == _BATCH_OF_CONTEXTS)
    panels = [
        _panel(
            0,
            f"sequences of {_CONTEXT_OF_BATCHES} tokens",
            [(batch, ms) for batch, _, ms, _ in by_batch],
            [(batch, floor) for batch, _, _, floor in by_batch],
        ),
        _panel(
            _WIDTH + _GAP,
            f"tokens of context, {_BATCH_OF_CONTEXTS} sequences",
            [(context, ms) for _, context, ms, _ in by_context],
            [(context, floor) for _, context, _, floor in by_context],
        ),
    ]
    title = f"{result['shape']}, bf16, {result['gpu']}, commit {result['commit']}"
    width, height = 2 * _WIDTH + _GAP + 2 * _LEFT, _HEIGHT + _TOP + 60
    source.with_name(f"{source.stem}_growth.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n'
        f'<text x="{_LEFT}" y="18" font-size="13">Decode step in ms: measured (line) and its floor '
        f"(dashed). {title}</text>\n" + "\n".join(panels) + "\n</svg>\n"
    )
    return 0


def _panel(left: int, label: str, measured: Points, floors: Points) -> str:
    """One plot: a logarithmic x axis, and milliseconds from 0 on the y axis."""
    left += _LEFT
    xs = [x for x, _ in measured]
    low, high = math.log2(min(xs)), math.log2(max(xs))
    top_ms = 5 * math.ceil(max(ms for _, ms in measured) / 5)

    def place(x: float, ms: float) -> tuple[float, float]:
        share = (math.log2(x) - low) / (high - low)
        return left + share * _WIDTH, _TOP + (1 - ms / top_ms) * _HEIGHT

    bottom = _TOP + _HEIGHT
    parts = [_line(left, bottom, left + _WIDTH, bottom)]
    for step in range(6):
        ms = top_ms * step / 5
        _, y = place(xs[0], ms)
        parts.append(_line(left, y, left + _WIDTH, y, "#ddd"))
        parts.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{ms:g}</text>')
    for x in xs:
        at, _ = place(x, 0)
        parts.append(f'<text x="{at:.0f}" y="{bottom + 16}" text-anchor="middle">{x}</text>')
    middle = left + _WIDTH / 2
    parts.append(f'<text x="{middle}" y="{bottom + 36}" text-anchor="middle">{label}</text>')
    for points, style in ((floors, 'stroke-dasharray="5 4" stroke="#888"'), (measured, _BLUE)):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        parts.append(f'<polyline points="{path}" fill="none" stroke-width="2" {style}/>')
    for x, y in (place(*point) for point in measured):
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#1f5fa8"/>')
    return "\n".join(parts)


_BLUE = 'stroke="#1f5fa8"'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = "#444") -> str:
    return f'<line x1="{x1}" y1="{y1:.1f}" x2="{x2}" y2="{y2:.1f}" stroke="{colour}"/>'


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
