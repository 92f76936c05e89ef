"""From the records of a run to its figures, and from those of several rates to goodput. Pure.

A request is good for Y if all its tokens arrived, the first within a second, the 99th percentile of
its own gaps is within Y, and its first gap, which may include a hand-off, is within 4 Y. A rate is
kept if 90 % of its requests are good; goodput is the highest rate that is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from statistics import fmean, median
from typing import Any

from baton.core.metrics import Slo, TokenTimes, percentile
from baton.loadgen.figures import ReportWindow
from baton.loadgen.records import Record

from ..serve import report
from ..serve.clients.workloads import PROBE

TTFT_S = 1.0
KEPT_SHARE = 0.9
HANDOFF_YS = 4.0
_SPREADS = {
    "ttft_ms": ("p50", "p90", "p99"),
    "tpot_ms": ("p50", "p90"),
    "tbt_ms": ("p50", "p99", "p99.9"),
    "handoff_gap_ms": ("p50", "p99"),
}
_SLO = Slo(TTFT_S, 1.0)


def is_good(record: Record, y_s: float) -> bool:
    """Whether the request kept all its targets."""
    has_ended = not record.error and len(record.token_s) == record.num_output_tokens
    return has_ended and keeps(record.times, y_s)


def keeps(times: TokenTimes, y_s: float) -> bool:
    """Whether the tokens that arrived did so in time."""
    return (
        times.ttft_s is not None
        and times.ttft_s <= TTFT_S
        and (percentile(times.gaps_s, 99) or 0.0) <= y_s
        and (times.handoff_gap_s or 0.0) <= HANDOFF_YS * y_s
    )


def counted(records: Iterable[Record], window: ReportWindow) -> list[Record]:
    """The requests that were due in the window, without background streams."""
    return [one for one in records if one.group == PROBE and window.holds(one.due_s)]


def attained(records: Sequence[Record], ys_ms: Sequence[float]) -> dict[str, float]:
    """The share of good requests by Y; 0 if there are no requests."""
    return {
        f"{y_ms:g}": sum(is_good(one, y_ms / 1000) for one in records) / max(1, len(records))
        for y_ms in ys_ms
    }


def summarise(
    records: Sequence[Record], window: ReportWindow, ys_ms: Sequence[float]
) -> dict[str, Any]:
    """All figures of a run, times in ms; TTFT and gaps include requests that did not end well.
    Normalised latency is a request's time per token, averaged over completed requests (Orca,
    vLLM)."""
    whole = report.summarise(records, window, _SLO, num_prefills=0)
    that_count = counted(records, window)
    lifetimes_s = [one.times.e2e_s for one in that_count if one.times.e2e_s and not one.error]
    per_token_ms = [
        one.times.e2e_s / one.num_output_tokens * 1e3
        for one in that_count
        if one.times.e2e_s and not one.error
    ]
    return {
        "window_s": whole["window_s"],
        "num_counted": len(that_count),
        "attained": attained(that_count, ys_ms),
        "lifetime_p50_s": median(lifetimes_s) if lifetimes_s else None,
        "normalised_latency_ms": fmean(per_token_ms) if per_token_ms else None,
        "generator_lag_p99_ms": whole["generator_lag_ms"]["p99"],
        "groups": {
            name: {key: group[key] for key in ("num_sent", "num_failed", "errors", "tokens_per_s")}
            | {key: {q: group[key][q] for q in spread} for key, spread in _SPREADS.items()}
            for name, group in whole["groups"].items()
        },
    }


def goodput(points: Mapping[float, float]) -> tuple[float, float]:
    """From the share of good requests by rate: the highest rate that is kept and below which all
    rates are kept, and where the line to the next rate crosses KEPT_SHARE. Both are 0 if no rate is
    kept, and the highest rate if all are, which is then a lower bound."""
    ordered = sorted(points.items())
    kept = [rate for rate, _ in takewhile(lambda point: point[1] >= KEPT_SHARE, ordered)]
    if len(kept) == len(ordered) or not kept:
        return (kept[-1], kept[-1]) if kept else (0.0, 0.0)
    (low, share), (high, missed) = ordered[len(kept) - 1 : len(kept) + 1]
    return low, low + (high - low) * (share - KEPT_SHARE) / (share - missed)


def step_cost_errors(metrics: str) -> dict[str, float]:
    """From a gateway's metrics, by node: the 90th percentile of the relative error of predicted
    steps."""
    return _by_node(metrics, "engine_step_cost_error")


def kept_steps(before: str, after: str) -> dict[str, float]:
    """By node, from a gateway's metrics at two times: the share of steps with a promise that kept
    it, on the engine's own clock."""
    promised, kept = (
        {
            node: count - _by_node(before, name).get(node, 0.0)
            for node, count in _by_node(after, name).items()
        }
        for name in ("promised_steps_total", "kept_steps_total")
    )
    return {node: round(kept[node] / count, 4) for node, count in promised.items() if count > 0}


def _by_node(metrics: str, wanted: str) -> dict[str, float]:
    found = {}
    for line in metrics.splitlines():
        name, _, rest = line.partition("{")
        if name == f"baton_{wanted}":
            labels, _, value = rest.partition("}")
            node = labels.partition('node="')[2].partition('"')[0]
            found[node] = float(value.split()[0])
    return found
