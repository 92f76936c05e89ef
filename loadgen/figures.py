"""From records to figures, by the definitions of core/metrics.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from ..core.metrics import Slo, percentile
from .records import Record

_PERCENTILES = (50.0, 90.0, 99.0, 99.9, 100.0)


@dataclass(frozen=True, slots=True)
class ReportWindow:
    """The part of a run that is reported, in seconds from its start."""

    begin_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s

    def holds(self, at_s: float) -> bool:
        return self.begin_s <= at_s < self.end_s


def targets(slo: Slo) -> dict[str, float]:
    """Those that there are, by the names of times, in seconds."""
    found = asdict(slo).items()
    return {name.removesuffix("_s"): value for name, value in found if value is not None}


def tbt_samples(records: Sequence[Record], window: ReportWindow) -> list[float]:
    """The gaps that end inside the window, in seconds."""
    return [
        after_s - before_s
        for record in records
        for before_s, after_s in zip(record.token_s, record.token_s[1:], strict=False)
        if window.holds(after_s)
    ]


def spread(seconds: Iterable[float | None]) -> dict[str, float | None]:
    """Percentiles in ms, of what is not None."""
    samples = sorted(value for value in seconds if value is not None)
    spread: dict[str, float | None] = {"n": len(samples)}
    for q in _PERCENTILES:
        value = percentile(samples, q)
        name = "max" if q == 100 else f"p{q:g}"
        spread[name] = None if value is None else value * 1e3
    return spread


def row(name: str, spread: Mapping[str, float | None]) -> str:
    """A line of a table, in ms."""
    cells = (spread[key] for key in ("p50", "p90", "p99", "p99.9", "max"))
    numbers = "".join(f"{'-':>10}" if cell is None else f"{cell:10.2f}" for cell in cells)
    return f"{name:34}{spread['n']:8.0f}{numbers}"
