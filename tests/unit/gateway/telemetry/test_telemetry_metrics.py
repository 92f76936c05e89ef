"""The contents of /metrics for known calls and engines, read by Prometheus' own parser."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from fakes.clock import FakeClock
from fakes.gateway.calls import PlayedCall
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

from baton.bench.pages import reference
from baton.core.errors import Cancelled, EngineFailed, Overloaded
from baton.core.membership import Member, Role
from baton.gateway.engines.engine_table import EngineTable
from baton.gateway.engines.linked_engine import LinkedEngine
from baton.gateway.engines.plan_record import ChosenPlan, PlanRecord
from baton.gateway.engines.reported_load import ReportedLoad
from baton.gateway.security.caller import anyone
from baton.gateway.telemetry.call_counts import CallCounts
from baton.gateway.telemetry.call_feed import CallFeed
from baton.gateway.telemetry.calls.slo import SloTargets
from baton.gateway.telemetry.metrics import metric_table
from baton.gateway.telemetry.metrics.metric_store import MAX_CHILDREN, MetricStore
from baton.gateway.telemetry.metrics.prometheus import Exporter, full_prefix
from baton.gateway.telemetry.metrics.tally import Histogram
from baton.gateway.telemetry.window.window import TelemetryWindow
from baton.prefix_index.mirror import PrefixMirror
from baton.proto.v1.node_pb2 import Counters

DOCS = Path(__file__).resolve().parents[4] / "docs"
Key = tuple[str, tuple[tuple[str, str], ...]]


class FakeView:
    """The part of cluster_view.ClusterView that the metrics use."""

    def __init__(self) -> None:
        self.listed: list[Member] = []

    def members(self) -> list[Member]:
        return self.listed


class World:
    """An exporter and its inputs."""

    def __init__(self, prefix: str = "baton") -> None:
        self.clock = FakeClock()
        self.table = EngineTable(PrefixMirror(self.clock))
        self.view = FakeView()
        self.index_up = True
        self.num_queued = 0
        self.certificate_ends_s: dict[str, float] = {}
        store = MetricStore(full_prefix(prefix), "demo")
        targets = SloTargets(ttft_slo_s=0.5, tbt_slo_s=0.05)
        self.feed = CallFeed(self.clock, CallCounts(targets), TelemetryWindow(self.clock), store)
        self.exporter = Exporter(
            store,
            self.feed.settle,
            self.table,
            self.view,  # type: ignore[arg-type]
            self.clock,
            lambda: self.index_up,
            lambda: self.num_queued,
            lambda: self.certificate_ends_s,
        )

    def link(
        self, incarnation: str, name: str, load: ReportedLoad, role: Role = Role.DECODE
    ) -> LinkedEngine:
        member = Member(incarnation, role, name, "a:1", "demo", "f", 100, 16, 102)
        engine = LinkedEngine(member, None, load)  # type: ignore[arg-type]
        self.table.add(engine)
        self.view.listed = [e.member for e in self.table.engines.values()]
        return engine

    def unlink(self, incarnation: str) -> None:
        self.table.remove(incarnation)
        self.view.listed = [m for m in self.view.listed if m.incarnation != incarnation]

    def scrape(self) -> dict[Key, float]:
        text = self.exporter.render("")[0].decode()
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in parse_text(text)
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float | None:
        labels["model_name"] = "demo"
        return self.scrape().get((name, tuple(sorted(labels.items()))))


LOAD = ReportedLoad(3, 2, 40, 75, 50, False, frozenset(), 11)


@given(st.lists(st.floats(0, 20), max_size=50))
def test_buckets_count_as_prometheus_defines_them(samples: list[float]) -> None:
    histogram = Histogram()
    for sample in samples:
        histogram.observe(sample)
    *counts, num_samples = histogram.cumulative(metric_table.GAP_S)
    for bound, count in zip(metric_table.GAP_S, counts, strict=True):
        assert count == bisect_right(sorted(samples), bound)
    assert num_samples == len(samples)
    assert histogram.total == pytest.approx(sum(samples))


def test_the_deployments_load_is_one_number_each() -> None:
    world = World()
    names = ("requests_running", "requests_waiting", "kv_cache_usage_perc")

    def load() -> list[float | None]:
        return [world.value(f"baton_deployment_{name}") for name in names]

    assert load() == [0, 0, 0]
    world.num_queued = 7
    first = world.link("1" * 32, "d1", LOAD)
    world.link("2" * 32, "d2", LOAD)
    free, total = LOAD.free_blocks, first.pool_blocks
    assert load() == [
        2 * LOAD.num_running, 2 * LOAD.num_waiting + 7, pytest.approx(1 - free / total),
    ]  # fmt: skip


@pytest.mark.parametrize("prefix", ["baton", "vllm"])
def test_what_a_router_reads_of_a_server_is_there_once(prefix: str) -> None:
    """The metrics that docs/metrics.md documents for the endpoint picker are gauges of one series
    each."""
    text = (DOCS / "metrics.md").read_text()
    specs = dict(re.findall(r"(\w+Spec): \"?([\w:]*)\"?", text))
    names = ("queuedRequests", "runningRequests", "kvUsage", "lora", "cacheInfo")
    assert specs.keys() == {f"{name}Spec" for name in names}
    world = World(prefix)
    world.num_queued = 1
    world.link("1" * 32, "d", LOAD)
    prefill = world.link("2" * 32, "p", LOAD, role=Role.PREFILL)
    world.link("3" * 32, "p2", LOAD, role=Role.PREFILL)
    families = {family.name: family for family in parse_text(world.exporter.render("")[0].decode())}
    found = {}
    for name, spec in specs.items():
        if spec:
            family = families[spec.replace("baton_", full_prefix(prefix))]
            assert family.type == "gauge"
            [found[name]] = family.samples
    assert found["queuedRequestsSpec"].value == 3 * LOAD.num_waiting + 1
    assert found["runningRequestsSpec"].value == 3 * LOAD.num_running
    assert 0 < found["kvUsageSpec"].value < 1
    labels = found["cacheInfoSpec"].labels
    assert labels["block_size"] == str(prefill.member.block_size)
    assert labels["num_gpu_blocks"] == str(2 * prefill.pool_blocks)


def test_the_cache_is_that_of_decode_engines_where_they_compute_the_prompts() -> None:
    world = World()
    name = "baton_cache_config_info"
    engine = world.link("1" * 32, "d", LOAD)
    labels = {"block_size": "16", "num_gpu_blocks": str(engine.pool_blocks)}
    assert world.value(name, **labels) is None
    engine.receive_heartbeat(replace(LOAD, tbt_target_s=0.05))
    assert world.value(name, **labels) == 1


def test_what_boards_made_for_others_find_is_there() -> None:
    """The metrics in the last column of docs/metrics.md's table, used by boards for other servers,
    exist."""
    table = (DOCS / "metrics.md").read_text().split("| vLLM | SGLang | here |")[1].split("\n\n")[0]
    ours = " ".join(row.split("|")[3] for row in table.strip().splitlines())
    named = set(re.findall(r"[a-z]+(?:_[a-z]+)+", ours))
    assert len(named) > 15 and named <= {metric.name for metric in metric_table.ALL}


def test_when_certificates_end() -> None:
    world = World()
    name = "baton_certificate_expires_timestamp_seconds"
    assert world.value(name, file="/etc/tls.crt") is None
    for ends_s in (1.8e9, 1.9e9):  # the second time, for a renewed file
        world.certificate_ends_s = {"/etc/tls.crt": ends_s, "/etc/ca.crt": 2e9}
        assert world.value(name, file="/etc/tls.crt") == ends_s
        assert world.value(name, file="/etc/ca.crt") == 2e9


def test_calls() -> None:
    world = World()
    observer = world.feed
    call = PlayedCall(world.clock, observer, prompt_tokens=40, tenant="acme")
    assert world.value("baton_num_requests_in_flight") == 1
    world.clock.advance(0.112)
    call.deliver(1)
    world.clock.advance(0.012)
    call.deliver(1)
    world.clock.advance(0.004)
    call.deliver(3)
    call.finish(cached_tokens=32, attempts=2)
    for error in (Cancelled("gone"), EngineFailed("broke")):
        PlayedCall(world.clock, observer).end(error)
    observer.call_refused(anyone("grpc"), Overloaded("full"))
    value = world.value
    assert value("baton_num_requests_in_flight") == 0
    assert value("baton_prompt_tokens_total") == 40 + 7 + 7
    assert value("baton_generation_tokens_total") == 5
    assert value("baton_coalesced_tokens_total") == 2
    assert value("baton_prompt_tokens_cached_total") == 32
    assert value("baton_inter_token_latency_seconds_count") == 2
    assert value("baton_inter_token_latency_seconds_bucket", le="0.005") == 1
    assert value("baton_inter_token_latency_seconds_sum") == pytest.approx(0.016)
    assert value("baton_handoff_gap_seconds_sum") == pytest.approx(0.012)
    assert value("baton_time_to_first_token_seconds_sum") == pytest.approx(0.112)
    assert value("baton_request_time_per_output_token_seconds_sum") == pytest.approx(0.016 / 4)
    assert value("baton_e2e_request_latency_seconds_sum") == pytest.approx(0.128)
    assert value("baton_request_queue_time_seconds_sum") == pytest.approx(0.011)
    assert value("baton_request_prefill_time_seconds_sum") == pytest.approx(0.1)
    assert value("baton_request_decode_time_seconds_sum") == pytest.approx(0.5 - 0.111)
    assert value("baton_request_inference_time_seconds_sum") == pytest.approx(0.5 - 0.011)
    assert value("baton_request_stage_seconds_sum", stage="kv_transfer") == pytest.approx(0.004)
    assert value("baton_request_success_total", finished_reason="length") == 1
    assert value("baton_request_failure_total", reason="cancelled") == 1
    assert value("baton_request_failure_total", reason="engine_failed") == 1
    assert value("baton_request_rejections_total", reason="overloaded") == 1
    assert value("baton_request_retries_total") == 1
    assert value("baton_slo_judged_requests_total") == 2
    assert value("baton_slo_good_requests_total") == 1
    assert value("baton_tenant_requests_total", tenant="acme") == 1
    assert value("baton_tenant_tokens_total", tenant="acme", kind="generation") == 5
    assert value("baton_tenant_requests_total", tenant="anonymous") == 2
    edge = {"transport": "shm", "src": "p", "dst": "d"}
    assert value("baton_kv_transfer_seconds_sum", **edge) == pytest.approx(0.095)
    assert value("baton_kv_transfer_bytes_total", **edge) == 1000


def test_the_phases_of_a_call_begin_with_its_first_attempt() -> None:
    world = World()
    call = PlayedCall(world.clock, world.feed)
    call.deliver(1)
    result = call.result(0, 0, attempts=2)
    *attempt, finished = result.timeline
    again = [replace(stamp, unix_ns=stamp.unix_ns + 200_000_000) for stamp in attempt[1:]]
    call.deliver(0, result=replace(result, timeline=(*attempt, *again, finished)))
    call.end(None)
    for phase, spent_s in (
        *(("queue", 0.011), ("prefill", 0.1)),
        *(("decode", 0.5 - 0.111), ("inference", 0.5 - 0.011)),
    ):
        assert world.value(f"baton_request_{phase}_time_seconds_sum") == pytest.approx(spent_s)


def test_engines_are_read_from_their_heartbeats() -> None:
    world = World()
    counters = Counters(
        num_preemptions=2, prefix_query_tokens=100, prefix_hit_tokens=60, num_transfers=4,
        transfer_bytes=4000, transfer_s=0.5, num_expired_leases=1,
        failed_transfers={"stale_blocks": 3},
        num_fetches=6, fetched_blocks=60, fetched_bytes=600, fetch_s=0.25,
        failed_fetches={"node_lost": 7},
    )  # fmt: skip
    engine = world.link("1", "d0", replace(LOAD, counters=counters))
    prompts = engine.account.prompts
    prompts.num_index_hits, prompts.num_stale_hits = 5, 2
    world.table.plans.chosen[ChosenPlan(False, True, False)] += 5
    node = {"role": "decode", "node": "d0"}
    assert world.value("baton_node_up", **node) == 1
    assert world.value("baton_num_requests_running", **node) == 3
    assert world.value("baton_num_requests_waiting", **node) == 2
    assert world.value("baton_kv_cache_usage_perc", **node) == 0.25
    assert world.value("baton_kv_leased_blocks", **node) == 11
    assert world.value("baton_num_preemptions_total", **node) == 2
    assert world.value("baton_prefix_cache_queries_total", **node) == 100
    assert world.value("baton_prefix_cache_hits_total", **node) == 60
    assert world.value("baton_kv_pull_bytes_total", **node) == 4000
    assert world.value("baton_kv_pull_seconds_total", **node) == 0.5
    assert world.value("baton_kv_expired_leases_total", **node) == 1
    assert world.value("baton_kv_transfer_failed_total", **node, reason="stale_blocks") == 3
    assert world.value("baton_prefix_fetches_total", **node) == 6
    assert world.value("baton_prefix_fetched_blocks_total", **node) == 60
    assert world.value("baton_prefix_fetched_bytes_total", **node) == 600
    assert world.value("baton_prefix_fetch_seconds_total", **node) == 0.25
    assert world.value("baton_prefix_fetch_failed_total", **node, reason="node_lost") == 7
    assert world.value("baton_router_decisions_total", reason="cached_prefix") == 5
    assert world.value("baton_index_hits_total") == 5
    assert world.value("baton_index_stale_hits_total") == 2
    world.num_queued = 3
    assert world.value("baton_num_requests_queued") == 3
    assert world.value("baton_index_up") == 1
    world.index_up = False
    assert world.value("baton_index_up") == 0


def test_the_help_has_every_reason_of_a_decision() -> None:
    plans = [ChosenPlan(*facts) for facts in product((False, True), repeat=3)]
    counted = {*PlanRecord(Counter(plans), num_unavailable=1).decisions()}
    assert len(counted) == 5
    assert counted <= set(re.findall(r"\w+", metric_table.DECISIONS.help))


def test_drafts_and_what_was_accepted_of_them() -> None:
    world = World()
    node = {"role": "decode", "node": "d0"}
    counters = Counters(num_drafts=10, num_draft_tokens=30, accepted_drafts=(8, 4, 1))
    world.link("1", "d0", replace(LOAD, counters=counters))
    assert world.value("baton_spec_decode_num_drafts_total", **node) == 10
    assert world.value("baton_spec_decode_num_draft_tokens_total", **node) == 30
    assert world.value("baton_spec_decode_num_accepted_tokens_total", **node) == 13
    name = "baton_spec_decode_num_accepted_tokens_per_pos_total"
    assert world.value(name, **node, position="1") == 4
    assert world.value("baton_spec_decode_mean_acceptance_length", **node) == 2.3
    world.link("2", "d1", LOAD)
    of_another = {"role": "decode", "node": "d1"}
    assert world.value("baton_spec_decode_mean_acceptance_length", **of_another) is None


def test_loads_of_experts_and_of_ranks_that_have_them_whole() -> None:
    world = World()
    node = {"role": "decode", "node": "d0"}
    counters = Counters(expert_tokens=(10, 20, 40, 10))
    world.link("1", "d0", replace(LOAD, counters=counters, expert_ranks=2))
    assert world.value("baton_expert_tokens_total", **node, expert="2") == 40
    assert world.value("baton_expert_load_imbalance", **node) == 2
    assert world.value("baton_expert_rank_load_imbalance", **node) == 1.25
    world.unlink("1")
    few = Counters(expert_tokens=(1, 1, 1, 1))
    world.link("2", "d0", replace(LOAD, counters=few, expert_ranks=1))
    assert world.value("baton_expert_tokens_total", **node, expert="2") == 41
    assert world.value("baton_expert_load_imbalance", **node) == 1
    assert world.value("baton_expert_rank_load_imbalance", **node) is None
    world.link("3", "p0", LOAD)
    assert world.value("baton_expert_load_imbalance", role="prefill", node="p0") is None


def test_an_engine_s_counters_go_on_over_its_restart() -> None:
    world = World()
    node = {"role": "decode", "node": "d0"}
    world.link("1", "d0", replace(LOAD, counters=Counters(num_preemptions=7)))
    assert world.value("baton_num_preemptions_total", **node) == 7
    world.unlink("1")
    assert world.value("baton_num_preemptions_total", **node) == 7
    world.link("2", "d0", replace(LOAD, counters=Counters(num_preemptions=2)))
    assert world.value("baton_num_preemptions_total", **node) == 9
    assert world.value("baton_num_preemptions_total", **node) == 9


@pytest.mark.parametrize("is_read_between", [False, True])
def test_an_engine_s_counters_go_on_over_a_link_that_breaks(is_read_between: bool) -> None:
    """The engine's counters continue over a lost link, and count all that happened meanwhile."""
    world = World()
    node = {"role": "decode", "node": "d0"}
    load = replace(LOAD, counters=Counters(num_preemptions=7))
    first = world.link("1", "d0", load)
    assert world.value("baton_num_preemptions_total", **node) == 7
    first.account.prompts.num_index_hits += 5
    world.unlink("1")
    if is_read_between:
        world.scrape()
    world.link("1", "d0", load).account.prompts.num_index_hits += 2
    assert world.value("baton_num_preemptions_total", **node) == 7
    assert world.value("baton_index_hits_total") == 7


