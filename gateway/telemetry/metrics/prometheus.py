"""What Prometheus reads: the store's metrics of calls, and of engines when it scrapes.

    CallFeed ──► MetricStore ◄── engines' heartbeats at each scrape ── one registry ──► /metrics
The registry holds the process's own figures (memory, CPU, descriptors) too.

An engine counts from zero in every incarnation, and its series goes by its name: what is exported
adds up what each incarnation brought since it was last read, so that it never falls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from ....core.ports import Clock
from ....proto.v1.node_pb2 import Counters
from ...engines.cluster_view import ClusterView
from ...engines.engine_table import EngineTable
from ...engines.linked_engine import LinkedEngine
from ...engines.reported_load import ReportedLoad
from . import metric_table as table
from .deployment_load import DeploymentLoad, deployment_load, prompt_blocks
from .metric_store import MetricStore
from .metric_table import Metric

FORGET_S = 600.0  # how long an engine that is gone is shown as down

_COUNTERS: tuple[tuple[Metric, Callable[[Counters], float]], ...] = (
    (table.PREEMPTIONS, lambda c: c.num_preemptions),
    (table.CACHE_QUERIES, lambda c: c.prefix_query_tokens),
    (table.CACHE_HITS, lambda c: c.prefix_hit_tokens),
    (table.HOST_HITS, lambda c: c.host_hit_tokens),
    (table.SWAPS, lambda c: c.num_swaps),
    (table.HOST_BYTES_OUT, lambda c: c.host_bytes_out),
    (table.HOST_BYTES_IN, lambda c: c.host_bytes_in),
    (table.DISK_HITS, lambda c: c.disk_hit_tokens),
    (table.DISK_BYTES_OUT, lambda c: c.disk_bytes_out),
    (table.DISK_BYTES_IN, lambda c: c.disk_bytes_in),
    (table.DISK_FAILURES, lambda c: c.disk_failures),
    (table.DRAFTS, lambda c: c.num_drafts),
    (table.DRAFT_TOKENS, lambda c: c.num_draft_tokens),
    (table.ACCEPTED_TOKENS, lambda c: sum(c.accepted_drafts)),
    (table.EXPIRED_LEASES, lambda c: c.num_expired_leases),
    (table.PROMISED_STEPS, lambda c: c.num_promised_steps),
    (table.KEPT_STEPS, lambda c: c.num_kept_steps),
    (table.PROMISE_REFUSALS, lambda c: c.num_refusals),
    (table.PULLS, lambda c: c.num_transfers),
    (table.PULL_BYTES, lambda c: c.transfer_bytes),
    (table.PULL_SECONDS, lambda c: c.transfer_s),
    (table.FETCHES, lambda c: c.num_fetches),
    (table.FETCHED_BLOCKS, lambda c: c.fetched_blocks),
    (table.FETCHED_BYTES, lambda c: c.fetched_bytes),
    (table.FETCH_SECONDS, lambda c: c.fetch_s),
)
_FAILURES: tuple[tuple[Metric, Callable[[Counters], Mapping[str, int]]], ...] = (
    (table.PULL_FAILURES, lambda c: c.failed_transfers),
    (table.FETCH_FAILURES, lambda c: c.failed_fetches),
)
_BY_PLACE: tuple[tuple[Metric, Callable[[Counters], Sequence[int]]], ...] = (
    (table.EXPERT_TOKENS, lambda c: c.expert_tokens),
    (table.ACCEPTED_AT, lambda c: c.accepted_drafts),
)
_GAUGES: tuple[tuple[Metric, Callable[[LinkedEngine, ReportedLoad], float | None]], ...] = (
    (table.NODE_DRAINING, lambda engine, load: load.is_draining),
    (table.RUNNING, lambda engine, load: load.num_running),
    (table.WAITING, lambda engine, load: load.num_waiting),
    (table.WAITING_TOKENS, lambda engine, load: load.waiting_tokens),
    (table.TBT_TARGET, lambda engine, load: load.tbt_target_s),
    (table.ACCEPTANCE_LENGTH, lambda engine, load: load.acceptance_length),
    (table.STEP_COST_ERROR, lambda engine, load: load.step_cost_error),
    (table.KV_USAGE, lambda engine, load: 1 - load.free_blocks / max(1, engine.pool_blocks)),
    (table.KV_FREE, lambda engine, load: load.free_blocks),
    (table.KV_LEASED, lambda engine, load: load.held_blocks),
    (table.KV_CREDIT, lambda engine, load: load.credit_blocks),
    (table.HOST_BLOCKS, lambda engine, load: load.host_blocks),
    (table.DISK_BLOCKS, lambda engine, load: load.disk_blocks),
    (
        table.EXPERT_IMBALANCE,
        lambda engine, load: load.expert_imbalance(len(load.counters.expert_tokens)),
    ),
    (
        table.EXPERT_RANK_IMBALANCE,
        lambda engine, load: (
            load.expert_imbalance(load.expert_ranks) if load.expert_ranks > 1 else None
        ),
    ),
)
_NodeName = tuple[str, str]  # role, name


@dataclass(slots=True)
class _Read:
    """What was added up of one incarnation already; `link` is whose counts of the index these are.

    The engine counts on while its link is down, the gateway begins anew with each link.
    """

    known_s: float = 0.0
    counters: Counters = field(default_factory=Counters)
    link: LinkedEngine | None = None
    num_index_hits: int = 0
    num_stale_hits: int = 0


def full_prefix(prefix: str) -> str:
    """What comes before a metric's name: `vllm` gives vLLM's own colon, others an underscore."""
    if prefix == "vllm":
        return "vllm:"
    return prefix if prefix[-1] in "_:" else f"{prefix}_"


@dataclass(eq=False)
class Exporter:
    """All of a gateway's metrics: `render` answers a scrape.

    `_settle` brings the store's metrics of calls up to date (CallFeed.settle).
    `_certificate_ends_s`: by file, the Unix time at which its certificate ends.
    """

    _store: MetricStore
    _settle: Callable[[], None]
    _engines: EngineTable
    _view: ClusterView
    _clock: Clock
    _is_index_up: Callable[[], bool]
    _num_queued: Callable[[], int]
    _certificate_ends_s: Callable[[], Mapping[str, float]] = dict
    _last_known_s: dict[_NodeName, float] = field(default_factory=dict)
    _read: dict[str, _Read] = field(default_factory=dict)  # by incarnation
    _registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        self._registry.register(self._store)
        ProcessCollector(registry=self._registry)

    def connection_refused(self) -> None:
        """Count a connection of HTTP that was one too many."""
        self._store.add(table.CONNECTIONS_REFUSED)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type, in the format that `accept` prefers."""
        self._refresh()
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def load(self) -> DeploymentLoad:
        """Of the whole deployment, as this gateway knows it."""
        return deployment_load(self._engines.engines.values(), self._num_queued())

    def _refresh(self) -> None:
        """Take over what was counted of calls, and the engines' heartbeats as they are now."""
        self._settle()
        now_s = self._clock.monotonic_s()
        for metric in (table.NODE_UP, *(metric for metric, _ in _GAUGES)):
            self._store.forget(metric)
        for member in self._view.members():
            self._last_known_s[member.role.value, member.name] = now_s
            self._read.setdefault(member.incarnation, _Read()).known_s = now_s
        for name in [n for n, known_s in self._last_known_s.items() if now_s - known_s > FORGET_S]:
            self._forget(name)
        for name in self._last_known_s:
            self._store.set(table.NODE_UP, *name, value=0)
        for incarnation, engine in self._engines.engines.items():
            read = self._read[incarnation]
            self._count_index(engine, read)
            if engine.load is not None:
                self._count(engine, engine.load, read)
        self._read = {i: read for i, read in self._read.items() if now_s - read.known_s <= FORGET_S}
        for reason, count in self._engines.decisions.items():
            self._store.set(table.DECISIONS, reason, value=count)
        for outcome, count in self._engines.moves.items():
            self._store.set(table.MOVES, outcome, value=count)
        self._store.set(table.QUEUED, value=self._num_queued())
        self._note_adapters()
        load = self.load()
        self._store.set(table.DEPLOYMENT_RUNNING, value=load.num_running)
        self._store.set(table.DEPLOYMENT_WAITING, value=load.num_waiting)
        self._store.set(table.DEPLOYMENT_KV_USAGE, value=load.kv_usage)
        self._store.forget(table.CACHE_CONFIG)
        if (blocks := prompt_blocks(self._engines.engines.values())) is not None:
            self._store.set(table.CACHE_CONFIG, *map(str, blocks), value=1)
        self._store.set(table.INDEX_UP, value=self._is_index_up())
        for file, ends_s in self._certificate_ends_s().items():
            self._store.set(table.CERTIFICATE_EXPIRES, file, value=ends_s)

    def _note_adapters(self) -> None:
        """One series, over all engines; none where no engine serves adapters."""
        self._store.forget(table.LORA)
        engines = self._engines.engines.values()
        max_loras = max((engine.max_loras for engine in engines), default=0)
        loads = [engine.load for engine in engines if engine.load is not None]
        running = sorted({name for load in loads for name in load.running_adapters})
        waiting = sorted({name for load in loads for name in load.waiting_adapters})
        if max_loras:
            labels = (str(max_loras), ",".join(running), ",".join(waiting))
            self._store.set(table.LORA, *labels, value=self._clock.unix_ns() / 1e9)

    def _count(self, engine: LinkedEngine, load: ReportedLoad, read: _Read) -> None:
        name = (engine.member.role.value, engine.name)
        self._store.set(table.NODE_UP, *name, value=1)
        for metric, gauge in _GAUGES:
            if (value := gauge(engine, load)) is not None:
                self._store.set(metric, *name, value=value)
        before, read.counters = read.counters, load.counters
        for metric, count in _COUNTERS:
            more = count(load.counters) - count(before)
            self._store.add(metric, *name, value=more)
        for metric, failures in _FAILURES:
            failed_before = failures(before)
            for reason, num in failures(load.counters).items():
                more = num - failed_before.get(reason, 0)
                self._store.add(metric, *name, reason, value=more)
        for metric, counts in _BY_PLACE:
            pairs = zip_longest(counts(load.counters), counts(before), fillvalue=0)
            for place, (tokens, tokens_before) in enumerate(pairs):
                self._store.add(metric, *name, str(place), value=tokens - tokens_before)

    def _count_index(self, engine: LinkedEngine, read: _Read) -> None:
        if read.link is not engine:
            read.link, read.num_index_hits, read.num_stale_hits = engine, 0, 0
        hits, stale = engine.num_index_hits, engine.num_stale_hits
        self._store.add(table.INDEX_HITS, value=hits - read.num_index_hits)
        self._store.add(table.INDEX_STALE, value=stale - read.num_stale_hits)
        read.num_index_hits, read.num_stale_hits = hits, stale

    def _forget(self, name: _NodeName) -> None:
        del self._last_known_s[name]
        for metric, _ in (*_COUNTERS, *_FAILURES, *_BY_PLACE):
            self._store.forget(metric, *name)
