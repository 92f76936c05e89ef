"""Make baton.json, the Grafana board: rows of panels from the lines below. Run it after a change.

python deploy/grafana/make_board.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
CALLS = '{model_name=~"$model"}'
OF_NODES = '{model_name=~"$model",role=~"$role"}'


def quantiles(metric: str) -> list[tuple[str, str]]:
    """Three lines of a histogram, over all gateways."""
    buckets = rate(f"{metric}_bucket", " by (le)")
    return [(f"histogram_quantile({q / 100:g}, {buckets})", f"p{q}") for q in (50, 90, 99)]


def rate(metric: str, by: str = "", select: str = CALLS) -> str:
    """Per second, over all gateways."""
    return f"sum{by} (rate(baton_{metric}{select}[$__rate_interval]))"


def by(metric: str, *labels: str) -> list[tuple[str, str]]:
    """Per second, a line for each of the labels' values."""
    return [(rate(metric, f" by ({', '.join(labels)})"), " ".join(f"{{{{{x}}}}}" for x in labels))]


def of_nodes(metric: str) -> list[tuple[str, str]]:
    """What engines report: every gateway exports it, so once."""
    return [(f"max by (role, node) (baton_{metric}{OF_NODES})", "{{role}} {{node}}")]


def node_rate(metric: str, *labels: str) -> list[tuple[str, str]]:
    """The same per second, a line for each of the labels' values."""
    labels = labels or ("role", "node")
    query = f"max by ({', '.join(labels)}) (rate(baton_{metric}{OF_NODES}[$__rate_interval]))"
    return [(query, " ".join(f"{{{{{x}}}}}" for x in labels))]


def heat(metric: str) -> list[tuple[str, str]]:
    return [(f"sum by (le) (increase(baton_{metric}_bucket{CALLS}[$__rate_interval]))", "{{le}}")]


SLO = f"{rate('slo_good_requests_total')} / {rate('slo_judged_requests_total')}"
FAILED = '{model_name=~"$model",reason!="cancelled"}'
MOVED = '{model_name=~"$model",outcome="moved"}'
BY_EDGE = " by (src, dst, transport)"
EDGE = "{{src}} > {{dst}} ({{transport}})"
HIT_RATE = " / ".join(node_rate(f"prefix_cache_{what}_total")[0][0] for what in ("hits", "queries"))
CACHED = f"{rate('prompt_tokens_cached_total')} / {rate('prompt_tokens_total')}"
PULL_SPEED = " / ".join(node_rate(f"kv_pull_{what}_total")[0][0] for what in ("bytes", "seconds"))
FETCH_SPEED = " / ".join(
    node_rate(f"prefix_{what}_total")[0][0] for what in ("fetched_bytes", "fetch_seconds")
)
EXPERT_RATE = node_rate("expert_tokens_total", "role", "node", "expert")[0][0]
EXPERTS = [
    (f"max by (role, node) ({EXPERT_RATE})", "{{role}} {{node}}, the busiest"),
    (f"avg by (role, node) ({EXPERT_RATE})", "{{role}} {{node}}, mean"),
]
ACCEPTED = "spec_decode_num_accepted_tokens_per_pos_total"
ADAPTERS = [
    ("max by (max_lora, running_lora_adapters, waiting_lora_adapters) "
     f"(baton_lora_requests_info{CALLS}) * 1000",
     "{{running_lora_adapters}} run, {{waiting_lora_adapters}} wait")
]  # fmt: skip
STALE = f"{rate('index_stale_hits_total')} / {rate('index_hits_total')}"
MEAN_STAGE = " / ".join(
    rate(f"request_stage_seconds_{what}", " by (stage)") for what in ("sum", "count")
)
CERTIFICATES = f"min by (file) (baton_certificate_expires_timestamp_seconds{CALLS}) * 1000"
UP = f"sum by (role) (max by (role, node) (baton_node_up{OF_NODES}))"

IN_FLIGHT = [
    (f"sum (baton_num_requests_in_flight{CALLS})", "in flight"),
    (f"sum (baton_num_requests_queued{CALLS})", "waiting"),
]
REFUSED = [
    *by("request_rejections_total", "reason"),
    (rate("http_connections_refused_total"), "HTTP connections"),
]
RETRIES = [
    (rate("request_retries_total"), "retries/s"),
    (rate("request_moves_total", "", MOVED), "moves/s"),
    (rate("coalesced_tokens_total"), "coalesced tokens/s"),
]
# Each gateway has its own queue and the engines' in its number: theirs count once.
AT_ENGINES = f"baton_deployment_requests_waiting{CALLS} - baton_num_requests_queued{CALLS}"
DEPLOYMENT = [
    (f"sum (max by (model_name) (baton_deployment_requests_running{CALLS}))", "running"),
    (
        f"sum (baton_num_requests_queued{CALLS}) + sum (max by (model_name) ({AT_ENGINES}))",
        "waiting",
    ),
]
KV_OF_ALL = [(f"max (baton_deployment_kv_cache_usage_perc{CALLS})", "")]
CACHE = [
    (f"max by (block_size, num_gpu_blocks) (baton_cache_config_info{CALLS})",
     "{{num_gpu_blocks}} of {{block_size}} tokens")
]  # fmt: skip
INDEX_UP = [(f"min by (instance) (baton_index_up{CALLS})", "{{instance}}")]

