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

from ..calls.stages import STAGES
from .histogram import Histogram, middle_s
from .second import COUNTS, LATENCIES, Second, Tally
from .summaries import RecentCall, microseconds, summarise
from .window import TelemetryWindow

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
    window: TelemetryWindow,
    *,
    ttft_slo_s: float,
    tbt_slo_s: float,
    since_unix_s: float | None = None,
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
        "counts": {name: total.counts[name] for name in COUNTS},
        "errors": dict(total.errors),
        "refusals": dict(total.refusals),
        "rates": _rates(window, seconds, now),
        "latency": {name: asdict(summarise(total.latencies[name])) for name in LATENCIES},
        "stages": {name: asdict(summarise(total.stages.get(name, Histogram()))) for name in STAGES},
        "slo": asdict(window.slo(ttft_slo_s, tbt_slo_s)),
        "prefix": _prefix(total),
        "transfers": _transfers(total),
        "series": _series(seconds, numbers, offset_s, ttft_slo_s, tbt_slo_s),
        "heatmaps": _heatmaps(seconds, numbers, offset_s),
        "recent": [
            _recent(call, offset_s)
            for call in reversed(window.recent)
            if since_us is None or microseconds(call.ended_s) > since_us
        ],
    }


def _rates(window: TelemetryWindow, seconds: dict[int, Second], now: int) -> dict[str, float]:
    """Per second, over the last whole seconds."""
    over_s = min(RATE_SPAN_S, int(window.covered_s))
    found: Counter[str] = Counter()
    for number in range(now - over_s, now):
        found.update(seconds.get(number, _EMPTY).tally.counts)
    names = ("began", "finished", "failed", "refused", "prompt_tokens", "output_tokens")
    return {"over_s": over_s} | {f"{name}_per_s": found[name] / over_s for name in names}


def _prefix(total: Tally) -> dict[str, float | int | None]:
    """What prefix caches saved: on prefill engines prompt tokens, on decode engines their pull."""
    prompt_tokens, cached_tokens = (
        total.counts["finished_prompt_tokens"],
        total.counts["cached_tokens"],
    )
    return {
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "hit_rate": cached_tokens / prompt_tokens if prompt_tokens else None,
        "puller_cached_tokens": sum(edge.puller_cached_tokens for edge in total.edges.values()),
    }


def _transfers(total: Tally) -> list[dict[str, Any]]:
    return [
        {
            "source": source,
            "puller": puller,
            "transport": transport,
            "num_transfers": edge.num_transfers,
            "bytes": edge.num_bytes,
            "seconds": edge.seconds,
            "gbytes_per_s": edge.num_bytes / edge.seconds / 1e9 if edge.seconds > 0 else None,
        }
        for (source, puller, transport), edge in sorted(total.edges.items())
    ]


def _series(
    seconds: dict[int, Second],
    numbers: range,
    offset_s: float,
    ttft_slo_s: float,
    tbt_slo_s: float,
) -> dict[str, list[Any]]:
    """Columns of equal length, one row a second."""
    rows = [seconds.get(number, _EMPTY) for number in numbers]
    columns: dict[str, list[Any]] = {"t_unix_s": [number + offset_s for number in numbers]}
    for name in COUNTS:
        columns[name] = [row.tally.counts[name] for row in rows]
    for name in _SERIES_LATENCIES:
        tails = [row.tally.latencies[name].percentiles_s(50, 90, 99) for row in rows]
        for index, q in enumerate((50, 90, 99)):
            columns[f"{name}_p{q}_s"] = [tail[index] for tail in tails]
    for name in STAGES:
        stages = [row.tally.stages.get(name) for row in rows]
        columns[f"{name}_mean_s"] = [stage.mean_s if stage else None for stage in stages]
    edges = [row.tally.edges.values() for row in rows]
    columns["transfer_bytes"] = [sum(edge.num_bytes for edge in of) for of in edges]
    columns["slo_judged"] = [len(row.calls) for row in rows]
    columns["slo_good"] = [row.num_good(ttft_slo_s, tbt_slo_s) for row in rows]
    return columns


def _heatmaps(seconds: dict[int, Second], numbers: range, offset_s: float) -> dict[str, Any]:
    """For each second with samples: [time, row, count, row, count, ...]."""
    found: dict[str, Any] = {"edges_s": HEATMAP_EDGES_S}
    for name in _HEATMAPS:
        found[name] = []
        for number in numbers:
            counts = seconds.get(number, _EMPTY).tally.latencies[name].counts
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
    row = math.floor((math.log10(middle_s(bucket)) - _LOWEST_DECADE) * _ROWS_PER_DECADE)
    return min(max(row, 0), len(HEATMAP_EDGES_S) - 2)


def _recent(call: RecentCall, offset_s: float) -> dict[str, Any]:
    """One call for the waterfall; `timeline` in seconds since it arrived, of its first sample."""
    figures, result = call.figures, call.result
    return {
        "call_id": call.call_id,
        "tenant": call.tenant,
        "front": call.front,
        "arrived_unix_s": call.arrived_unix_ns / 1e9,
        "ended_unix_s": call.ended_s + offset_s,
        "outcome": figures.outcome,
        "is_finished": figures.is_finished,
        "num_samples": call.num_samples,
        "prompt_tokens": figures.prompt_tokens,
        "cached_tokens": figures.cached_tokens,
        "output_tokens": figures.output_tokens,
        "ttft_s": figures.ttft_s,
        "tpot_s": figures.tpot_s[0] if figures.tpot_s else None,
        "max_gap_s": figures.max_gap_s,
        "e2e_s": figures.e2e_s,
        "attempts": figures.attempts,
        "prefill_node": result.prefill_node if result else None,
        "decode_node": result.decode_node if result else None,
        "transfer": asdict(figures.transfer) if figures.transfer else None,
        "stages": figures.stages,
        "timeline": [
            [stamp.event.value, (stamp.unix_ns - call.arrived_unix_ns) / 1e9, stamp.node]
            for stamp in (result.timeline if result else ())
        ],
    }
