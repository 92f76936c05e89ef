"""From records to figures: percentiles by group, goodput, the generator's own lag, the FIFO floor.

Definitions are those of core/metrics.py. TBT is pooled over the gaps that end inside the window,
including the hand-off gap, which is also reported on its own; a request counts in the window in
which it was sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.core.metrics import Slo
from baton.loadgen.figures import ReportWindow, row, spread, targets, tbt_samples
from baton.loadgen.records import Record

from .clients.arrivals import BACKGROUND
from .fifo import queued_spacing, replay


def summarise(
    records: Sequence[Record],
    window: ReportWindow,
    slo: Slo,
    prefill_s: Mapping[str, float] | None = None,
    num_prefills: int = 1,
) -> dict[str, Any]:
    """All figures of a run as JSON: times in ms. `prefill_s`: by group, the time of one prefill
    alone; `num_prefills` engines compute them."""
    groups = sorted({record.group for record in records})
    result: dict[str, Any] = {
        group: _group_figures([r for r in records if r.group == group], window, slo)
        for group in groups
    }
    # A background stream is due when its previous request ends: it cannot be late.
    lags = [r.lag_s for r in records if r.group != BACKGROUND and window.holds(r.due_s)]
    summary = {"window_s": [window.begin_s, window.end_s], "groups": result}
    summary["generator_lag_ms"] = spread(lags)
    if prefill_s and all(group in prefill_s for group in groups):
        for group, floor in _floors(records, window, prefill_s, num_prefills).items():
            result[group]["ttft_fifo_floor_ms"] = floor
    if num_prefills == 1:
        for group, figures in result.items():
            figures.update(_spacings(records, window, group))
    return summary


def _group_figures(records: Sequence[Record], window: ReportWindow, slo: Slo) -> dict[str, Any]:
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
        "goodput_rps": sum(map(slo.is_met_by, whole)) / window.duration_s,
        "slo_ms": {name: value * 1e3 for name, value in targets(slo).items()},
    }


def _floors(
    records: Sequence[Record],
    window: ReportWindow,
    prefill_s: Mapping[str, float],
    num_prefills: int,
) -> dict[str, dict[str, float | None]]:
    """By group, the FIFO replay of all requests that were prefilled."""
    ordered = sorted(records, key=lambda record: record.sent_s)
    services_s = [prefill_s[record.group] for record in ordered]
    ttfts = replay([record.sent_s for record in ordered], services_s, num_prefills)
    floors: dict[str, dict[str, float | None]] = {}
    for group in {record.group for record in ordered}:
        floors[group] = spread(
            ttft
            for record, ttft in zip(ordered, ttfts, strict=True)
            if record.group == group and window.holds(record.sent_s)
        )
    return floors


def _spacings(
    records: Sequence[Record], window: ReportWindow, group: str
) -> dict[str, dict[str, float | None]]:
    """The service time of a request in the queue, with no or one request of another group in
    between."""
    served = [r for r in records if r.token_s and window.holds(r.token_s[0])]
    sent_s, first_s = [r.sent_s for r in served], [r.token_s[0] for r in served]
    is_ours = [r.group == group for r in served]
    return {
        name: spread(queued_spacing(sent_s, first_s, is_ours, num_between))
        for name, num_between in (("queued_spacing_ms", 0), ("queued_spacing_past_one_ms", 1))
    }


def table(summary: Mapping[str, Any]) -> str:
    """A text table for people: one line per group and figure."""
    lines = [f"{'':34}{'n':>8}{'p50':>10}{'p90':>10}{'p99':>10}{'p99.9':>10}{'max':>10}   ms"]
    for group, figures in summary["groups"].items():
        for name, value in figures.items():
            if name.endswith("_ms") and value.get("n"):
                lines.append(row(f"{group} {name.removesuffix('_ms')}", value))
        lines.append(
            f"{group}: {figures['num_sent']} sent, {figures['num_failed']} failed, "
            f"{figures['tokens_per_s']:.0f} tokens/s, goodput {figures['goodput_rps']:.2f}/s"
        )
    lines.append(row("generator's own lag", summary["generator_lag_ms"]))
    return "\n".join(lines)
