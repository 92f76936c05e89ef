"""Exports the metrics of calls, and at each scrape those of engines, to Prometheus.

    CallFeed ──► MetricStore ◄── engines' heartbeats at each scrape ── one registry ──► /metrics
The registry also has the process's own metrics (memory, CPU, descriptors).

An engine's counters restart at zero in every incarnation, but its series are by name: each scrape
adds each incarnation's increase since the last scrape, so that a series never decreases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from ....core.membership import Role
from ....core.ports import Clock
from ....proto.v1.node_pb2 import Counters
from ...engines.cluster_view import ClusterView
from ...engines.engine_table import EngineTable
from ...engines.linked_engine import LinkedEngine
from . import metric_table as table
from .deployment_load import DeploymentLoad, deployment_load, prompt_blocks
from .metric_store import MetricStore
from .metric_table import Metric

FORGET_S = 600.0  # for which a lost engine is exported as down


def _counts(metric: Metric, counters: Counters) -> dict[tuple[str, ...], float]:
    """An engine's counts by the metric's label beyond OF_ENGINE (keys of a map, indices of a list);
    without such a label, their sum."""
    found = getattr(counters, metric.source)
    if isinstance(found, int | float):
        return {(): found}
    items = found.items() if hasattr(found, "items") else enumerate(found)
    if metric.labels == table.OF_ENGINE:
        return {(): sum(number for _, number in items)}
    return {(str(label),): number for label, number in items}


_COUNTERS = [metric for metric in table.GROUPS["Engines"] if metric.kind == "counter"]
_GAUGES = [metric for metric in table.GROUPS["Engines"] if metric.kind == "gauge"]
_NodeName = tuple[str, str]  # role, name


@dataclass(slots=True)
class _Read:
    """The exported counters of one incarnation, which continues to count while its link is down."""

    known_s: float = 0.0
    counters: Counters = field(default_factory=Counters)


def full_prefix(prefix: str) -> str:
    """The prefix with its separator: a colon for `vllm`, as in vLLM, else an underscore."""
    if prefix == "vllm":
        return "vllm:"
    return prefix if prefix[-1] in "_:" else f"{prefix}_"


@dataclass(eq=False)
class Exporter:
    """All metrics of a gateway; `render` serves a scrape.

    `_settle` updates the store's metrics of calls (CallFeed.settle).
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
        """Count an HTTP connection beyond the limit."""
        self._store.add(table.CONNECTIONS_REFUSED)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type, in the format that `accept` prefers."""
        self._refresh()
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def load(self) -> DeploymentLoad:
        """The load of the whole deployment, as far as this gateway knows."""
        return deployment_load(self._engines.engines.values(), self._num_queued())

    def _refresh(self) -> None:
        """Update the store by the calls counted so far and the engines' last heartbeats."""
        self._settle()
        now_s = self._clock.monotonic_s()
        for metric in _GAUGES:
            self._store.forget(metric)
        for member in self._view.members():
            self._last_known_s[member.role.value, member.name] = now_s
            self._read.setdefault(member.incarnation, _Read()).known_s = now_s
        for name in [n for n, known_s in self._last_known_s.items() if now_s - known_s > FORGET_S]:
            self._forget(name)
        for name in self._last_known_s:
            self._store.set(table.NODE_UP, *name, value=0)
        for incarnation, engine in self._engines.engines.items():
            self._count(engine, self._read[incarnation])
        self._read = {i: read for i, read in self._read.items() if now_s - read.known_s <= FORGET_S}
        for reason, count in self._engines.plans.decisions().items():
            self._store.set(table.DECISIONS, reason, value=count)
        for outcome, count in self._engines.plans.moves.items():
            self._store.set(table.MOVES, outcome, value=count)
        prompts = self._engines.prompts
        self._store.set(table.INDEX_HITS, value=prompts.num_index_hits)
        self._store.set(table.INDEX_STALE, value=prompts.num_stale_hits)
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
        """Set the one LoRA series of all engines; none if no engine serves adapters."""
        self._store.forget(table.LORA)
        engines = self._engines.engines.values()
        max_loras = max((engine.welcome.max_loras for engine in engines), default=0)
        loads = [engine.load for engine in engines]
        running = sorted({name for load in loads for name in load.running_adapters})
        waiting = sorted({name for load in loads for name in load.waiting_adapters})
        if max_loras:
            labels = (str(max_loras), ",".join(running), ",".join(waiting))
            self._store.set(table.LORA, *labels, value=self._clock.unix_ns() / 1e9)

    def _count(self, engine: LinkedEngine, read: _Read) -> None:
        load, name = engine.load, (engine.member.role.value, engine.name)
        num_ranks, expert_tokens = load.expert_ranks, load.counters.expert_tokens
        values: dict[Metric, float | None] = {
            metric: getattr(load, metric.source) for metric in _GAUGES if metric.source
        } | {
            table.NODE_UP: 1,
            table.KV_USAGE: 1 - load.free_blocks / max(1, engine.pool_blocks),
            table.EXPERT_IMBALANCE: _imbalance(expert_tokens, len(expert_tokens)),
            table.EXPERT_RANK_IMBALANCE: (
                _imbalance(expert_tokens, num_ranks) if num_ranks > 1 else None
            ),
        }
        for metric, value in values.items():
            if value is not None:
                self._store.set(metric, *name, value=value)
        before, read.counters = read.counters, load.counters
        for metric in _COUNTERS:
            counted_before = _counts(metric, before)
            for labels, number in _counts(metric, load.counters).items():
                more = number - counted_before.get(labels, 0)
                self._store.add(metric, *name, *labels, value=more)

    def _forget(self, name: _NodeName) -> None:
        del self._last_known_s[name]
        role, node = name
        for metric in _COUNTERS:
            self._store.forget(metric, role=role, node=node)
        end = "src" if role == Role.PREFILL.value else "dst"
        for metric in (table.KV_SECONDS, table.KV_BYTES):
            self._store.forget(metric, **{end: node})


def _imbalance(expert_tokens: Sequence[int], num_parts: int) -> float | None:
    """The tokens of the largest part over the mean, where the experts are split in order into
    `num_parts` equal parts. None without tokens."""
    size = len(expert_tokens) // max(1, num_parts)
    if not size or not sum(expert_tokens):
        return None
    parts = [sum(expert_tokens[n * size : (n + 1) * size]) for n in range(num_parts)]
    return max(parts) * num_parts / max(1, sum(parts))
