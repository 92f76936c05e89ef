"""The window as JSON: one object that a page can draw without knowing anything else.

Owns the schema that docs/dashboard.md describes. Durations in seconds, times in unix seconds,
None where there is no sample. Only whole seconds are in the series.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from functools import cache
from typing import Any

from ..calls.call_record import STAGES, CallFigures, CallRecord, SloTargets, description
from ..metrics import metric_table as table
from ..metrics.tally import Histogram, Tally, middle
from .window import LATENCIES, Second, TelemetryWindow, counts_of, microseconds

VERSION = 1
RATE_SPAN_S = 10  # what "now" means for rates
_ROWS_PER_DECADE = 8
_LOWEST_DECADE, _HIGHEST_DECADE = -4, 2  # 0.1 ms to 100 s
HEATMAP_EDGES_S = [
    10 ** (row / _ROWS_PER_DECADE)
    for row in range(_LOWEST_DECADE * _ROWS_PER_DECADE, _HIGHEST_DECADE * _ROWS_PER_DECADE + 1)
]
_US = 1_000_000
_SERIES_LATENCIES = ("ttft", "tbt", "handoff_gap")
_HEATMAPS = ("ttft", "tbt")
_EMPTY = Second(0)


def window_snapshot(
    window: TelemetryWindow, targets: SloTargets, since_unix_s: float | None = None
) -> dict[str, Any]:
    """All of the window, ready for JSON: docs/dashboard.md has the schema.

    `since_unix_s`: series and recent calls only from behind that moment, for a page that has what
    was before; take the last snapshot's `now_unix_s`.
    """
    now_us = window.now_us()
    since_us = None if since_unix_s is None else window.from_unix_s(since_unix_s)
    total = window.total()
    seconds = {second.number: second for second in window.seconds}
    now = now_us // _US
    oldest = max(now - window.span_s, int(window.began_s))
    first = oldest if since_us is None else max(oldest, since_us // _US)
    numbers = range(first, now)  # the second that runs is not whole
    offset_s = window.to_unix_s(0)
    return {
        "version": VERSION,
        "now_unix_s": window.to_unix_s(now_us),
        "span_s": window.span_s,
        "covered_s": window.covered_s,
        "num_running": window.num_running,
        "counts": counts_of(total),
        "errors": {code: number for (code,), number in total.labelled(table.FAILURES)},
        "refusals": {code: number for (code,), number in total.labelled(table.REJECTIONS)},
        "rates": _rates(window, seconds, now),
        "latency": {name: _summary(total.histogram(of)) for name, of in LATENCIES.items()},
        "stages": {name: _summary(total.histogram(table.STAGE, name)) for name in STAGES},
        "slo": _slo(window, targets),
        "prefix": _prefix(total),
        "transfers": _transfers(total),
        "series": _series(seconds, numbers, offset_s, targets),
        "heatmaps": _heatmaps(seconds, numbers, offset_s),
        "recent": [
            _recent(record, figures, offset_s)
            for record, figures in reversed(window.recent)
            if since_us is None or microseconds(record.ended_s or 0.0) > since_us
        ],
    }


def _summary(histogram: Histogram) -> dict[str, float | int | None]:
    """Of one kind of duration; None where there is no sample. Percentiles within 1 %."""
    names = ("p50_s", "p90_s", "p99_s", "max_s")
    percentiles = zip(names, histogram.percentiles(50, 90, 99, 100), strict=True)
    return {"num_samples": histogram.num_samples, "mean_s": histogram.mean, **dict(percentiles)}


def _slo(window: TelemetryWindow, targets: SloTargets) -> dict[str, float | int | None]:
    """A failed call is judged, and is not good; one that was refused never began."""
    num_judged = sum(len(second.calls) for second in window.seconds)
    num_good = sum(second.num_good(targets) for second in window.seconds)
    return asdict(targets) | {
        "num_judged": num_judged,
        "num_good": num_good,
        "attainment": num_good / num_judged if num_judged else None,
        "goodput_rps": num_good / window.covered_s,
    }


def _rates(window: TelemetryWindow, seconds: dict[int, Second], now: int) -> dict[str, float]:
    """Per second, over the last whole seconds."""
    over_s = min(RATE_SPAN_S, int(window.covered_s))
    found: Counter[str] = Counter()
    for number in range(now - over_s, now):
        found.update(counts_of(seconds.get(number, _EMPTY).tally))
    names = ("began", "finished", "failed", "refused", "prompt_tokens", "output_tokens")
    return {"over_s": over_s} | {f"{name}_per_s": found[name] / over_s for name in names}


def _prefix(total: Tally) -> dict[str, float | int | None]:
    """What prefix caches saved: on prefill engines prompt tokens, on decode engines their pull."""
    counts = counts_of(total)
    prompt_tokens, cached_tokens = counts["finished_prompt_tokens"], counts["cached_tokens"]
    return {
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "hit_rate": cached_tokens / prompt_tokens if prompt_tokens else None,
        "puller_cached_tokens": total.counts[table.PULLER_CACHED_TOKENS.name,],
    }


def _transfers(total: Tally) -> list[dict[str, Any]]:
    found = []
    for (transport, source, puller), num_bytes in total.labelled(table.KV_BYTES):
        spent = total.histogram(table.KV_SECONDS, transport, source, puller)
        found.append(
            {
                "source": source,
                "puller": puller,
                "transport": transport,
                "num_transfers": spent.num_samples,
                "bytes": num_bytes,
                "seconds": spent.total,
                "gbytes_per_s": num_bytes / spent.total / 1e9 if spent.total > 0 else None,
            }
        )
    return sorted(found, key=lambda edge: (edge["source"], edge["puller"], edge["transport"]))


def _series(
    seconds: dict[int, Second], numbers: range, offset_s: float, targets: SloTargets
) -> dict[str, list[Any]]:
    """Columns of equal length, one row a second."""
    rows = [seconds.get(number, _EMPTY) for number in numbers]
    columns: dict[str, list[Any]] = {"t_unix_s": [number + offset_s for number in numbers]}
    counts = [counts_of(row.tally) for row in rows]
    for name in counts_of(_EMPTY.tally):
        columns[name] = [count[name] for count in counts]
    for name in _SERIES_LATENCIES:
        tails = [row.tally.histogram(LATENCIES[name]).percentiles(50, 90, 99) for row in rows]
        for index, q in enumerate((50, 90, 99)):
            columns[f"{name}_p{q}_s"] = [tail[index] for tail in tails]
    for name in STAGES:
        columns[f"{name}_mean_s"] = [row.tally.histogram(table.STAGE, name).mean for row in rows]
    columns["transfer_bytes"] = [
        sum(num_bytes for _, num_bytes in row.tally.labelled(table.KV_BYTES)) for row in rows
    ]
    columns["slo_judged"] = [len(row.calls) for row in rows]
    columns["slo_good"] = [row.num_good(targets) for row in rows]
    return columns


def _heatmaps(seconds: dict[int, Second], numbers: range, offset_s: float) -> dict[str, Any]:
    """For each second with samples: [time, row, count, row, count, ...]."""
    found: dict[str, Any] = {"edges_s": HEATMAP_EDGES_S}
    for name in _HEATMAPS:
        found[name] = []
        for number in numbers:
            counts = seconds.get(number, _EMPTY).tally.histogram(LATENCIES[name]).counts
            by_row: Counter[int] = Counter()
            for bucket, count in counts.items():
                by_row[_row_of(bucket)] += count
            if by_row:
                cells = [value for cell in sorted(by_row.items()) for value in cell]
                found[name].append([number + offset_s, *cells])
    return found


@cache
def _row_of(bucket: int) -> int:
    """The row of a heat map that a histogram's bucket belongs to; the outer rows take the rest."""
    row = math.floor((math.log10(middle(bucket)) - _LOWEST_DECADE) * _ROWS_PER_DECADE)
    return min(max(row, 0), len(HEATMAP_EDGES_S) - 2)


def _recent(call: CallRecord, figures: CallFigures, offset_s: float) -> dict[str, Any]:
    """One call for the waterfall; `timeline` in seconds since it arrived, of its first sample."""
    result = call.results.get(0)
    assert call.ended_s is not None, "it is over"
    return description(call, figures) | {
        "call_id": call.call_id,
        "arrived_unix_s": call.arrived_unix_ns / 1e9,
        "ended_unix_s": call.ended_s + offset_s,
        "transfer": asdict(figures.transfer) if figures.transfer else None,
        "stages": figures.stages,
        "timeline": [
            [stamp.event.value, (stamp.unix_ns - call.arrived_unix_ns) / 1e9, stamp.node]
            for stamp in (result.timeline if result else ())
        ],
    }