# By row: (title, unit, [(query, legend), ...], kind of panel if it is no series over time)
ROWS: dict[str, list[tuple[Any, ...]]] = {
    "Overview": [
        ("Requests/s", "reqps", [(rate("request_success_total"), "")], "stat"),
        ("Prompt tokens/s", "short", [(rate("prompt_tokens_total"), "")], "stat"),
        ("Output tokens/s", "short", [(rate("generation_tokens_total"), "")], "stat"),
        ("SLO attainment", "percentunit", [(SLO, "")], "stat"),
        ("Goodput", "reqps", [(rate("slo_good_requests_total"), "")], "stat"),
        ("Failed/s", "reqps", [(rate("request_failure_total", "", FAILED), "")], "stat"),
        ("In flight, and of them waiting at the gateway", "short", IN_FLIGHT, "stat"),
        ("In all engines, and waiting anywhere", "short", DEPLOYMENT, "stat"),
        ("KV use of all engines", "percentunit", KV_OF_ALL, "stat"),
        ("KV blocks for prompts", "short", CACHE, "stat"),
        ("Engines up", "short", [(UP, "{{role}}")], "stat"),
        ("Certificates end", "dateTimeAsIso", [(CERTIFICATES, "{{file}}")], "stat"),
    ],
    "Latency": [
        ("TTFT", "s", quantiles("time_to_first_token_seconds")),
        ("TBT (gap between tokens)", "s", quantiles("inter_token_latency_seconds")),
        ("Hand-off gap", "s", quantiles("handoff_gap_seconds")),
        ("TPOT", "s", quantiles("request_time_per_output_token_seconds")),
    ],
    "Distributions": [
        ("TTFT", "s", heat("time_to_first_token_seconds"), "heatmap"),
        ("TBT", "s", heat("inter_token_latency_seconds"), "heatmap"),
        ("E2E", "s", quantiles("e2e_request_latency_seconds")),
    ],
    "Where the time goes": [
        ("Mean stages to the second token", "s", [(MEAN_STAGE, "{{stage}}")], "stacked"),
        ("Queue", "s", quantiles("request_queue_time_seconds")),
        ("Prefill", "s", quantiles("request_prefill_time_seconds")),
        ("Decode", "s", quantiles("request_decode_time_seconds")),
        ("Inference", "s", quantiles("request_inference_time_seconds")),
    ],
    "Calls": [
        ("Finished", "reqps", by("request_success_total", "finished_reason")),
        ("Failed, by code", "reqps", by("request_failure_total", "reason")),
        ("Refused, by code", "reqps", REFUSED),
        ("Retries and coalesced tokens", "short", RETRIES),
        ("Prompt tokens of a call", "short", quantiles("request_prompt_tokens")),
        ("Output tokens of a call", "short", quantiles("request_generation_tokens")),
    ],
    "Tenants": [
        ("Calls/s", "reqps", by("tenant_requests_total", "tenant")),
        ("Tokens/s", "short", by("tenant_tokens_total", "tenant", "kind")),
    ],
    "Engines": [
        ("Up", "short", of_nodes("node_up")),
        ("Running", "short", of_nodes("num_requests_running")),
        ("Waiting", "short", of_nodes("num_requests_waiting")),
        ("Tokens waiting", "short", of_nodes("num_tokens_waiting")),
        ("Preemptions/s", "short", node_rate("num_preemptions_total")),
        ("Swaps/s", "short", node_rate("num_swaps_total")),
        ("Draining", "short", of_nodes("node_draining")),
        ("Longest step promised", "s", of_nodes("engine_tbt_target_seconds")),
        ("Error of predicted steps", "percentunit", of_nodes("engine_step_cost_error")),
        ("Promised steps/s", "short", node_rate("promised_steps_total")),
        ("Steps/s that kept it", "short", node_rate("kept_steps_total")),
        ("Refused by engines/s", "short", node_rate("promise_refusals_total")),
        ("Steps with drafts/s", "short", node_rate("spec_decode_num_drafts_total")),
        ("Drafts/s", "short", node_rate("spec_decode_num_draft_tokens_total")),
        ("Accepted drafts/s", "short", node_rate("spec_decode_num_accepted_tokens_total")),
        ("Accepted drafts/s by position", "short", node_rate(ACCEPTED, "role", "node", "position")),
        ("Tokens of a step with drafts", "short", of_nodes("spec_decode_mean_acceptance_length")),
        ("LoRA adapters, last seen", "dateTimeAsIso", ADAPTERS, "stat"),
        ("Tokens/s of an expert", "short", EXPERTS),
        ("Busiest expert over the mean", "short", of_nodes("expert_load_imbalance")),
        ("Busiest expert rank over the mean", "short", of_nodes("expert_rank_load_imbalance")),
    ],
    "KV cache": [
        ("In use", "percentunit", of_nodes("kv_cache_usage_perc"), "usage"),
        ("Free blocks", "short", of_nodes("kv_free_blocks")),
        ("Leased blocks", "short", of_nodes("kv_leased_blocks")),
        ("Credit", "short", of_nodes("kv_credit_blocks")),
        ("Blocks in host memory", "short", of_nodes("kv_host_blocks")),
        ("Tokens/s from host memory", "short", node_rate("prefix_cache_host_hits_total")),
        ("To host memory", "Bps", node_rate("kv_host_bytes_out_total")),
        ("From host memory", "Bps", node_rate("kv_host_bytes_in_total")),
        ("Blocks on disk", "short", of_nodes("kv_disk_blocks")),
        ("Tokens/s from disk", "short", node_rate("prefix_cache_disk_hits_total")),
        ("Failed on disk/s", "short", node_rate("kv_disk_failures_total")),
        ("To disk", "Bps", node_rate("kv_disk_bytes_out_total")),
        ("From disk", "Bps", node_rate("kv_disk_bytes_in_total")),
    ],
    "KV transfer": [
        ("One hand-off", "s", quantiles("kv_transfer_seconds")),
        ("Bytes/s by edge", "Bps", [(rate("kv_transfer_bytes_total", BY_EDGE), EDGE)]),
        ("Speed while pulling", "Bps", [(PULL_SPEED, "{{node}}")]),
        ("Hand-offs/s", "ops", node_rate("kv_pulls_total")),
        ("Failed, by code", "ops", node_rate("kv_transfer_failed_total", "node", "reason")),
        ("Expired leases/s", "ops", node_rate("kv_expired_leases_total")),
    ],
    "Prefix cache and routing": [
        ("Hits by engine", "percentunit", [(HIT_RATE, "{{role}} {{node}}")]),
        ("Prompt tokens saved", "percentunit", [(CACHED, "share")]),
        ("Decisions", "ops", by("router_decisions_total", "reason")),
        ("Index look-up", "s", quantiles("index_lookup_seconds")),
        ("Prefixes fetched/s", "ops", node_rate("prefix_fetches_total")),
        ("Blocks of them/s", "ops", node_rate("prefix_fetched_blocks_total")),
        ("Speed while fetching", "Bps", [(FETCH_SPEED, "{{role}} {{node}}")]),
        ("Not fetched, by code", "ops", node_rate("prefix_fetch_failed_total", "node", "reason")),
        ("Stale hits", "percentunit", [(STALE, "share")]),
        ("Index up", "short", INDEX_UP),
    ],
}


