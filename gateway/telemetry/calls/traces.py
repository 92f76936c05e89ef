"""Spans of a call, at the gateway and at its nodes, for OpenTelemetry: made when the call is over.
Extra `otel`.

    <operation> <model>                            arrival .......................... end
      gateway   prefill                            where each part ran, by its stamps
                  prefill_queue  prefill_compute
                    handoff  (begins beside the prefill)
                      handoff_attach  handoff_copy
                                               decode
                                                 decode_queue  decode_first_step

Nodes send no spans: their times travel with a request's outputs, and the gateway puts them on its
clock (engines/wire.py). A node is a service of its own: `baton-prefill` or `baton-decode`, by its
name. Attributes follow the GenAI semantic conventions. A caller's trace goes on (W3C traceparent
and tracestate), and its sampling decision holds; calls without one are sampled at a rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ....core.errors import StartupFailed
from ....core.request.timeline import Event
from ....core.version import version
from ...request.answer import GATEWAY
from ...request.output_chunk import RequestResult
from .call_record import CallFigures, CallRecord, times_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

_OPERATION = "text_completion"
_PROVIDER = "baton"
_CLOSE_MS = 2000
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Part:
    """A span from the first of `begins` that was stamped to the first of `ends`."""

    name: str
    begins: tuple[Event, ...]
    ends: tuple[Event, ...]
    parts: tuple[_Part, ...] = ()


_PREFILL = _Part(
    "prefill",
    (Event.PREFILL_QUEUED, Event.ROUTED),
    (Event.FIRST_TOKEN,),
    (
        _Part("prefill_queue", (Event.PREFILL_QUEUED, Event.ROUTED), (Event.PREFILL_STARTED,)),
        _Part("prefill_compute", (Event.PREFILL_STARTED,), (Event.FIRST_TOKEN,)),
    ),
)
_HANDOFF = _Part(
    "handoff",
    (Event.HANDOFF_QUEUED, Event.TRANSFER_STARTED),
    (Event.TRANSFER_ENDED,),
    (
        _Part("handoff_attach", (Event.HANDOFF_QUEUED,), (Event.TRANSFER_STARTED,)),
        _Part("handoff_copy", (Event.TRANSFER_STARTED,), (Event.TRANSFER_ENDED,)),
    ),
)
_DECODE = _Part(
    "decode",
    (Event.TRANSFER_ENDED, Event.FIRST_TOKEN),
    (Event.FINISHED,),
    (
        _Part("decode_queue", (Event.TRANSFER_ENDED,), (Event.DECODE_STARTED,)),
        _Part("decode_first_step", (Event.DECODE_STARTED,), (Event.FIRST_DECODE_ENDED,)),
    ),
)
_GATEWAY = _Part("gateway", (Event.ARRIVED,), (Event.ROUTED,))
_MAX_SERVICES = 256  # whose spans are told apart; nodes' names are few


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

        self._processor = BatchSpanProcessor(exporter)  # one queue and thread for all services
        sampler = ParentBased(TraceIdRatioBased(ratio))

        def tracer(service: str, instance: str | None) -> Tracer:
            named = {"service.name": f"baton-{service}", "service.version": version()}
            if instance is not None:
                named["service.instance.id"] = instance
            resource = Resource.create(named)
            provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
            provider.add_span_processor(self._processor)
            return provider.get_tracer("baton.gateway", version())

        self._tracer_of = lru_cache(_MAX_SERVICES)(tracer)
        self._propagator = TraceContextTextMapPropagator()
        self._trace = trace
        self._tracer = tracer(GATEWAY, None)

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
        times = times_of(result.timeline).by_event
        prefill_node = result.prefill_node
        decode_node = result.decode_node or prefill_node
        prefill = self._tracer_of("prefill", prefill_node)
        decode = self._tracer_of("decode", decode_node) if result.decode_node else prefill
        self._part(self._tracer, GATEWAY, _GATEWAY, times, parent)
        self._part(prefill, prefill_node, _PREFILL, times, parent)
        if result.transfer is not None:
            moved = result.transfer
            attributes = {
                "baton.kv_transfer.bytes": moved.num_bytes,
                "baton.kv_transfer.cached_tokens": moved.cached_tokens,
                "baton.kv_transfer.transport": moved.transport,
                "baton.kv_transfer.source": prefill_node,
            }
            self._part(decode, decode_node, _HANDOFF, times, parent, attributes)
        attributes = {"gen_ai.usage.output_tokens": result.completion_tokens}
        self._part(decode, decode_node, _DECODE, times, parent, attributes)

    def _part(
        self,
        tracer: Tracer,
        node: str,
        part: _Part,
        times: Mapping[Event, int],
        parent: Any,
        attributes: Mapping[str, Any] = _NOTHING,
    ) -> None:
        """One span, and those of its parts; none where a stamp is missing."""
        begin_ns, end_ns = _first(times, part.begins), _first(times, part.ends)
        if begin_ns is None or end_ns is None:
            return
        span = tracer.start_span(part.name, context=parent, start_time=begin_ns)
        span.set_attributes({"baton.node": node, **attributes})
        inside = self._trace.set_span_in_context(span)
        for each in part.parts:
            self._part(tracer, node, each, times, inside)
        span.end(max(begin_ns, end_ns))

    def close(self) -> None:
        """Send what waits; blocks for a moment at most."""
        self._processor.force_flush(_CLOSE_MS)
        self._processor.shutdown()  # type: ignore[no-untyped-call]


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


def _first(times: Mapping[Event, int], events: Sequence[Event]) -> int | None:
    return next((times[event] for event in events if event in times), None)


def _ended_unix_ns(record: CallRecord) -> int:
    assert record.ended_s is not None, "the call still runs"
    return record.arrived_unix_ns + round((record.ended_s - record.arrived_s) * 1e9)