def test_a_lost_engine_is_down_for_ten_minutes_and_then_forgotten() -> None:
    world = World()
    failures = {"node_lost": 1}
    counters = Counters(
        failed_transfers=failures, failed_fetches=failures,
        expert_tokens=(3, 4), accepted_drafts=(2, 1),
    )  # fmt: skip
    world.link("1", "d0", replace(LOAD, counters=counters))
    node = {"role": "decode", "node": "d0"}
    assert world.value("baton_node_up", **node) == 1
    world.unlink("1")
    world.clock.advance(590)
    assert world.value("baton_node_up", **node) == 0
    assert world.value("baton_num_requests_running", **node) is None
    assert world.value("baton_num_preemptions_total", **node) == 0
    world.clock.advance(11)
    assert not [key for key in world.scrape() if ("node", "d0") in key[1]]


@pytest.mark.parametrize(("role", "name"), [(Role.PREFILL, "p"), (Role.DECODE, "d")])
def test_with_a_lost_engine_its_hand_offs_are_forgotten(role: Role, name: str) -> None:
    """A lost engine's hand-off series are removed, or replaced engines would use up the label
    sets."""
    world = World()
    world.link("1", name, LOAD, role)
    call = PlayedCall(world.clock, world.feed)
    call.deliver(1)
    call.finish()
    world.scrape()
    world.unlink("1")
    edge = {"transport": "shm", "src": "p", "dst": "d"}
    for ends, advance_s in ((False, 590), (True, 11)):
        world.clock.advance(advance_s)
        for series in ("seconds_count", "bytes_total"):
            assert (world.value(f"baton_kv_transfer_{series}", **edge) is None) == ends


