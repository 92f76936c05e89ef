"""The last minutes of a gateway, for the dashboard and for percentiles: what was when, how often.

Observes calls, keeps one Tally a second and one of the whole window, the figures of every call that
ended (for any SLO that a reader names) and the last calls in full. Memory is bounded by the span,
not by the load. Knows nothing of nodes but their names in results; snapshot.py makes it JSON.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence

from ....core.errors import BatonError
from ....core.ports import Clock
from ...request.output_chunk import OutputChunk
from ...security.tenancy import Caller
from ..calls.call_figures import call_figures
from ..calls.call_records import CallRecord
from ..calls.call_values import CallFigures
from ..calls.token_gaps import TokenGaps
from .histogram import Histogram, bucket_of
from .second import Edge, Second, Tally
from .summaries import LatencySummary, RecentCall, SloSummary, microseconds, summarise

MAX_CALLS_PER_S = 500  # whose figures are kept for SLOs; a gateway serves fewer
MAX_RECENT = 100


class TelemetryWindow:
    """`CallObserver`. Reading and writing happen on the gateway's event loop."""

    def __init__(
        self, clock: Clock, gaps: TokenGaps, span_s: int = 300, max_recent: int = MAX_RECENT
    ) -> None:
        self.span_s = span_s
        self.num_running = 0
        self._clock = clock
        self.began_s = clock.monotonic_s()
        self._unix_offset_us = clock.unix_ns() // 1000 - microseconds(self.began_s)
        self._total = Tally()
        self._seconds: deque[Second] = deque()  # without those in which nothing was
        self._recent: deque[RecentCall] = deque(maxlen=max_recent)
        self._gaps = gaps
        gaps.tell(self._count_gaps)

    # --- records.CallObserver ---------------------------------------------------------------------

    def call_refused(self, caller: Caller, error: BatonError) -> None:
        for tally in self._tallies(self._clock.monotonic_s()):
            tally.counts["refused"] += 1
            tally.refusals[error.code] += 1

    def call_began(self, record: CallRecord) -> None:
        self.num_running += 1
        for tally in self._tallies(self._clock.monotonic_s()):
            tally.counts["began"] += 1
            tally.counts["prompt_tokens"] += record.prompt_tokens

    def chunk_delivered(self, record: CallRecord, chunk: OutputChunk, now_s: float) -> None:
        num_tokens = len(chunk.token_ids)
        times = record.token_times[chunk.sample_index]
        num_deliveries = len(times)
        if not num_tokens:
            return
        if num_deliveries == 1:
            self._began_to_answer(record, now_s)
        gap_s = now_s - times[-2][0] if num_deliveries > 1 else 0.0
        bucket = bucket_of(gap_s)
        for tally in self._tallies(now_s):
            counts = tally.counts
            counts["output_tokens"] += num_tokens
            if num_tokens > 1:
                counts["coalesced_tokens"] += num_tokens - 1
            if num_deliveries > 1:
                tally.latencies["tbt"].add(gap_s, bucket)
                if num_deliveries == 2 and times[0][1] == 1:
                    tally.latencies["handoff_gap"].add(gap_s, bucket)

    def _began_to_answer(self, record: CallRecord, now_s: float) -> None:
        """A sample's first token: the call's TTFT, if no other sample was before it."""
        if sum(map(bool, record.token_times)) == 1:
            ttft_s = now_s - record.arrived_s
            for tally in self._tallies(now_s):
                tally.latencies["ttft"].add(ttft_s, bucket_of(ttft_s))

    def call_ended(self, record: CallRecord) -> None:
        assert record.ended_s is not None
        figures = call_figures(record)
        self.num_running -= 1
        self._recent.append(_recent_call(record, figures, record.ended_s))
        for tally in self._tallies(record.ended_s):
            _count(tally, figures)
            _time(tally, figures)
        calls = self._seconds[-1].calls
        if not figures.is_cancelled and len(calls) < MAX_CALLS_PER_S:
            worst_s = math.inf if figures.last_ttft_s is None else figures.last_ttft_s
            calls.append((figures.is_finished, worst_s, figures.max_gap_s))

    # --- reading ----------------------------------------------------------------------------------

    def latency(self, name: str) -> LatencySummary:
        """Of the window; `name` is one of second.LATENCIES."""
        return summarise(self.total().latencies[name])

    def slo(self, ttft_slo_s: float, tbt_slo_s: float) -> SloSummary:
        """How many calls met both targets: TTFT, and every gap (core/metrics.py)."""
        self._expire(self._clock.monotonic_s())
        num_judged = sum(len(second.calls) for second in self._seconds)
        num_good = sum(second.num_good(ttft_slo_s, tbt_slo_s) for second in self._seconds)
        attainment = num_good / num_judged if num_judged else None
        goodput_rps = num_good / self.covered_s
        return SloSummary(ttft_slo_s, tbt_slo_s, num_judged, num_good, attainment, goodput_rps)

    def total(self) -> Tally:
        """Of the whole window, now; not to be changed."""
        self._gaps.settle()
        self._expire(self._clock.monotonic_s())
        return self._total

    @property
    def covered_s(self) -> float:
        """How much of the span this gateway has lived through: what rates are divided by."""
        return min(float(self.span_s), max(1.0, self._clock.monotonic_s() - self.began_s))

    @property
    def seconds(self) -> Sequence[Second]:
        """Oldest first; the last one may still be growing."""
        self._gaps.settle()
        return self._seconds

    @property
    def recent(self) -> Sequence[RecentCall]:
        """Oldest first."""
        return self._recent

    def clocks(self) -> tuple[float, float]:
        """Now: on the monotonic clock, and as unix time."""
        now_us = self.now_us()
        return now_us / 1e6, self.to_unix_s(now_us)

    def now_us(self) -> int:
        """The monotonic clock in microseconds: whole, so that a reader can give it back exactly."""
        return microseconds(self._clock.monotonic_s())

    def to_unix_s(self, monotonic_us: int) -> float:
        return (monotonic_us + self._unix_offset_us) / 1e6

    def from_unix_s(self, unix_s: float) -> int:
        """Exactly what `to_unix_s` was given."""
        return round(unix_s * 1e6) - self._unix_offset_us

    # --- inside -----------------------------------------------------------------------------------

    def _tallies(self, now_s: float) -> tuple[Tally, Tally]:
        """The two that an event goes to."""
        self._gaps.settle()  # into their second, before another one begins
        number = int(now_s)
        seconds = self._seconds
        if not seconds or seconds[-1].number < number:
            self._expire(now_s)
            seconds.append(Second(number))
        return seconds[-1].tally, self._total

    def _count_gaps(self, gaps_s: Sequence[float], began_s: float) -> None:
        """Of single tokens, in the second that began then."""
        buckets, sum_s = Counter(map(bucket_of, gaps_s)), sum(gaps_s)
        for tally in self._tallies(began_s):
            tally.counts["output_tokens"] += len(gaps_s)
            tally.latencies["tbt"].add_all(buckets, sum_s)

    def _expire(self, now_s: float) -> None:
        """Drop what is older than the span."""
        oldest = int(now_s) - self.span_s
        while self._seconds and self._seconds[0].number < oldest:
            self._total.subtract(self._seconds.popleft().tally)


