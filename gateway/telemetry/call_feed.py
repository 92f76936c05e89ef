"""The front door's reports of calls, counted once for all that read them.

    call, token ──► Noted ─ at the end of each second, or ──► Tally ─┬─► TelemetryWindow  live page
                            before a read: settle                    └─► MetricStore   Prometheus
    an ended call ──► EndedCall ──► log lines, traces
A call or a token costs a few appends; what is noted is counted later, beside the streams.
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
from .call_counts import CallCounts, Noted
from .calls.call_record import CallRecord
from .calls.ended_call import EndedCall, ended_call
from .metrics import metric_table as table
from .metrics.metric_store import MetricStore
from .metrics.tally import Tally
from .window.window import TelemetryWindow

log = logging.getLogger(__name__)

# Noted before they are counted: the count is a pause in all streams.
_MAX_GAPS = 1024
_MAX_ENDED = 8

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
        self._note(self._clock.monotonic_s()).refused[error.code] += 1
        for report in self._on_refused:
            self._shield(report, caller, error)

    def call_began(self, record: CallRecord) -> None:
        noted = self._note(self._clock.monotonic_s())
        record.token_times = [[] for _ in range(record.request.options.n)]
        self._window.num_running += 1
        noted.lookups_s.append(record.lookup_s)
        noted.prompt_tokens += record.prompt_tokens

    def chunk_delivered(self, record: CallRecord, chunk: OutputChunk) -> None:
        """Note a chunk that the client has as of now."""
        now_s = self._clock.monotonic_s()
        noted, times = self._counts.noted, record.token_times[chunk.sample_index]
        if now_s >= self._until_s or len(noted.gaps_s) >= _MAX_GAPS:
            noted = self._note(now_s)
        if chunk.result is not None:
            record.results[chunk.sample_index] = chunk.result
        if not (num_tokens := len(chunk.token_ids)):
            return
        times.append((now_s, num_tokens))
        num_deliveries = len(times)
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
        self._note(record.ended_s).ended.append(record)
        self._window.num_running -= 1
        if self._on_ended:
            self._shield(self._report_ended, record)

    def settle(self) -> None:
        """Count what was noted, and pass the tally to the window and the store."""
        self._count()
        tally, self._counts.tally = self._counts.tally, Tally()
        self._window.take(tally, round(self._until_s) - 1)
        self._store.take(tally)
        self._store.set(table.IN_FLIGHT, value=self._window.num_running)

    def _note(self, now_s: float) -> Noted:
        """Returns where to note what happens now."""
        noted = self._counts.noted
        if now_s >= self._until_s:
            self._shield(self.settle)
            self._until_s = math.floor(now_s) + 1.0
        elif len(noted.gaps_s) >= _MAX_GAPS or len(noted.ended) >= _MAX_ENDED:
            self._count()
        return self._counts.noted

    def _count(self) -> None:
        noted, self._counts.noted = self._counts.noted, Noted()
        self._shield(self._counts.count, noted)
        for record in noted.ended:
            self._shield(self._counts.count_ended, record)

    def _report_ended(self, record: CallRecord) -> None:
        call = ended_call(record)
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
