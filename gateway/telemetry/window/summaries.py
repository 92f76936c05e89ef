"""What the window says to readers, as values."""

from __future__ import annotations

from dataclasses import dataclass

from ...request.output_chunk import RequestResult
from ..calls.call_values import CallFigures
from .histogram import Histogram


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Of one kind of duration; None where there is no sample. Percentiles within 1 %."""

    num_samples: int
    mean_s: float | None
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None
    max_s: float | None


@dataclass(frozen=True, slots=True)
class SloSummary:
    """`num_judged`: calls that ended in the window and were not cancelled by their client.

    A failed call is judged, and is not good; one that was refused never began, and is not judged.
    """

    ttft_slo_s: float
    tbt_slo_s: float
    num_judged: int
    num_good: int
    attainment: float | None  # share of good calls, 0 to 1
    goodput_rps: float


@dataclass(frozen=True, slots=True)
class RecentCall:
    """A call that is over: what is kept of it does not grow with its tokens.

    `ended_s` is on the monotonic clock; `result` is the first sample's, if that finished.
    """

    call_id: str
    tenant: str
    front: str
    arrived_unix_ns: int
    ended_s: float
    num_samples: int
    figures: CallFigures
    result: RequestResult | None


def microseconds(seconds: float) -> int:
    """Whole ones; a float of unix time keeps them apart, one of seconds and a fraction does not."""
    return int(seconds * 1e6)


def summarise(histogram: Histogram) -> LatencySummary:
    p50_s, p90_s, p99_s, max_s = histogram.percentiles_s(50, 90, 99, 100)
    return LatencySummary(histogram.num_samples, histogram.mean_s, p50_s, p90_s, p99_s, max_s)
