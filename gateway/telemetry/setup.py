"""All that a gateway tells of itself, put together from its configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...core.config import GatewayConfig
from ...core.ports import Clock
from ..engines.cluster_view import ClusterView
from ..engines.engine_table import EngineTable
from .calls.call_log import CallLog
from .calls.call_records import CallObserver
from .calls.observers import Observers
from .calls.token_gaps import TokenGaps
from .calls.traces import CallTraces, open_traces
from .metrics.prometheus import Exporter, SloTargets
from .window.window import TelemetryWindow


@dataclass(frozen=True, slots=True)
class Telemetry:
    """`observers` are told of every call; `window` and `exporter` are read by routes."""

    window: TelemetryWindow
    exporter: Exporter
    traces: CallTraces | None
    observers: Observers

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
        """Raises StartupFailed where what was asked for is not installed."""
        gaps = TokenGaps()
        window = TelemetryWindow(clock, gaps)
        targets = SloTargets(config.slo_ttft_s, config.slo_tbt_s)
        exporter = Exporter(
            *(config.metrics_prefix, model, targets, engines, view, clock, is_index_up, num_queued),
            gaps,
            certificate_ends_s,
        )
        observers: list[CallObserver] = [window, exporter.calls]
        traces = None
        if config.otlp_traces_endpoint is not None:
            traces = open_traces(config.otlp_traces_endpoint, config.otlp_traces_ratio)
            observers.append(traces)
        if config.log_json:
            observers.append(CallLog())
        return Telemetry(window, exporter, traces, Observers(observers, gaps))

    async def close(self) -> None:
        """Send what is still to be sent."""
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)
