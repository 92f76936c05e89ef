"""From records to figures: percentiles by group, goodput, the generator's own lag, the FIFO floor.

Definitions are core/metrics.py's. TBT is pooled over the gaps that end inside the window, the
hand-off gap among them and told beside it; a request counts in the window in which it was sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.core.metrics import goodput_rps, percentile

from .clients.records import Record
from .clients.workloads import BACKGROUND
from .fifo import queued_spacing, replay

_PERCENTILES = (50.0, 90.0, 99.0, 99.9, 100.0)


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count as good."""

    ttft_s: float
    tbt_s: float


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


def summarise(
    records: Sequence[Record],
    window: ReportWindow,
    slo: Slo,
    prefill_s: Mapping[str, float] | None = None,
    num_prefills: int = 1,
) -> dict[str, Any]:
    """All figures of a run as JSON: times in ms. `prefill_s`: by group, of one prefill alone;
    `num_prefills` engines compute them."""
    groups = sorted({record.group for record in records})
    result: dict[str, Any] = {
        group: _group([r for r in records if r.group == group], window, slo) for group in groups
    }
    # A stream of the background is due when the one before it ends: it cannot be late.
    lags = [r.lag_s for r in records if r.group != BACKGROUND and window.holds(r.due_s)]
    summary = {"window_s": [window.begin_s, window.end_s], "groups": result}
    summary["generator_lag_ms"] = _spread(lags)
    if prefill_s and all(group in prefill_s for group in groups):
        for group, floor in _floors(records, window, prefill_s, num_prefills).items():
            result[group]["ttft_fifo_floor_ms"] = floor
    if num_prefills == 1:
        for group, figures in result.items():
            figures.update(_spacings(records, window, group))
    return summary


def _group(records: Sequence[Record], window: ReportWindow, slo: Slo) -> dict[str, Any]:
    sent = [record for record in records if window.holds(record.sent_s)]
    served = [record for record in sent if record.token_s]
    times = [record.times for record in sent]
    gaps = tbt_samples(records, window)
    num_tokens = sum(window.holds(at_s) for record in records for at_s in record.token_s)
    return {
        "num_sent": len(sent),
        "num_failed": sum(bool(record.error) for record in sent),
        "errors": sorted({record.error for record in sent if record.error})[:5],
        "ttft_ms": _spread([r.times.ttft_s for r in served]),
        "handoff_gap_ms": _spread([r.times.handoff_gap_s for r in served]),
        "tbt_ms": _spread(gaps),
        "tpot_ms": _spread([r.times.tpot_s for r in served]),
        "e2e_ms": _spread([r.times.e2e_s for r in served if not r.error]),
        "tokens_per_s": num_tokens / window.duration_s,
        "requests_per_s": len(sent) / window.duration_s,
        "goodput_rps": goodput_rps(
            times, window.duration_s, ttft_slo_s=slo.ttft_s, tbt_slo_s=slo.tbt_s
        ),
        "slo_ms": {"ttft": slo.ttft_s * 1e3, "tbt": slo.tbt_s * 1e3},
    }


def tbt_samples(records: Sequence[Record], window: ReportWindow) -> list[float]:
    """The gaps that end inside the window, in seconds."""
    return [
        after_s - before_s
        for record in records
        for before_s, after_s in zip(record.token_s, record.token_s[1:], strict=False)
        if window.holds(after_s)
    ]


def _floors(
    records: Sequence[Record],
    window: ReportWindow,
    prefill_s: Mapping[str, float],
    num_prefills: int,
) -> dict[str, dict[str, float | None]]:
    """By group, the FIFO replay of everything that had to be prefilled."""
    ordered = sorted(records, key=lambda record: record.sent_s)
    services_s = [prefill_s[record.group] for record in ordered]
    ttfts = replay([record.sent_s for record in ordered], services_s, num_prefills)
    floors: dict[str, dict[str, float | None]] = {}
    for group in {record.group for record in ordered}:
        floors[group] = _spread(
            ttft
            for record, ttft in zip(ordered, ttfts, strict=True)
            if record.group == group and window.holds(record.sent_s)
        )
    return floors


def _spacings(
    records: Sequence[Record], window: ReportWindow, group: str
) -> dict[str, dict[str, float | None]]:
    """What one more of the group took where they queued, with none or one of another between."""
    served = [r for r in records if r.token_s and window.holds(r.token_s[0])]
    sent_s, first_s = [r.sent_s for r in served], [r.token_s[0] for r in served]
    is_ours = [r.group == group for r in served]
    return {
        name: _spread(queued_spacing(sent_s, first_s, is_ours, num_between))
        for name, num_between in (("queued_spacing_ms", 0), ("queued_spacing_past_one_ms", 1))
    }


def _spread(seconds: Any) -> dict[str, float | None]:
    """Percentiles in ms, of what is not None."""
    samples = sorted(value for value in seconds if value is not None)
    spread: dict[str, float | None] = {"n": len(samples)}
    for q in _PERCENTILES:
        value = percentile(samples, q)
        name = "max" if q == 100 else f"p{q:g}"
        spread[name] = None if value is None else value * 1e3
    return spread


def table(summary: Mapping[str, Any]) -> str:
    """For people: one line a group and figure."""
    lines = [f"{'':34}{'n':>8}{'p50':>10}{'p90':>10}{'p99':>10}{'p99.9':>10}{'max':>10}   ms"]
    for group, figures in summary["groups"].items():
        for name, value in figures.items():
            if name.endswith("_ms") and value.get("n"):
                lines.append(_row(f"{group} {name.removesuffix('_ms')}", value))
        lines.append(
            f"{group}: {figures['num_sent']} sent, {figures['num_failed']} failed, "
            f"{figures['tokens_per_s']:.0f} tokens/s, goodput {figures['goodput_rps']:.2f}/s"
        )
    lines.append(_row("generator's own lag", summary["generator_lag_ms"]))
    return "\n".join(lines)


def _row(name: str, spread: Mapping[str, float | None]) -> str:
    cells = (spread[key] for key in ("p50", "p90", "p99", "p99.9", "max"))
    numbers = "".join(f"{'-':>10}" if cell is None else f"{cell:10.2f}" for cell in cells)
    return f"{name:34}{spread['n']:8.0f}{numbers}"
