"""OpenTelemetry spans of a call, at the gateway and at its nodes, made when the call has ended.
Needs the extra `otel`.

    <operation> <model>                            arrival .......................... end
      gateway   prefill                            where each part ran, by its stamps
                  prefill_queue  prefill_compute
                    handoff  (begins beside the prefill)
                      handoff_attach  handoff_copy
                                               decode
                                                 decode_queue  decode_first_step

A call that fails has the spans that began; those not over then end with the call, as errors.
Nodes send no spans: their times are in a request's outputs, and the gateway converts them to its
clock (engines/engine_connection.py). A node is a service of its own: `baton-prefill` or
`baton-decode`, with its name. Attributes follow the GenAI semantic conventions. A caller's trace is
continued (W3C traceparent and tracestate), and its sampling decision holds; calls without one are
sampled at a rate.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ....core.errors import StartupFailed
from ....core.request.timeline import Event
from ....core.version import version
from ...request.output_chunk import RequestResult, UnfinishedRun
from ...request.session_output import GATEWAY
from .call_record import CallRecord
from .ended_call import EndedCall, times_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Span, Tracer

log = logging.getLogger(__name__)

_OPERATION = "text_completion"
_PROVIDER = "baton"
_CLOSE_MS = 2000
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Part:
    """A span from the first of `begins` that has a stamp to the first of `ends`."""

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
_CUT = (Event.FAILED, Event.CANCELLED)  # the end of a call that failed
_MAX_SERVICES = 256  # tracers that are kept; there are few nodes


@dataclass(frozen=True, slots=True)
class _Place:
    """The node whose spans are made, with the stamps of all. `error`: the code of a failed call."""

    tracer: Tracer
    node: str
    times: Mapping[Event, int]
    error: str | None


class CallTraces:
    """Traces to an exporter, which runs on OpenTelemetry's own thread. `ratio`: the share of the
    calls without a caller's trace that is sampled."""

    def __init__(self, exporter: SpanExporter | Collector, ratio: float) -> None:
        """Imports the packages, which may not be installed."""
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._processor = BatchSpanProcessor(exporter)  # type: ignore[arg-type]  # one queue and thread for all services
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

    def call_ended(self, record: CallRecord, call: EndedCall) -> None:
        """Make the spans of an ended call, if it is sampled."""
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
        span.set_attributes(_attributes(record, call))
        error = None if record.error is None else record.error.code
        if error is not None:
            self._mark(span, error)
        if run := record.run:
            self._stages(trace.set_span_in_context(span), run, error)
        span.end(record.unix_ns(record.ended_s))

    def _stages(self, parent: Any, run: RequestResult | UnfinishedRun, error: str | None) -> None:
        times = times_of(run.timeline)
        prefill_node = run.prefill_node
        decode_node = run.decode_node or prefill_node
        prefill = self._tracer_of("prefill", prefill_node)
        decode = self._tracer_of("decode", decode_node) if run.decode_node else prefill
        at_prefill = _Place(prefill, prefill_node, times, error)
        at_decode = _Place(decode, decode_node, times, error)
        self._part(_Place(self._tracer, GATEWAY, times, error), _GATEWAY, parent)
        self._part(at_prefill, _PREFILL, parent)
        if run.transfer is not None or isinstance(run, UnfinishedRun):
            attributes: dict[str, Any] = {"baton.kv_transfer.source": prefill_node}
            if (moved := run.transfer) is not None:
                attributes |= {
                    "baton.kv_transfer.bytes": moved.num_bytes,
                    "baton.kv_transfer.cached_tokens": moved.cached_tokens,
                    "baton.kv_transfer.transport": moved.transport,
                }
            self._part(at_decode, _HANDOFF, parent, attributes)
        if not isinstance(run, UnfinishedRun) or run.is_decoding:
            attributes = {"gen_ai.usage.output_tokens": run.completion_tokens}
            self._part(at_decode, _DECODE, parent, attributes)

    def _part(
        self,
        place: _Place,
        part: _Part,
        parent: Any,
        attributes: Mapping[str, Any] = _NOTHING,
        *,
        is_inside: bool = False,
    ) -> None:
        """Make a span and those of its parts; none if a stamp is missing. A part that was not over
        when a call failed ends with the call; a part `is_inside` another only if its engine stamped
        its begin."""
        times, begins, end_ns = place.times, part.begins, _first(place.times, part.ends)
        is_cut = end_ns is None and place.error is not None
        if is_cut:
            end_ns = _first(times, _CUT)
            begins = begins[:1] if is_inside else begins
        begin_ns = _first(times, begins)
        if begin_ns is None or end_ns is None:
            return
        span = place.tracer.start_span(part.name, context=parent, start_time=begin_ns)
        span.set_attributes({"baton.node": place.node, **attributes})
        if is_cut and place.error is not None:
            self._mark(span, place.error)
        inside = self._trace.set_span_in_context(span)
        for each in part.parts:
            self._part(place, each, inside, is_inside=True)
        span.end(max(begin_ns, end_ns))

    def _mark(self, span: Span, code: str) -> None:
        span.set_attribute("error.type", code)
        span.set_status(self._trace.StatusCode.ERROR, code)

    def close(self) -> None:
        """Send the queued spans; blocks for _CLOSE_MS at most."""
        self._processor.force_flush(_CLOSE_MS)
        self._processor.shutdown()  # type: ignore[no-untyped-call]


class Collector:
    """An exporter whose package logs the first batch that fails, and no more until one succeeds: it
    writes two lines for each. Then we log that traces are sent again."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter, self._is_away = exporter, False
        logging.getLogger(type(exporter).__module__).addFilter(lambda record: not self._is_away)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        was_away, self._is_away = self._is_away, result.name != "SUCCESS"
        if was_away and not self._is_away:
            log.warning("traces are sent again; those in between are lost")
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def open_traces(endpoint: str, ratio: float) -> CallTraces:
    """Traces to an OTLP collector over HTTP. Raises StartupFailed without the packages."""
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
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_CLOSE_MS / 1000)
    return CallTraces(Collector(exporter), ratio)


def _attributes(record: CallRecord, call: EndedCall) -> dict[str, Any]:
    """The gen_ai.* attributes that a gateway knows."""
    sampling = record.request.sampling
    values: dict[str, Any] = {
        "gen_ai.operation.name": _OPERATION,
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": record.model,
        "gen_ai.request.choice.count": record.request.options.n,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.call_id,
        "gen_ai.response.finish_reasons": [r.finish_reason.value for r in record.results.values()],
        "gen_ai.usage.input_tokens": call.prompt_tokens,
        "gen_ai.usage.output_tokens": call.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": call.cached_tokens,
        "baton.attempts": call.attempts,
    }
    if call.ttft_s is not None:
        values["gen_ai.response.time_to_first_chunk"] = call.ttft_s
    if sampling.top_k is not None:
        values["gen_ai.request.top_k"] = sampling.top_k
    return values


def _first(times: Mapping[Event, int], events: Sequence[Event]) -> int | None:
    return next((times[event] for event in events if event in times), None)