def _recent_call(record: CallRecord, figures: CallFigures, ended_s: float) -> RecentCall:
    return RecentCall(
        call_id=record.call_id,
        tenant=record.caller.tenant,
        front=record.caller.front,
        arrived_unix_ns=record.arrived_unix_ns,
        ended_s=ended_s,
        num_samples=record.num_samples,
        figures=figures,
        result=record.results.get(0),
    )


def _count(tally: Tally, figures: CallFigures) -> None:
    counts = tally.counts
    if figures.is_finished:
        counts["finished"] += 1
        counts["finished_prompt_tokens"] += figures.prompt_tokens
        counts["cached_tokens"] += figures.cached_tokens
    else:
        counts["cancelled" if figures.is_cancelled else "failed"] += 1
        tally.errors[figures.outcome] += 1
    if figures.attempts > 1:
        counts["retries"] += figures.attempts - 1
    if transfer := figures.transfer:
        name = (transfer.source, transfer.puller, transfer.transport)
        edge = Edge(1, transfer.num_bytes, transfer.seconds, transfer.puller_cached_tokens)
        tally.edges.setdefault(name, Edge()).add(edge, 1)


def _time(tally: Tally, figures: CallFigures) -> None:
    if figures.is_finished:
        tally.latencies["e2e"].add(figures.e2e_s, bucket_of(figures.e2e_s))
    for tpot_s in figures.tpot_s:
        tally.latencies["tpot"].add(tpot_s, bucket_of(tpot_s))
    for name, seconds in figures.stages.items():
        tally.stages.setdefault(name, Histogram()).add(seconds, bucket_of(seconds))
