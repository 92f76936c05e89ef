"""Builds a gateway's telemetry from its configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...core.config import GatewayConfig
from ...core.ports import Clock
from ..engines.cluster_view import ClusterView
from ..engines.engine_table import EngineTable
from .call_feed import CallFeed, OnEnded
from .calls.ended_call import log_ended, log_refused
from .calls.slo import SloTargets
from .calls.traces import CallTraces, open_traces
from .metrics.metric_store import MetricStore
from .metrics.metric_table import ALL
from .metrics.prometheus import Exporter, full_prefix
from .window.window import TelemetryWindow


@dataclass(frozen=True, slots=True)
class Telemetry:
    """`feed` receives every call; HTTP routes read `window` and `exporter`."""

    feed: CallFeed
    window: TelemetryWindow
    exporter: Exporter
    traces: CallTraces | None

    @staticmethod
    def of(
        config: GatewayConfig,
        model: str,
        engines: EngineTable,
        view: ClusterView,
        clock: Clock,
        is_index_up: Callable[[], bool],
        num_queued: Callable[[], int],
        certificate_ends_s: Callable[[], Mapping[str, float]],
    ) -> Telemetry:
        """Raises StartupFailed if a package for what is configured is not installed."""
        window = TelemetryWindow(clock)
        store = MetricStore(ALL, full_prefix(config.metrics_prefix), model)
        traces = None
        on_ended: list[OnEnded] = []
        if config.otlp_traces_endpoint is not None:
            traces = open_traces(config.otlp_traces_endpoint, config.otlp_traces_ratio)
            on_ended.append(traces.call_ended)
        if config.log_json:
            on_ended.append(log_ended)
        on_refused = [log_refused] if config.log_json else []
        targets = SloTargets(config.slo_ttft_s, config.slo_tbt_s)
        feed = CallFeed(clock, targets, window, store, on_refused, on_ended)
        of_engines = (engines, view, clock, is_index_up, num_queued, certificate_ends_s)
        return Telemetry(feed, window, Exporter(store, feed.settle, *of_engines), traces)

    async def close(self) -> None:
        """Count the last calls and send the last traces."""
        self.feed.settle()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)
