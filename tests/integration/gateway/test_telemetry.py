"""A real pair of nodes with a few calls: metrics, log lines and traces match the requests sent."""

from __future__ import annotations

import http.server
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from deployments import Running, running
from prometheus_client.parser import text_string_to_metric_families

from baton.client import Client
from baton.core.config import GatewayConfig, NodeConfig
from baton.core.engine_config import EngineConfig
from baton.core.errors import InvalidRequest

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

MODEL = str(Path(__file__).resolve().parents[3] / "models" / "demo")
PROMPT = [*range(100, 164)]  # four blocks
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
NUM_CALLS, MAX_TOKENS = 3, 6


@dataclass
class Collector:
    """A fake OTLP collector."""

    bodies: list[bytes] = field(default_factory=list)
    url: str = ""

    def spans(self, trace_id: str) -> dict[tuple[str, str], Span]:
        """A trace's received spans, by service and name."""
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return {
            (value.value.string_value, span.name): span
            for request in requests
            for resource in request.resource_spans
            for value in resource.resource.attributes
            if value.key == "service.name"
            for scope in resource.scope_spans
            for span in scope.spans
            if span.trace_id.hex() == trace_id
        }


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    found = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            found.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


@dataclass
class System:
    """A deployment and its HTTP address."""

    running: Running
    url: str

    def metrics(self) -> dict[tuple[str, ...], float]:
        """Values by metric name and labels, without the model's label."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        return {
            (sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "model_name")): (
                sample.value
            )
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@pytest.fixture(scope="module")
def system(collector: Collector) -> Iterator[System]:
    engine = EngineConfig(model=MODEL, device="cpu", num_kv_blocks=100, max_model_len=500)
    gateway = GatewayConfig(
        grpc_port=0,
        http_port=0,
        model=MODEL,
        log_json=True,
        otlp_traces_endpoint=collector.url,
    )
    with running(engine, node=NodeConfig(log_json=True), gateway=gateway) as state:
        (ready,) = (line for line in state.lines if line.startswith("gateway | ready:"))
        yield System(state, ready.split()[-2])


@pytest.fixture(scope="module")
def used(system: System) -> System:
    """The system after NUM_CALLS calls of one prompt, one over HTTP with a trace, and a refused
    call."""
    with Client(system.running.address) as client:
        for _ in range(NUM_CALLS):
            stream = client.generate(
                prompt_token_ids=PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0
            )
            assert sum(len(chunk.token_ids) for chunk in stream) == MAX_TOKENS
        with pytest.raises(InvalidRequest):
            list(client.generate(prompt_token_ids=[], max_tokens=1))
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    request = urllib.request.Request(
        f"{system.url}/v1/completions",
        json.dumps(body).encode(),
        {
            "Content-Type": "application/json",
            "traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01",
        },
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == MAX_TOKENS
    return system


def test_metrics_add_up(used: System) -> None:
    time.sleep(0.6)  # two heartbeats
    found = used.metrics()
    num_calls, num_tokens = NUM_CALLS + 1, (NUM_CALLS + 1) * MAX_TOKENS
    assert found["baton_prompt_tokens_total",] == num_calls * len(PROMPT)
    assert found["baton_generation_tokens_total",] == num_tokens
    assert found["baton_request_success_total", "length"] == num_calls
    assert found["baton_request_rejections_total", "empty_prompt"] == 1
    assert found["baton_time_to_first_token_seconds_count",] == num_calls
    gaps = found["baton_inter_token_latency_seconds_count",]
    assert gaps + found["baton_coalesced_tokens_total",] == num_tokens - num_calls
    assert found["baton_e2e_request_latency_seconds_count",] == num_calls
    assert found["baton_num_requests_in_flight",] == 0
    assert found["baton_kv_transfer_seconds_count", "decode-0", "prefill-0", "shm"] == num_calls
    moved = found["baton_kv_transfer_bytes_total", "decode-0", "prefill-0", "shm"]
    assert moved == found["baton_kv_pull_bytes_total", "decode-0", "decode"] > 0
    assert found["baton_kv_pulls_total", "decode-0", "decode"] == num_calls
    queries = found["baton_prefix_cache_queries_total", "prefill-0", "prefill"]
    hits = found["baton_prefix_cache_hits_total", "prefill-0", "prefill"]
    assert queries == num_calls * len(PROMPT)
    assert hits == found["baton_prompt_tokens_cached_total",] == NUM_CALLS * 48
    for name in ("prefill", "decode"):
        assert found["baton_node_up", f"{name}-0", name] == 1
        assert found["baton_num_requests_running", f"{name}-0", name] == 0
        assert 0 <= found["baton_kv_cache_usage_perc", f"{name}-0", name] < 1
    decisions = [value for key, value in found.items() if key[0] == "baton_router_decisions_total"]
    assert sum(decisions) == num_calls
    assert found["baton_index_up",] == 1
    assert found["process_resident_memory_bytes",] > 1e6


def test_stages_add_up_to_the_second_token(used: System) -> None:
    """Stages sum to the time of the second token for calls whose pull ended after the first, here
    all."""
    found = used.metrics()
    stages = sum(v for k, v in found.items() if k[0] == "baton_request_stage_seconds_sum")
    first = found["baton_time_to_first_token_seconds_sum",]
    second = first + found["baton_handoff_gap_seconds_sum",]
    assert 0.5 * second < stages < 1.5 * second + 0.1


def test_every_call_has_its_line(used: System) -> None:
    texts = [line.partition(" | ")[2] for line in used.running.lines if line.startswith("gateway")]
    lines = [json.loads(text) for text in texts if text.startswith("{")]
    calls = [line for line in lines if "request_id" in line]
    assert len(calls) == NUM_CALLS + 1
    assert {line["outcome"] for line in calls} == {"length"}
    assert all(line["output_tokens"] == MAX_TOKENS and "prompt" not in line for line in calls)
    assert [line["outcome"] for line in lines if line["message"] == "refused"] == ["empty_prompt"]


def test_a_trace_from_http_reaches_the_collector(used: System, collector: Collector) -> None:
    """Nodes export their spans as services of their own, each within its parent span."""
    deadline_s = time.monotonic() + 10
    whole_key = ("baton-gateway", "text_completion demo")
    while whole_key not in (spans := collector.spans(TRACE_ID)):
        assert time.monotonic() < deadline_s, spans
        time.sleep(0.05)
    parts = {
        whole_key: [("gateway", "gateway"), ("prefill", "prefill"), ("decode", "handoff")],
        ("baton-prefill", "prefill"): [
            ("prefill", "prefill_queue"),
            ("prefill", "prefill_compute"),
        ],
        ("baton-decode", "handoff"): [("decode", "handoff_attach"), ("decode", "handoff_copy")],
        ("baton-decode", "decode"): [("decode", "decode_queue"), ("decode", "decode_first_step")],
    }
    for parent_key, children in parts.items():
        parent = spans[parent_key]
        for service, name in children:
            span = spans[f"baton-{service}", name]
            assert span.parent_span_id == parent.span_id
            # Stamps of one host: parents contain their children, up to the delivery at the end.
            assert parent.start_time_unix_nano <= span.start_time_unix_nano
            assert span.start_time_unix_nano <= span.end_time_unix_nano
            assert span.end_time_unix_nano <= parent.end_time_unix_nano, name
    assert spans[whole_key].parent_span_id.hex() == "00f067aa0ba902b7"
