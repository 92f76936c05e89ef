"""From records to figures, by the definitions of core/metrics.py.

TBT is pooled over the gaps that end inside the window, the hand-off gap among them and given beside
it too; a request counts in the window in which it was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.metrics import Slo, goodput_rps, percentile
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
    found = {"ttft": slo.ttft_s, "tbt": slo.tbt_s, "tpot": slo.tpot_s, "e2e": slo.e2e_s}
    return {name: value for name, value in found.items() if value is not None}


def group_figures(records: Sequence[Record], window: ReportWindow, slo: Slo) -> dict[str, Any]:
    """One group's figures as JSON: times in ms. A request that failed is not good."""
    sent = [record for record in records if window.holds(record.sent_s)]
    served = [record for record in sent if record.token_s]
    whole = [record.times for record in sent if not record.error]
    gaps = tbt_samples(records, window)
    num_tokens = sum(window.holds(at_s) for record in records for at_s in record.token_s)
    return {
        "num_sent": len(sent),
        "num_failed": sum(bool(record.error) for record in sent),
        "errors": sorted({record.error for record in sent if record.error})[:5],
        "ttft_ms": spread([r.times.ttft_s for r in served]),
        "handoff_gap_ms": spread([r.times.handoff_gap_s for r in served]),
        "tbt_ms": spread(gaps),
        "tpot_ms": spread([r.times.tpot_s for r in served]),
        "e2e_ms": spread([r.times.e2e_s for r in served if not r.error]),
        "tokens_per_s": num_tokens / window.duration_s,
        "requests_per_s": len(sent) / window.duration_s,
        "goodput_rps": goodput_rps(whole, window.duration_s, slo),
        "slo_ms": {name: value * 1e3 for name, value in targets(slo).items()},
    }


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