def test_tokens_of_a_running_call() -> None:
    world = World()
    call = PlayedCall(world.clock, world.feed)
    for _ in range(50):
        world.clock.advance(0.06)
        call.deliver(1)
    assert world.value("baton_generation_tokens_total") == 50
    assert world.value("baton_coalesced_tokens_total") == 0
    assert world.value("baton_inter_token_latency_seconds_count") == 49
    assert world.value("baton_inter_token_latency_seconds_sum") == pytest.approx(49 * 0.06)


def test_labels_are_bounded() -> None:
    world = World()
    for number in range(MAX_CHILDREN + 50):
        PlayedCall(world.clock, world.feed, tenant=f"t{number}").end(Cancelled("x"))
    series = [key for key in world.scrape() if key[0] == "baton_tenant_requests_total"]
    assert len(series) <= 101
    assert world.value("baton_tenant_requests_total", tenant="other") == 250
    store = MetricStore("x_", "m")
    for number in range(MAX_CHILDREN + 50):
        store.add(metric_table.FAILURES, f"r{number}")
    [family] = [f for f in store.collect() if f.name == "x_request_failure"]
    assert len(family.samples) == MAX_CHILDREN + 1
    assert sum(sample.value for sample in family.samples) == MAX_CHILDREN + 50


@pytest.mark.parametrize(
    ("prefix", "name"),
    [("vllm", "vllm:e2e_request_latency_seconds"), ("my_", "my_e2e_request_latency_seconds")],
)
def test_prefix(prefix: str, name: str) -> None:
    world = World(prefix)
    PlayedCall(world.clock, world.feed).end(EngineFailed("x"))
    assert world.value(f"{name}_count") == 0
    assert full_prefix("baton") == "baton_"


def test_open_metrics_is_well_formed_and_has_every_metric() -> None:
    world = World()
    world.link("1", "d0", LOAD)
    text, content_type = world.exporter.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    found = {family.name: family.type for family in parse_open(text.decode())}
    for metric in metric_table.ALL:
        assert found[f"baton_{metric.name.removesuffix('_total')}"] == metric.kind


def test_page_is_fresh() -> None:
    page = (DOCS / "metrics.md").read_text()
    assert reference.refresh_metrics_page(page) == page, "make docs"
