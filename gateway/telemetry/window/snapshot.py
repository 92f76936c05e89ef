"""The window as one JSON object, with everything that the live page draws.

Owns the schema that docs/dashboard.md describes. Durations in seconds, times in unix seconds,
None where there is no sample. The series have only rows that are complete.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from functools import cache
from typing import Any

import msgspec

from ..calls.ended_call import STAGES, EndedCall
from ..calls.slo import SloTargets
from ..metrics import metric_table as table
from ..metrics.tally import Histogram, Tally, middle
from .rows import Rows
from .window import LATENCIES, TelemetryWindow, counts_of

VERSION = 1
RATE_SPAN_S = 10  # for current rates
_ROWS_PER_DECADE = 8
_LOWEST_DECADE, _HIGHEST_DECADE = -4, 2  # 0.1 ms to 100 s
HEATMAP_EDGES_S = [
    10 ** (row / _ROWS_PER_DECADE)
    for row in range(_LOWEST_DECADE * _ROWS_PER_DECADE, _HIGHEST_DECADE * _ROWS_PER_DECADE + 1)
]
_SERIES_COUNTS = (
    *("began", "failed", "prompt_tokens", "finished_prompt_tokens", "cached_tokens"),
    "output_tokens",
)
_SERIES_LATENCIES = ("ttft", "tbt", "handoff_gap")
_HEATMAPS = ("ttft", "tbt")
_EMPTY = Tally()


def window_snapshot(
    window: TelemetryWindow,
    targets: SloTargets,
    since_s: float | None = None,
    *,
    of_hour: bool = False,
    num_again: int = 0,
) -> dict[str, Any]:
    """The whole window, for JSON; the schema is in docs/dashboard.md.

    `since_s`: only series and recent calls after this time of the window's clock, for a page that
    has the earlier ones. `num_again`: rows before it to repeat, since another gateway's rows may
    have been late. `of_hour`: the last hour, in longer rows.
    """
    span = window.rows(of_hour=of_hour)
    total = span.total
    now_s = window.now_s()
    now = int(now_s)
    return {
        "version": VERSION,
        "now_unix_s": window.to_unix_s(now_s),
        "span_s": span.span_s,
        "row_s": span.row_s,
        "covered_s": window.covered_s(span),
        "num_running": window.num_running + window.num_running_elsewhere,
        "counts": counts_of(total),
        "errors": {code: number for (code,), number in total.labelled(table.FAILURES)},
        "refusals": {code: number for (code,), number in total.labelled(table.REJECTIONS)},
        "rates": _rates(window, now),
        "latency": {name: _summary(total.histogram(of)) for name, of in LATENCIES.items()},
        "stages": {name: _summary(total.histogram(table.STAGE, name)) for name in STAGES},
        "slo": _slo(span, window.covered_s(span), targets),
        "prefix": _prefix(total),
        "transfers": _transfers(total),
        **_columns(window, span, now, since_s, num_again),
        "recent": [
            msgspec.to_builtins(call)
            for added_s, call in sorted(window.recent, key=_ended_unix_s, reverse=True)
            if since_s is None or added_s > since_s
        ],
    }


def _ended_unix_s(recent: tuple[float, EndedCall]) -> float:
    return recent[1].ended_unix_s


def _columns(
    window: TelemetryWindow,
    span: Rows,
    now: int,
    since_s: float | None,
    num_again: int,
) -> dict[str, Any]:
    """Series and heat maps of the rows that include all gateways."""
    row_s, offset_s = span.row_s, window.to_unix_s(0)
    first = max(now - span.span_s, math.floor(window.began_s))
    numbers = range(first // row_s, (now - window.lag_s) // row_s)
    if since_s is not None:
        behind = (int(since_s) - window.lag_s) // row_s - num_again
        numbers = range(max(numbers.start, behind), numbers.stop)
    times = [number * row_s + offset_s for number in numbers]
    rows = [span.rows.get(number, _EMPTY) for number in numbers]
    return {"series": _series(times, rows), "heatmaps": _heatmaps(times, rows)}


def _summary(histogram: Histogram) -> dict[str, float | int | None]:
    """Percentiles, within 1 %, of one kind of duration; None without samples."""
    names = ("p50_s", "p90_s", "p99_s", "max_s")
    percentiles = zip(names, histogram.percentiles(50, 90, 99, 100), strict=True)
    return {"num_samples": histogram.num_samples, "mean_s": histogram.mean, **dict(percentiles)}


def _slo(span: Rows, covered_s: float, targets: SloTargets) -> dict[str, float | int | None]:
    """A failed call counts as not good; a refused call never began and does not count."""
    num_judged = sum(row.judged.number for row in span.rows.values())
    num_good = sum(row.judged.num_good(targets) for row in span.rows.values())
    return asdict(targets) | {
        "num_judged": num_judged,
        "num_good": num_good,
        "attainment": num_good / num_judged if num_judged else None,
        "goodput_rps": num_good / covered_s,
    }


def _rates(window: TelemetryWindow, now: int) -> dict[str, float]:
    """Rates per second, over the last whole seconds."""
    span = window.rows()
    over_s = min(RATE_SPAN_S, int(window.covered_s(span)))
    found: Counter[str] = Counter()
    for number in range(now - window.lag_s - over_s, now - window.lag_s):
        found.update(counts_of(span.rows.get(number, _EMPTY)))
    names = ("began", "finished", "failed", "refused", "prompt_tokens", "output_tokens")
    return {"over_s": over_s} | {f"{name}_per_s": found[name] / over_s for name in names}


def _prefix(total: Tally) -> dict[str, float | int | None]:
    """Savings by prefix caches: computing prompt tokens on prefill engines, pulling them on decode
    engines."""
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


def _series(times: list[float], rows: list[Tally]) -> dict[str, list[Any]]:
    """Columns of equal length, one value per row."""
    columns: dict[str, list[Any]] = {"t_unix_s": times}
    counts = [counts_of(row) for row in rows]
    for name in _SERIES_COUNTS:
        columns[name] = [count[name] for count in counts]
    for name in _SERIES_LATENCIES:
        tails = [row.histogram(LATENCIES[name]).percentiles(50, 90, 99) for row in rows]
        for index, q in enumerate((50, 90, 99)):
            columns[f"{name}_p{q}_s"] = [tail[index] for tail in tails]
    for name in STAGES:
        columns[f"{name}_mean_s"] = [row.histogram(table.STAGE, name).mean for row in rows]
    columns["transfer_bytes"] = [
        sum(num_bytes for _, num_bytes in row.labelled(table.KV_BYTES)) for row in rows
    ]
    return columns


def _heatmaps(times: list[float], rows: list[Tally]) -> dict[str, Any]:
    """For each row with samples: [time, row of the map, count, row of the map, count, ...]."""
    found: dict[str, Any] = {"edges_s": HEATMAP_EDGES_S}
    for name in _HEATMAPS:
        found[name] = []
        for t_unix_s, row in zip(times, rows, strict=True):
            by_row: Counter[int] = Counter()
            for bucket, count in row.histogram(LATENCIES[name]).counts.items():
                by_row[_row_of(bucket)] += count
            if by_row:
                cells = [value for cell in sorted(by_row.items()) for value in cell]
                found[name].append([t_unix_s, *cells])
    return found


@cache
def _row_of(bucket: int) -> int:
    """The row of a heat map for a histogram's bucket; the outer rows include all values beyond."""
    row = math.floor((math.log10(middle(bucket)) - _LOWEST_DECADE) * _ROWS_PER_DECADE)
    return min(max(row, 0), len(HEATMAP_EDGES_S) - 2)
