"""The last minutes and the last hour, for the live page and for percentiles.

    CallFeed ── a second's Tally ─────────┬─► last_minutes   a row a second
    another gateway's second (merge) ─────┼─► last_hour      a row every half minute
                                          └─► outbox         own seconds, for other gateways
Memory is bounded by the spans, not by the load or the number of gateways. Knows nodes only by their
names in results. snapshot.py renders the window as JSON, window_share.py exchanges it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from ....core.errors import Cancelled
from ....core.ports import Clock
from ..calls.ended_call import EndedCall
from ..metrics import metric_table as table
from ..metrics.tally import Tally
from .rows import Rows

SPAN_S = 300
HOUR_S, HOUR_ROW_S = 3600, 30
MAX_RECENT = 100
MAX_SHARED_CALLS = 8  # of one second, for the lists of other gateways
LATENCIES = {
    "ttft": table.TTFT,
    "tbt": table.INTER_TOKEN,
    "handoff_gap": table.HANDOFF_GAP,
    "tpot": table.TPOT,
    "e2e": table.E2E,
}
_COUNTS = {
    "began": table.BEGAN,
    "finished": table.SUCCESSES,
    "refused": table.REJECTIONS,
    "retries": table.RETRIES,
    "prompt_tokens": table.PROMPT_TOKENS,
    "finished_prompt_tokens": table.FINISHED_PROMPT_TOKENS,
    "cached_tokens": table.CACHED_TOKENS,
    "output_tokens": table.OUTPUT_TOKENS,
    "coalesced_tokens": table.COALESCED_TOKENS,
}
KEPT = {
    metric.name: metric
    for metric in (
        *(*LATENCIES.values(), *_COUNTS.values(), table.FAILURES, table.PULLER_CACHED_TOKENS),
        *(table.STAGE, table.KV_SECONDS, table.KV_BYTES),
    )
}


class TelemetryWindow:
    """Read and written on the gateway's event loop.

    `num_running`: calls at this gateway now; `num_running_elsewhere`: at the others. `began_s`:
    the earliest known start of a gateway. `outbox`: own seconds by number, the oldest first, at
    most SPAN_S; set and emptied by window_share.py. `lag_s`: how long it may take until a second
    includes the other gateways.
    """

    def __init__(self, clock: Clock, span_s: int = SPAN_S, max_recent: int = MAX_RECENT) -> None:
        self.num_running = 0
        self.num_running_elsewhere = 0
        self.lag_s = 0
        self.outbox: dict[int, Tally] | None = None
        self.settle: Callable[[], None] = lambda: None  # set by the CallFeed
        self._clock = clock
        self.began_s = clock.monotonic_s()
        self._unix_offset_s = clock.unix_ns() / 1e9 - self.began_s
        self._last_minutes = Rows(1, span_s, KEPT)
        self._last_hour = Rows(HOUR_ROW_S, HOUR_S, KEPT)
        # Calls with the time at which they were counted here, or received.
        self.recent: deque[tuple[float, EndedCall]] = deque(maxlen=max_recent)

    # --- writing ----------------------------------------------------------------------------------

    def take(self, tally: Tally, number: int) -> None:
        """Add the tally of this gateway for this second, or for a part of it."""
        if not (tally.counts or tally.histograms):
            return
        self._add(number, 1, tally)
        if self.outbox is not None:
            own = self.outbox.setdefault(number, Tally())
            own.join(tally, KEPT)
            own.ended += tally.ended[: MAX_SHARED_CALLS - len(own.ended)]
            if len(self.outbox) > SPAN_S:
                del self.outbox[next(iter(self.outbox))]

    def merge(self, number: int, row_s: int, row: Tally) -> None:
        """Add another gateway's row, of 1 s or HOUR_ROW_S, that begins at this second."""
        self.began_s = min(self.began_s, number)
        self._add(number, row_s, row)

    def _add(self, number: int, row_s: int, tally: Tally) -> None:
        now_s = self.now_s()
        for rows in (self._last_minutes, self._last_hour):
            if row_s <= rows.row_s:
                rows.expire(int(now_s))
                rows.add(number, tally)
        self.recent.extend((now_s, call) for call in tally.ended)

    # --- reading ----------------------------------------------------------------------------------

    def rows(self, *, of_hour: bool = False) -> Rows:
        """Those of the last minutes or of the last hour, as of now."""
        self.settle()
        rows = self._last_hour if of_hour else self._last_minutes
        rows.expire(int(self.now_s()))
        return rows

    def covered_s(self, rows: Rows) -> float:
        """The part of the span in which a gateway was running: the divisor of rates."""
        return min(float(rows.span_s), max(1.0, self.now_s() - self.began_s))

    def now_s(self) -> float:
        return self._clock.monotonic_s()

    def to_unix_s(self, monotonic_s: float) -> float:
        """Unix time, consistent with the window even if the host's clock is set."""
        return monotonic_s + self._unix_offset_s


def counts_of(tally: Tally) -> dict[str, int]:
    """The counts that the live page shows."""
    sums: Counter[str] = Counter()
    for key, number in tally.counts.items():
        sums[key[0]] += number
    cancelled = tally.counts[table.FAILURES.name, Cancelled.code]
    found = {name: sums[metric.name] for name, metric in _COUNTS.items()}
    return found | {"failed": sums[table.FAILURES.name] - cancelled, "cancelled": cancelled}
