"""Builds a gateway's telemetry from its configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from ...core.config import GatewayConfig
from ...core.ports import Clock
from ..engines.cluster_view import ClusterView
from ..engines.engine_table import EngineTable
from .call_counts import CallCounts
from .call_feed import CallFeed, OnEnded
from .calls.ended_call import log_ended, log_refused
from .calls.slo import SloTargets
from .calls.traces import CallTraces, open_traces
from .metrics.metric_store import MetricStore
from .metrics.prometheus import Exporter, full_prefix
from .window.window import TelemetryWindow


class Telemetry:
    """`feed` receives every call; HTTP routes read `window` and `exporter`."""

    def __init__(
        self,
        config: GatewayConfig,
        model: str,
        engines: EngineTable,
        view: ClusterView,
        clock: Clock,
        is_index_up: Callable[[], bool],
        num_queued: Callable[[], int],
        certificate_ends_s: Callable[[], Mapping[str, float]],
    ) -> None:
        """Raises StartupFailed if a package for what is configured is not installed."""
        self.window = TelemetryWindow(clock)
        self.traces: CallTraces | None = None
        on_ended: list[OnEnded] = []
        if config.otlp_traces_endpoint is not None:
            self.traces = open_traces(config.otlp_traces_endpoint, config.otlp_traces_ratio)
            on_ended.append(self.traces.call_ended)
        if config.log_json:
            on_ended.append(log_ended)
        on_refused = [log_refused] if config.log_json else []
        counts = CallCounts(SloTargets(config.slo_ttft_s, config.slo_tbt_s))
        store = MetricStore(full_prefix(config.metrics_prefix), model)
        self.feed = CallFeed(clock, counts, self.window, store, on_refused, on_ended)
        of_engines = (engines, view, clock, is_index_up, num_queued, certificate_ends_s)
        self.exporter = Exporter(store, self.feed.settle, *of_engines)

    async def close(self) -> None:
        """Count the last calls and send the last traces."""
        self.feed.settle()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)
