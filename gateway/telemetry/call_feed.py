"""The front door's reports of calls, counted once for all that read them.

    delivery ──► Noted ─ counted later ─┐       at the end of each    ┌─► TelemetryWindow  live page
    call ───────────────────────────────┴► Tally ─ second, or before ─┴─► MetricStore     Prometheus
    an ended call ──► EndedCall ──► log lines, traces     a read: settle
A delivery costs a few appends; many are counted at once, beside the streams.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...core.errors import BatonError
from ...core.ports import Clock
from ..request.output_chunk import OutputChunk
from ..security.caller import Caller
from .call_counts import CallCounts
from .calls.call_record import CallRecord
from .calls.ended_call import EndedCall, ended_call
from .metrics import metric_table as table
from .metrics.metric_store import MetricStore
from .metrics.tally import Tally
from .window.window import TelemetryWindow

log = logging.getLogger(__name__)

_MAX_GAPS = 1024  # noted before they are counted: the count is a pause in all streams

OnRefused = Callable[[Caller, BatonError], None]
OnEnded = Callable[[CallRecord, EndedCall], None]


@dataclass(eq=False)
class CallFeed:
    """Use from the gateway's event loop. An exception in here fails no call, and is logged once.

    `_on_refused`, `_on_ended`: called at once for each refused and each ended call. `_until_s`: the
    end of the second that is counted.
    """

    _clock: Clock
    _counts: CallCounts
    _window: TelemetryWindow
    _store: MetricStore
    _on_refused: Sequence[OnRefused] = ()
    _on_ended: Sequence[OnEnded] = ()
    _until_s: float = 0.0
    _logged: set[tuple[str, type]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._window.settle = self.settle

    def call_refused(self, caller: Caller, error: BatonError) -> None:
        """Note a call that ended before it was routed: invalid, unauthorised, over a limit."""
        self._begin_second(self._clock.monotonic_s())
        self._shield(self._counts.refused, error)
        for report in self._on_refused:
            self._shield(report, caller, error)

    def call_began(self, record: CallRecord) -> None:
        self._begin_second(self._clock.monotonic_s())
        record.token_times = [[] for _ in range(record.request.options.n)]
        self._window.num_running += 1
        self._shield(self._counts.began, record)

    def chunk_delivered(self, record: CallRecord, chunk: OutputChunk) -> None:
        """Note a chunk that the client has as of now."""
        now_s = self._clock.monotonic_s()
        if now_s >= self._until_s:
            self._begin_second(now_s)
        elif len(self._counts.noted.gaps_s) >= _MAX_GAPS:
            self._shield(self._counts.delivered)
        noted, times = self._counts.noted, record.token_times[chunk.sample_index]
        if chunk.result is not None:
            record.results[chunk.sample_index] = chunk.result
        if not (num_tokens := len(chunk.token_ids)):
            return
        times.append((now_s, num_tokens))
        num_deliveries = len(times)
        if num_tokens > 1:
            noted.coalesced_tokens += num_tokens - 1
        if num_deliveries > 1:
            gap_s = now_s - times[-2][0]
            noted.gaps_s.append(gap_s)
            if num_deliveries == 2 and times[0][1] == 1:
                noted.handoff_gaps_s.append(gap_s)
        else:
            noted.num_firsts += 1
            if sum(map(bool, record.token_times)) == 1:  # the first sample to have a token
                noted.ttfts_s.append(now_s - record.arrived_s)

    def call_ended(self, record: CallRecord) -> None:
        """Note the end of a call that began; once for each, however it ended."""
        record.ended_s = self._clock.monotonic_s()
        self._begin_second(record.ended_s)
        self._window.num_running -= 1
        self._shield(self._summarise, record)

    def settle(self) -> None:
        """Pass what was counted to the window and the store."""
        self._shield(self._counts.delivered)
        tally, self._counts.tally = self._counts.tally, Tally()
        self._window.take(tally, round(self._until_s) - 1)
        self._store.take(tally)
        self._store.set(table.IN_FLIGHT, value=self._window.num_running)

    def _begin_second(self, now_s: float) -> None:
        """Pass on what was counted before, if this is another second."""
        if now_s >= self._until_s:
            self._shield(self.settle)
            self._until_s = math.floor(now_s) + 1.0

    def _summarise(self, record: CallRecord) -> None:
        call = ended_call(record)
        self._shield(self._counts.ended, record, call)
        for report in self._on_ended:
            self._shield(report, record, call)

    def _shield(self, what: Callable[..., object], *args: object) -> None:
        """Call it; if it raises, log that as a bug, once: the call goes on."""
        try:
            what(*args)
        except Exception as error:
            kind = (getattr(what, "__qualname__", repr(what)), type(error))
            if kind not in self._logged:
                self._logged.add(kind)
                log.error("%s failed; it is not logged again", kind[0], exc_info=error)
