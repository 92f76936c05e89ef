"""The metrics of a gateway: what calls did, as they happen; what engines say, when asked.

    observer ──► MetricStore ◄── EngineSeries.refresh at each scrape ── one registry ──► /metrics
The registry holds the process's own figures (memory, CPU, descriptors) too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from ....core.errors import BatonError
from ....core.ports import Clock
from ....core.request.timeline import Event
from ...engines.cluster_view import ClusterView
from ...engines.engine_table import EngineTable
from ...request.output_chunk import OutputChunk, RequestResult
from ...security.tenancy import Caller
from ..calls.call_figures import call_figures
from ..calls.call_records import CallRecord
from ..calls.call_values import CallFigures
from ..calls.stages import times_of
from ..calls.token_gaps import TokenGaps
from . import metric_table as table
from .engine_series import EngineSeries
from .metric_store import OTHER, MetricStore

MAX_TENANTS = 100
NOBODY = "anonymous"  # where no keys are asked for


@dataclass(frozen=True, slots=True)
class SloTargets:
    """What a call must keep to count as good."""

    ttft_s: float
    tbt_s: float


def full_prefix(prefix: str) -> str:
    """What comes before a metric's name: `vllm` gives vLLM's own colon, others an underscore."""
    if prefix == "vllm":
        return "vllm:"
    return prefix if prefix[-1] in "_:" else f"{prefix}_"


class CallMetrics:
    """`CallObserver`. Children that a chunk needs are looked up once."""

    def __init__(self, store: MetricStore, targets: SloTargets, gaps: TokenGaps) -> None:
        self._store = store
        self._targets = targets
        self._tenants: set[str] = set()
        self._ttft = store.histogram(table.TTFT)
        self._gaps = store.histogram(table.INTER_TOKEN)
        self._handoff_gaps = store.histogram(table.HANDOFF_GAP)
        self._output_tokens = store.number(table.OUTPUT_TOKENS)
        self._coalesced_tokens = store.number(table.COALESCED_TOKENS)
        self._in_flight = store.number(table.IN_FLIGHT)
        gaps.tell(self._count_gaps)

    def call_refused(self, caller: Caller, error: BatonError) -> None:
        self._store.number(table.REJECTIONS, error.code).value += 1

    def call_began(self, record: CallRecord) -> None:
        self._in_flight.value += 1
        self._store.number(table.PROMPT_TOKENS).value += record.prompt_tokens
        self._store.histogram(table.LOOKUP).observe(record.lookup_s)

    def chunk_delivered(self, record: CallRecord, chunk: OutputChunk, now_s: float) -> None:
        num_tokens = len(chunk.token_ids)
        times = record.token_times[chunk.sample_index]
        num_deliveries = len(times)
        if not num_tokens:
            return
        self._output_tokens.value += num_tokens
        self._coalesced_tokens.value += num_tokens - 1
        if num_deliveries > 1:
            gap_s = now_s - times[-2][0]
            self._gaps.observe(gap_s)
            if num_deliveries == 2 and times[0][1] == 1:
                self._handoff_gaps.observe(gap_s)
        elif sum(map(bool, record.token_times)) == 1:
            self._ttft.observe(now_s - record.arrived_s)

    def _count_gaps(self, gaps_s: Sequence[float], _: float) -> None:
        self._output_tokens.value += len(gaps_s)
        for gap_s in gaps_s:
            self._gaps.observe(gap_s)

    def call_ended(self, record: CallRecord) -> None:
        figures = call_figures(record)
        self._in_flight.value -= 1
        if figures.is_finished:
            self._finished(record, figures)
        else:
            self._store.number(table.FAILURES, figures.outcome).value += 1
        for tpot_s in figures.tpot_s:
            self._store.histogram(table.TPOT).observe(tpot_s)
        if not figures.is_cancelled:
            targets = self._targets
            is_good = figures.meets(ttft_slo_s=targets.ttft_s, tbt_slo_s=targets.tbt_s)
            self._store.number(table.SLO_JUDGED).value += 1
            self._store.number(table.SLO_GOOD).value += is_good
        self._charge(record.caller.tenant, figures)

    def _finished(self, record: CallRecord, figures: CallFigures) -> None:
        store = self._store
        store.number(table.SUCCESSES, figures.outcome).value += 1
        store.number(table.RETRIES).value += max(0, figures.attempts - 1)
        store.number(table.CACHED_TOKENS).value += figures.cached_tokens
        store.histogram(table.E2E).observe(figures.e2e_s)
        store.histogram(table.PROMPT_LENGTH).observe(figures.prompt_tokens)
        store.histogram(table.OUTPUT_LENGTH).observe(figures.output_tokens)
        for stage, seconds in figures.stages.items():
            store.histogram(table.STAGE, stage).observe(seconds)
        if transfer := figures.transfer:
            edge = (transfer.transport, transfer.source, transfer.puller)
            store.histogram(table.KV_SECONDS, *edge).observe(transfer.seconds)
            store.number(table.KV_BYTES, *edge).value += transfer.num_bytes
        if result := record.results.get(0):
            self._phases(result)

    def _phases(self, result: RequestResult) -> None:
        """The first sample's phases, by vLLM's definitions as far as they fit two nodes."""
        times = times_of(result.timeline)
        for metric, first, last in (
            (table.QUEUE, Event.ARRIVED, Event.PREFILL_STARTED),
            (table.PREFILL, Event.PREFILL_STARTED, Event.FIRST_TOKEN),
            (table.DECODE, Event.FIRST_TOKEN, Event.FINISHED),
            (table.INFERENCE, Event.PREFILL_STARTED, Event.FINISHED),
        ):
            seconds = times.between_s(first, last)
            if seconds is not None:
                self._store.histogram(metric).observe(seconds)

    def _charge(self, tenant: str, figures: CallFigures) -> None:
        """Count for a tenant; those beyond MAX_TENANTS are one."""
        tenant = tenant or NOBODY
        if tenant not in self._tenants:
            if len(self._tenants) >= MAX_TENANTS:
                tenant = OTHER
            else:
                self._tenants.add(tenant)
        store = self._store
        store.number(table.TENANT_REQUESTS, tenant).value += 1
        store.number(table.TENANT_TOKENS, tenant, "prompt").value += figures.prompt_tokens
        store.number(table.TENANT_TOKENS, tenant, "generation").value += figures.output_tokens


class Exporter:
    """All of a gateway's metrics: `calls` observes, `render` answers a scrape."""

    def __init__(
        self,
        prefix: str,
        model: str,
        targets: SloTargets,
        engines: EngineTable,
        view: ClusterView,
        clock: Clock,
        is_index_up: Callable[[], bool],
        num_queued: Callable[[], int],
        gaps: TokenGaps,
        certificate_ends_s: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """`certificate_ends_s`: by file, the Unix time at which its certificate ends."""
        store = MetricStore(table.ALL, full_prefix(prefix), model)
        self._store, self._certificate_ends_s = store, certificate_ends_s
        self._gaps = gaps
        self._connections_refused = store.number(table.CONNECTIONS_REFUSED)
        self.calls = CallMetrics(store, targets, gaps)
        self._series = EngineSeries(store, engines, view, clock, is_index_up, num_queued)
        self._registry = CollectorRegistry()
        self._registry.register(store)
        ProcessCollector(registry=self._registry)

    def connection_refused(self) -> None:
        """Count a connection of HTTP that was one too many."""
        self._connections_refused.value += 1

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type, in the format that `accept` prefers."""
        self._refresh()
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _refresh(self) -> None:
        self._gaps.settle()
        self._series.refresh()
        for file, ends_s in self._certificate_ends_s().items():
            self._store.number(table.CERTIFICATE_EXPIRES, file).value = ends_s
