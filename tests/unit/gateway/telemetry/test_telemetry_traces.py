"""Spans of a call, as received by an exporter; skipped if OpenTelemetry is not installed."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

import pytest
from fakes.clock import FakeClock
from fakes.gateway.calls import STAMPS_S, PlayedCall, feed_of, timeline

from baton.core.errors import EngineFailed, StartupFailed
from baton.core.request.timeline import Event, Stamp
from baton.gateway.request.output_chunk import UnfinishedRun
from baton.gateway.telemetry.calls.traces import CallTraces, Collector, open_traces

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Traced:
    """Exports traces into memory."""

    def __init__(self, ratio: float = 1.0) -> None:
        self.exporter = InMemorySpanExporter()
        self.traces = CallTraces(self.exporter, ratio)
        self.clock = FakeClock()

    def spans(self) -> dict[str, ReadableSpan]:
        self.traces.close()
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def call(self, traceparent: str = "", tracestate: str = "") -> PlayedCall:
        call = PlayedCall(self.clock, feed_of(self.clock, self.traces.call_ended))
        call.record.traceparent, call.record.tracestate = traceparent, tracestate
        return call


def finish(traced: Traced, call: PlayedCall) -> None:
    traced.clock.advance(0.112)
    call.deliver(1)
    traced.clock.advance(0.388)
    call.deliver(4)
    call.finish(cached_tokens=3)


def test_stages_become_spans() -> None:
    traced = Traced()
    call = traced.call()
    finish(traced, call)
    spans = traced.spans()
    whole = spans["text_completion demo"]
    began_ns = call.record.arrived_unix_ns
    assert whole.kind is SpanKind.SERVER
    assert (whole.start_time, whole.end_time) == (began_ns, began_ns + 500_000_000)
    at_ns = {event.value: began_ns + round(s * 1e9) for event, s, _ in STAMPS_S}
    for name, first, last, node, parent in (
        ("gateway", "arrived", "routed", "gateway", whole),
        ("prefill", "prefill_queued", "first_token", "p", whole),
        ("prefill_queue", "prefill_queued", "prefill_started", "p", spans["prefill"]),
        ("prefill_compute", "prefill_started", "first_token", "p", spans["prefill"]),
        ("handoff", "handoff_queued", "transfer_ended", "d", whole),
        ("handoff_attach", "handoff_queued", "transfer_started", "d", spans["handoff"]),
        ("handoff_copy", "transfer_started", "transfer_ended", "d", spans["handoff"]),
        ("decode", "transfer_ended", "finished", "d", whole),
        ("decode_queue", "transfer_ended", "decode_started", "d", spans["decode"]),
        ("decode_first_step", "decode_started", "first_decode_ended", "d", spans["decode"]),
    ):
        span = spans.pop(name) if parent is not whole else spans[name]
        assert (span.start_time, span.end_time) == (at_ns[first], at_ns[last]), name
        assert span.attributes is not None and span.attributes["baton.node"] == node
        assert span.parent is not None and span.parent.span_id == parent.context.span_id, name
        service = {"gateway": "gateway", "p": "prefill", "d": "decode"}[node]
        assert span.resource.attributes["service.name"] == f"baton-{service}"
        if node != "gateway":
            assert span.resource.attributes["service.instance.id"] == node
    handoff = spans["handoff"].attributes
    assert handoff is not None and handoff["baton.kv_transfer.bytes"] == 1000
    assert spans.keys() == {whole.name, "gateway", "prefill", "handoff", "decode"}
    assert whole.attributes is not None
    expected = {
        "gen_ai.request.model": "demo",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.id": call.record.call_id,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 3,
    }
    assert {key: whole.attributes[key] for key in expected} == expected


def test_a_caller_s_trace_goes_on() -> None:
    traced = Traced(ratio=0.0)
    finish(traced, traced.call(f"00-{TRACE_ID}-{PARENT_ID}-01", "vendor=value"))
    whole = traced.spans()["text_completion demo"]
    assert whole.context.trace_id == int(TRACE_ID, 16)
    assert whole.parent is not None and whole.parent.span_id == int(PARENT_ID, 16)
    assert whole.context.trace_state.get("vendor") == "value"


def test_a_call_that_one_engine_served_whole() -> None:
    traced = Traced()
    call = traced.call()
    traced.clock.advance(0.112)
    call.deliver(1)
    events = {Event.HANDOFF_QUEUED, Event.TRANSFER_STARTED, Event.TRANSFER_ENDED}
    events |= {Event.DECODE_STARTED, Event.FIRST_DECODE_ENDED}
    stamps = tuple(s for s in timeline(call.record.arrived_unix_ns) if s.event not in events)
    result = replace(call.result(0, 0, 1), transfer=None, decode_node=None, timeline=stamps)
    call.deliver(4, result=result)
    call.end(None)
    spans = traced.spans()
    parts = {"gateway", "prefill", "prefill_queue", "prefill_compute", "decode"}
    assert spans.keys() == {"text_completion demo", *parts}
    decode = spans["decode"]
    assert decode.attributes is not None and decode.attributes["baton.node"] == "p"
    assert decode.start_time == spans["prefill"].end_time


def test_a_caller_s_word_on_sampling_counts() -> None:
    traced = Traced(ratio=1.0)
    finish(traced, traced.call(f"00-{TRACE_ID}-{PARENT_ID}-00"))
    assert not traced.spans()


@pytest.mark.parametrize("traceparent", ["", "junk", f"00-{'0' * 32}-{PARENT_ID}-01"])
def test_without_a_trace_the_rate_decides(traceparent: str) -> None:
    for ratio in (0.0, 1.0):
        traced = Traced(ratio)
        finish(traced, traced.call(traceparent))
        assert bool(traced.spans()) == bool(ratio)


def test_a_failure_is_marked() -> None:
    traced = Traced()
    traced.call().end(EngineFailed("words"))
    span = traced.spans()["text_completion demo"]
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes is not None and span.attributes["error.type"] == "engine_failed"
    assert "words" not in span.to_json()


FAILURES = [  # an engine's last event, whether decode has the request, spans, spans cut off
    (Event.ROUTED, False, {"gateway", "prefill"}, {"prefill"}),
    (
        Event.PREFILL_STARTED,
        False,
        {"gateway", "prefill", "prefill_queue", "prefill_compute", "handoff", "handoff_attach"},
        {"prefill", "prefill_compute", "handoff", "handoff_attach"},
    ),
    (
        Event.FIRST_TOKEN,
        False,
        {"gateway", "prefill", "prefill_queue", "prefill_compute", "handoff", "handoff_attach"}
        | {"handoff_copy"},
        {"handoff", "handoff_copy"},
    ),
    (
        Event.DECODE_STARTED,
        True,
        {"gateway", "prefill", "prefill_queue", "prefill_compute", "handoff", "handoff_attach"}
        | {"handoff_copy", "decode", "decode_queue", "decode_first_step"},
        {"decode", "decode_first_step"},
    ),
]


@pytest.mark.parametrize(("last", "is_decoding", "names", "cut"), FAILURES)
@pytest.mark.parametrize("end", [Event.FAILED, Event.CANCELLED])
def test_a_call_that_failed_has_the_engines_parts(
    last: Event, is_decoding: bool, names: set[str], cut: set[str], end: Event
) -> None:
    traced = Traced()
    call = traced.call()
    stamps = list(timeline(call.record.arrived_unix_ns))
    stamps = stamps[: next(i for i, stamp in enumerate(stamps) if stamp.event is last) + 1]
    ended_ns = call.record.arrived_unix_ns + 700_000_000
    run = (*stamps, Stamp(end, ended_ns, "gateway"))
    call.record.unfinished_run = UnfinishedRun("p", "d", is_decoding, None, 1, run)
    traced.clock.advance(0.7)
    call.end(EngineFailed("words"))
    spans = traced.spans()
    whole = spans.pop("text_completion demo")
    assert whole.end_time == ended_ns and spans.keys() == names
    for name, span in spans.items():
        is_error = span.status.status_code is StatusCode.ERROR
        assert is_error == (name in cut) == (span.end_time == ended_ns), name
        assert span.attributes is not None
        node = span.attributes["baton.node"]
        assert node == {"gateway": "gateway", "prefill": "p"}.get(name.partition("_")[0], "d")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(StartupFailed) as raised:
        open_traces("http://127.0.0.1:4318", 1.0)
    assert "baton-serve[otel]" in raised.value.hint


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(StartupFailed):
        open_traces("localhost:4317", 1.0)


def test_a_collector_that_is_away_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Flaky(SpanExporter):
        result = SpanExportResult.SUCCESS

        def export(self, spans: object) -> SpanExportResult:
            if self.result is SpanExportResult.FAILURE:
                logging.getLogger(__name__).error("refused")
            return self.result

    flaky = Flaky()
    collector = Collector(flaky)
    away = ["refused", "traces are sent again; those in between are lost"]
    for _ in range(2):
        caplog.clear()
        for result in (SpanExportResult.FAILURE,) * 3 + (SpanExportResult.SUCCESS,) * 2:
            flaky.result = result
            assert collector.export([]) is result
        assert [record.getMessage() for record in caplog.records] == away