def panel(
    number: int, title: str, unit: str, lines: list[tuple[str, str]], kind: str = "timeseries"
) -> Any:
    """One panel; its place is set by `board`."""
    field: dict[str, Any] = {"unit": unit}
    if kind == "stacked":
        field["custom"] = {"stacking": {"mode": "normal"}, "fillOpacity": 40}
    if kind == "usage":
        steps = [("green", None), ("orange", 0.9), ("red", 0.98)]
        field |= {
            "min": 0,
            "max": 1,
            "thresholds": {
                "mode": "absolute",
                "steps": [{"color": color, "value": value} for color, value in steps],
            },
            "custom": {"thresholdsStyle": {"mode": "line"}},
        }
    made = {
        "id": number,
        "title": title,
        "type": kind if kind in ("stat", "heatmap") else "timeseries",
        "datasource": SOURCE,
        "fieldConfig": {"defaults": field, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend or "__auto",
                "format": "heatmap" if kind == "heatmap" else "time_series",
            }
            for index, (query, legend) in enumerate(lines)
        ],
    }
    if kind == "heatmap":
        made["options"] = {"calculate": False, "yAxis": {"unit": unit}}
    return made


def board() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []}
        )
        y += 1
        a_line = 8 if row[0][-1] == "stat" else min(len(row), 3)
        height = 4 if row[0][-1] == "stat" else 8
        for index, described in enumerate(row):
            made = panel(len(panels) + 1, *described)
            width = 24 // a_line
            x, line = width * (index % a_line), index // a_line
            made["gridPos"] = {"x": x, "y": y + line * height, "w": width, "h": height}
            panels.append(made)
        y += height * -(-len(row) // a_line)
    of_calls = "baton_num_requests_in_flight"
    source = {"name": "datasource", "label": "Data source"}
    source |= {"type": "datasource", "query": "prometheus"}
    return {
        "title": "Baton",
        "uid": "baton",
        "tags": ["baton", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                source,
                variable("model", "Model", f"label_values({of_calls}, model_name)"),
                variable("role", "Role", "label_values(baton_node_up, role)"),
            ]
        },
        "panels": panels,
    }


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"selected": True, "text": "All", "value": "$__all"},
    }


if __name__ == "__main__":
    (HERE / "baton.json").write_text(json.dumps(board(), indent=1) + "\n")
