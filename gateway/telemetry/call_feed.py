"""What the front door reports of calls: counted once, for all who read it.

    token ──► gaps ─┐ at the end of each second, or when     ┌─► TelemetryWindow   the live page
    call ───► Tally ┴─── somebody reads: settle ─────────────┴─► MetricStore       Prometheus
    a call that is over ──► EndedCall ──► log lines, traces
Nearly all deliveries are a single token behind a sample's second: each costs an append here.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence

from ...core.errors import BatonError, Cancelled
from ...core.ports import Clock
from ...core.request.timeline import Event
from ..request.output_chunk import OutputChunk, RequestResult
from ..security.tenancy import Caller
from .calls.call_record import CallRecord, EndedCall, between_s, ended_call, times_of
from .calls.slo import SloTargets
from .metrics import metric_table as table
from .metrics.metric_store import OTHER, MetricStore
from .metrics.tally import Tally, bucket_of
from .window.window import TelemetryWindow

log = logging.getLogger(__name__)

MAX_TENANTS = 100
NOBODY = "anonymous"  # where no keys are needed
_MAX_GAPS = 1024  # that wait: counting them is a pause in all streams
_PHASES = (  # by vLLM's definitions as far as they fit two nodes
    (table.QUEUE, Event.ARRIVED, Event.PREFILL_STARTED),
    (table.PREFILL, Event.PREFILL_STARTED, Event.FIRST_TOKEN),
    (table.DECODE, Event.FIRST_TOKEN, Event.FINISHED),
    (table.INFERENCE, Event.PREFILL_STARTED, Event.FINISHED),
)

OnRefused = Callable[[Caller, BatonError], None]
OnEnded = Callable[[CallRecord, EndedCall], None]


class CallFeed:
    """Use from the gateway's event loop. What fails in here harms no call, and is logged once.

    `on_refused`, `on_ended`: what else is to have such calls.
    """

    def __init__(
        self,
        clock: Clock,
        targets: SloTargets,
        window: TelemetryWindow,
        store: MetricStore,
        on_refused: Sequence[OnRefused] = (),
        on_ended: Sequence[OnEnded] = (),
    ) -> None:
        self._clock = clock
        self._targets = targets
        self._window = window
        self._store = store
        self._on_refused = (self._count_refused, *on_refused)
        self._on_ended = (self._count_ended, *on_ended)
        self._tenants: set[str] = set()
        self._gaps_s: list[float] = []  # not in the tally yet
        self._tally = Tally()  # of one second
        self._until_s = 0.0  # when that second ends
        self._logged: set[tuple[str, type]] = set()
        window.settle = self.settle

    def call_refused(self, caller: Caller, error: BatonError) -> None:
        """A call that ended before it was routed: bad, unauthorised, over a limit."""
        for report in self._on_refused:
            self._shield(report, caller, error)

    def call_began(self, record: CallRecord) -> None:
        self._shield(self._count_began, record)

    def chunk_delivered(self, record: CallRecord, chunk: OutputChunk, now_s: float) -> None:
        """The record's `token_times` have it already."""
        times = record.token_times[chunk.sample_index]
        if len(chunk.token_ids) == 1 and len(times) > 2:
            if now_s >= self._until_s or len(self._gaps_s) >= _MAX_GAPS:
                self._shield(self._second, now_s)
            self._gaps_s.append(now_s - times[-2][0])
        elif chunk.token_ids:
            self._shield(self._count_chunk, record, chunk, now_s)

    def call_ended(self, record: CallRecord) -> None:
        """Once for each call that began, whatever ended it."""
        self._shield(self._report_ended, record)

    def settle(self) -> None:
        """Give the window and the store all that was counted."""
        self._count_gaps()
        tally, self._tally = self._tally, Tally()
        self._window.take(tally, round(self._until_s) - 1)
        self._store.take(tally)
        self._store.set(table.IN_FLIGHT, value=self._window.num_running)

    # --- counting ---------------------------------------------------------------------------------

    def _second(self, now_s: float) -> Tally:
        """Where to count what happens now."""
        self._count_gaps()
        if now_s >= self._until_s:
            self.settle()
            self._until_s = math.floor(now_s) + 1.0
        return self._tally

    def _count_gaps(self) -> None:
        gaps_s, self._gaps_s = self._gaps_s, []
        if gaps_s:
            histogram = self._tally.histograms[(table.INTER_TOKEN.name,)]
            histogram.add(Counter(map(bucket_of, gaps_s)), sum(gaps_s))
            self._tally.count(table.OUTPUT_TOKENS, len(gaps_s))

    def _count_refused(self, _: Caller, error: BatonError) -> None:
        self._second(self._clock.monotonic_s()).count(table.REJECTIONS, 1, error.code)

    def _count_began(self, record: CallRecord) -> None:
        tally = self._second(self._clock.monotonic_s())
        self._window.num_running += 1
        tally.count(table.BEGAN)
        tally.count(table.PROMPT_TOKENS, record.prompt_tokens)
        tally.observe(table.LOOKUP, record.lookup_s)

    def _count_chunk(self, record: CallRecord, chunk: OutputChunk, now_s: float) -> None:
        tally = self._second(now_s)
        times = record.token_times[chunk.sample_index]
        tally.count(table.OUTPUT_TOKENS, len(chunk.token_ids))
        tally.count(table.COALESCED_TOKENS, len(chunk.token_ids) - 1)
        if len(times) > 1:
            gap_s = now_s - times[-2][0]
            tally.observe(table.INTER_TOKEN, gap_s)
            if len(times) == 2 and times[0][1] == 1:
                tally.observe(table.HANDOFF_GAP, gap_s)
        elif sum(map(bool, record.token_times)) == 1:  # no other sample was before it
            tally.observe(table.TTFT, now_s - record.arrived_s)

    def _count_ended(self, record: CallRecord, call: EndedCall) -> None:
        tally = self._second(self._clock.monotonic_s())
        self._window.num_running -= 1
        tally.ended.append(call)
        if call.is_finished:
            _count_finished(tally, record.results.get(0), call)
        else:
            tally.count(table.FAILURES, 1, call.outcome)
        for tpot_s in record.tpots_s:
            tally.observe(table.TPOT, tpot_s)
        if not isinstance(record.error, Cancelled):
            worst_s = max(record.first_tokens_s, default=math.inf) - record.arrived_s
            judged = (call.is_finished, worst_s, call.max_gap_s)
            tally.judged.add(judged)
            tally.count(table.SLO_JUDGED)
            tally.count(table.SLO_GOOD, self._targets.are_met(judged))
        tenant = self._tenant(record.caller.tenant or NOBODY)
        tally.count(table.TENANT_REQUESTS, 1, tenant)
        tally.count(table.TENANT_TOKENS, call.prompt_tokens, tenant, "prompt")
        tally.count(table.TENANT_TOKENS, call.output_tokens, tenant, "generation")

    def _report_ended(self, record: CallRecord) -> None:
        call = ended_call(record)
        for report in self._on_ended:
            self._shield(report, record, call)

    def _tenant(self, name: str) -> str:
        """The label of a tenant; those beyond MAX_TENANTS are one."""
        if name not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            return OTHER
        self._tenants.add(name)
        return name

    def _shield(self, what: Callable[..., object], *args: object) -> None:
        """It has a bug if it raises, and the call goes on."""
        try:
            what(*args)
        except Exception as error:
            kind = (getattr(what, "__qualname__", repr(what)), type(error))
            if kind not in self._logged:
                self._logged.add(kind)
                log.error("%s failed; it is not logged again", kind[0], exc_info=error)


def _count_finished(tally: Tally, first: RequestResult | None, call: EndedCall) -> None:
    tally.count(table.SUCCESSES, 1, call.outcome)
    tally.count(table.RETRIES, max(0, call.attempts - 1))
    tally.count(table.CACHED_TOKENS, call.cached_tokens)
    tally.observe(table.E2E, call.e2e_s)
    tally.count(table.FINISHED_PROMPT_TOKENS, call.prompt_tokens)
    tally.observe(table.PROMPT_LENGTH, call.prompt_tokens)
    tally.observe(table.OUTPUT_LENGTH, call.output_tokens)
    for stage, seconds in call.stages.items():
        tally.observe(table.STAGE, seconds, stage)
    if transfer := call.transfer:
        edge = (transfer.transport, transfer.source, transfer.puller)
        tally.observe(table.KV_SECONDS, transfer.seconds, *edge)
        tally.count(table.KV_BYTES, transfer.num_bytes, *edge)
        tally.count(table.PULLER_CACHED_TOKENS, transfer.puller_cached_tokens)
    if first is not None:
        times = times_of(first.timeline)
        for metric, begin, end in _PHASES:
            if (spent_s := between_s(times, begin, end)) is not None:
                tally.observe(metric, spent_s)
