"""The last minutes of a gateway, for the live page and for percentiles: what was when, how often.

    CallFeed ── a second's Tally ──┬─► Second, in which it was ──┐ one that leaves the window
                                   └─► total of the window ◄─────┘ is subtracted from the total
Reading never walks the past. Memory is bounded by the span, not by the load. Knows nothing of nodes
but their names in results; snapshot.py makes it JSON.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ....core.errors import Cancelled
from ....core.ports import Clock
from ..calls.call_record import CallFigures, CallRecord, JudgedCall, SloTargets
from ..metrics import metric_table as table
from ..metrics.tally import Tally

MAX_CALLS_PER_S = 500  # that are kept for SLOs; a gateway serves fewer
MAX_RECENT = 100
LATENCIES = {
    "ttft": table.TTFT,
    "tbt": table.INTER_TOKEN,
    "handoff_gap": table.HANDOFF_GAP,
    "tpot": table.TPOT,
    "e2e": table.E2E,
}
_KEPT = frozenset(
    metric.name
    for metric in (
        *LATENCIES.values(),
        *(table.BEGAN, table.SUCCESSES, table.FAILURES, table.REJECTIONS, table.RETRIES),
        *(table.PROMPT_TOKENS, table.FINISHED_PROMPT_TOKENS, table.CACHED_TOKENS),
        *(table.PULLER_CACHED_TOKENS, table.OUTPUT_TOKENS, table.COALESCED_TOKENS),
        *(table.STAGE, table.KV_SECONDS, table.KV_BYTES),
    )
)


@dataclass(slots=True)
class Second:
    """One second of the window. `calls`: MAX_CALLS_PER_S of those that ended, for SLOs."""

    number: int  # floor of the monotonic clock
    tally: Tally = field(default_factory=Tally)
    calls: list[JudgedCall] = field(default_factory=list)
    _judged: tuple[SloTargets, int, int] | None = None  # targets, calls, good ones

    def num_good(self, targets: SloTargets) -> int:
        """Of `calls`, those within the targets; remembered, since a page reads it every second."""
        judged = self._judged
        if judged is None or judged[:2] != (targets, len(self.calls)):
            judged = (targets, len(self.calls), sum(map(targets.are_met, self.calls)))
            self._judged = judged
        return judged[2]


class TelemetryWindow:
    """Reading and writing happen on the gateway's event loop. `num_running`: calls, now."""

    def __init__(self, clock: Clock, span_s: int = 300, max_recent: int = MAX_RECENT) -> None:
        self.span_s = span_s
        self.num_running = 0
        self.settle: Callable[[], None] = lambda: None  # set by who feeds it
        self._clock = clock
        self.began_s = clock.monotonic_s()
        self._unix_offset_us = clock.unix_ns() // 1000 - microseconds(self.began_s)
        self._total = Tally()
        # As of the last `total`, oldest first, without those in which nothing was; the last one may
        # still be growing.
        self.seconds: deque[Second] = deque()
        # Oldest first; of each call its first sample's result.
        self.recent: deque[tuple[CallRecord, CallFigures]] = deque(maxlen=max_recent)

    def take(self, tally: Tally, number: int) -> None:
        """What was counted in this second, or in a part of it."""
        if not (tally.counts or tally.histograms):
            return
        seconds = self.seconds
        if not seconds or seconds[-1].number < number:
            seconds.append(Second(number))
        seconds[-1].tally.add(tally, _KEPT)
        self._total.add(tally, _KEPT)
        calls = seconds[-1].calls
        calls += tally.calls[: MAX_CALLS_PER_S - len(calls)]
        self._expire(number)

    def add_recent(self, record: CallRecord, figures: CallFigures) -> None:
        """A call that is over: what is kept of it does not grow with its tokens."""
        results = {i: result for i, result in record.results.items() if i == 0}
        kept = replace(record, token_times=[], results=results, prompt=None)
        self.recent.append((kept, figures))

    # --- reading ----------------------------------------------------------------------------------

    def total(self) -> Tally:
        """Of the whole window, now; not to be changed."""
        self.settle()
        self._expire(int(self._clock.monotonic_s()))
        return self._total

    @property
    def covered_s(self) -> float:
        """How much of the span this gateway has lived through: what rates are divided by."""
        return min(float(self.span_s), max(1.0, self._clock.monotonic_s() - self.began_s))

    def now_us(self) -> int:
        """The monotonic clock in microseconds: whole, so that a reader can give it back exactly."""
        return microseconds(self._clock.monotonic_s())

    def to_unix_s(self, monotonic_us: int) -> float:
        return (monotonic_us + self._unix_offset_us) / 1e6

    def from_unix_s(self, unix_s: float) -> int:
        """Exactly what `to_unix_s` was given."""
        return round(unix_s * 1e6) - self._unix_offset_us

    def _expire(self, now: int) -> None:
        """Drop what is older than the span."""
        while self.seconds and self.seconds[0].number < now - self.span_s:
            self._total.subtract(self.seconds.popleft().tally)


def counts_of(tally: Tally) -> dict[str, int]:
    """What the page counts."""
    sums: Counter[str] = Counter()
    for key, number in tally.counts.items():
        sums[key[0]] += number
    cancelled = tally.counts[table.FAILURES.name, Cancelled.code]
    return {
        "began": sums[table.BEGAN.name],
        "finished": sums[table.SUCCESSES.name],
        "failed": sums[table.FAILURES.name] - cancelled,
        "cancelled": cancelled,
        "refused": sums[table.REJECTIONS.name],
        "retries": sums[table.RETRIES.name],
        "prompt_tokens": sums[table.PROMPT_TOKENS.name],
        "finished_prompt_tokens": sums[table.FINISHED_PROMPT_TOKENS.name],
        "cached_tokens": sums[table.CACHED_TOKENS.name],
        "output_tokens": sums[table.OUTPUT_TOKENS.name],
        "coalesced_tokens": sums[table.COALESCED_TOKENS.name],
    }


def microseconds(seconds: float) -> int:
    """Whole ones; a float of unix time keeps them apart, one of seconds and a fraction does not."""
    return int(seconds * 1e6)
