"""Spans of a call and its stages for OpenTelemetry, made when the call is over. Extra `otel`.

    <operation> <model>                           arrival ........................... end
      gateway  prefill_queue  prefill             where each stage ran, from its stamps
                     kv_transfer  decode          a pull may begin beside the prefill

Attributes follow the GenAI semantic conventions. A caller's trace goes on (W3C traceparent and
tracestate), and its sampling decision holds; calls without one are sampled at a rate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ....core.errors import StartupFailed
from ....core.request.timeline import Event
from ....core.version import version
from ...request.output_chunk import RequestResult
from ...request.session import GATEWAY
from .call_record import CallFigures, CallRecord, times_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

_OPERATION = "text_completion"
_PROVIDER = "baton"
_CLOSE_MS = 2000
_SPANS = (
    ("gateway", Event.ARRIVED, Event.ROUTED),
    ("prefill_queue", Event.ROUTED, Event.PREFILL_STARTED),
    ("prefill", Event.PREFILL_STARTED, Event.FIRST_TOKEN),
    ("kv_transfer", Event.TRANSFER_STARTED, Event.TRANSFER_ENDED),
    ("decode", Event.DECODE_STARTED, Event.FINISHED),
)


class CallTraces:
    """Traces to any exporter; `ratio` of the calls that come without a trace of their own.

    Export is on a thread of OpenTelemetry's own.
    """

    def __init__(self, exporter: SpanExporter, ratio: float) -> None:
        """Imports the packages, which may not be there."""
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "baton-gateway", "service.version": version()})
        sampler = ParentBased(TraceIdRatioBased(ratio))
        self._provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._propagator = TraceContextTextMapPropagator()
        self._trace = trace
        self._tracer = self._provider.get_tracer("baton.gateway", version())

    def call_ended(self, record: CallRecord, figures: CallFigures) -> None:
        """Make the spans of a call that is over, if it is sampled."""
        trace = self._trace
        carrier = {"traceparent": record.traceparent, "tracestate": record.tracestate}
        span: Span = self._tracer.start_span(
            f"{_OPERATION} {record.model}",
            context=self._propagator.extract(carrier),
            kind=trace.SpanKind.SERVER,
            start_time=record.arrived_unix_ns,
        )
        if not span.is_recording():
            return
        span.set_attributes(_attributes(record, figures))
        if record.error is not None:
            span.set_attribute("error.type", record.error.code)
            span.set_status(trace.StatusCode.ERROR, record.error.code)
        if result := record.results.get(0):
            self._stages(trace.set_span_in_context(span), result)
        span.end(_ended_unix_ns(record))

    def _stages(self, parent: Any, result: RequestResult) -> None:
        times = times_of(result.timeline)
        for name, first, last in _SPANS:
            bounds_ns = times.between_ns(first, last)
            if bounds_ns is None:
                continue
            span = self._tracer.start_span(name, context=parent, start_time=bounds_ns[0])
            span.set_attribute("baton.node", _node_of(name, result))
            if name == "kv_transfer" and result.transfer is not None:
                span.set_attribute("baton.kv_transfer.bytes", result.transfer.num_bytes)
                span.set_attribute("baton.kv_transfer.window.transport", result.transfer.transport)
            span.end(bounds_ns[1])

    def close(self) -> None:
        """Send what waits; blocks for a moment at most."""
        self._provider.force_flush(_CLOSE_MS)
        self._provider.shutdown()


def open_traces(endpoint: str, ratio: float) -> CallTraces:
    """Traces to an OTLP collector over HTTP; raises StartupFailed without the packages."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise StartupFailed(
            "--otlp-traces-endpoint needs the OpenTelemetry packages",
            hint="pip install 'baton-serve[otel]'",
        ) from error
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise StartupFailed(
            f"--otlp-traces-endpoint {endpoint!r} is no URL",
            hint="OTLP over HTTP, e.g. http://127.0.0.1:4318",
        )
    if parts.path in ("", "/"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    return CallTraces(OTLPSpanExporter(endpoint=endpoint, timeout=_CLOSE_MS / 1000), ratio)


def _attributes(record: CallRecord, figures: CallFigures) -> dict[str, Any]:
    """gen_ai.*, as far as a gateway knows it."""
    values: dict[str, Any] = {
        "gen_ai.operation.name": _OPERATION,
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": record.model,
        "gen_ai.request.choice.count": record.num_samples,
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.call_id,
        "gen_ai.response.finish_reasons": [r.finish_reason.value for r in record.results.values()],
        "gen_ai.usage.input_tokens": figures.prompt_tokens,
        "gen_ai.usage.output_tokens": figures.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": figures.cached_tokens,
        "baton.attempts": figures.attempts,
    }
    if figures.ttft_s is not None:
        values["gen_ai.response.time_to_first_chunk"] = figures.ttft_s
    if sampling := record.sampling:
        values["gen_ai.request.max_tokens"] = sampling.max_tokens
        values["gen_ai.request.temperature"] = sampling.temperature
        values["gen_ai.request.top_p"] = sampling.top_p
        values["gen_ai.request.seed"] = sampling.seed
        if sampling.top_k is not None:
            values["gen_ai.request.top_k"] = sampling.top_k
    return values


def _node_of(stage: str, result: RequestResult) -> str:
    if stage == "gateway":
        return GATEWAY
    if stage in ("kv_transfer", "decode"):
        return result.decode_node or result.prefill_node
    return result.prefill_node


def _ended_unix_ns(record: CallRecord) -> int:
    assert record.ended_s is not None, "the call still runs"
    return record.arrived_unix_ns + round((record.ended_s - record.arrived_s) * 1e9)
