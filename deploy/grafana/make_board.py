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
    return [
        (
            f"histogram_quantile({q}, {rate(f'{metric}_bucket', ' by (le)')})",
            f"p{round(q * 100)}",
        )
        for q in (0.5, 0.9, 0.99)
    ]


def rate(metric: str, by: str = "", select: str = CALLS) -> str:
    """Per second, over all gateways."""
    return f"sum{by} (rate(baton_{metric}{select}[$__rate_interval]))"


def of_nodes(metric: str) -> list[tuple[str, str]]:
    """What engines say: every gateway tells it, so once."""
    return [(f"max by (role, node) (baton_{metric}{OF_NODES})", "{{role}} {{node}}")]


def node_rate(metric: str) -> list[tuple[str, str]]:
    query = f"max by (role, node) (rate(baton_{metric}{OF_NODES}[$__rate_interval]))"
    return [(query, "{{role}} {{node}}")]


def heat(metric: str) -> list[tuple[str, str]]:
    return [(f"sum by (le) (increase(baton_{metric}_bucket{CALLS}[$__rate_interval]))", "{{le}}")]


SLO = f"{rate('slo_good_requests_total')} / {rate('slo_judged_requests_total')}"
FAILED = '{model_name=~"$model",reason!="cancelled"}'
BY_EDGE = " by (src, dst, transport)"
EDGE = "{{src}} > {{dst}} ({{transport}})"
HIT_RATE = (
    f"max by (role, node) (rate(baton_prefix_cache_hits_total{OF_NODES}[$__rate_interval]))"
    f" / max by (role, node) (rate(baton_prefix_cache_queries_total{OF_NODES}[$__rate_interval]))"
)
CACHED = f"{rate('prompt_tokens_cached_total')} / {rate('prompt_tokens_total')}"
PULL_SPEED = (
    f"max by (role, node) (rate(baton_kv_pull_bytes_total{OF_NODES}[$__rate_interval]))"
    f" / max by (role, node) (rate(baton_kv_pull_seconds_total{OF_NODES}[$__rate_interval]))"
)
EXPIRED = node_rate("kv_expired_leases_total")
FAILURES_BY_NODE = [
    (
        f"max by (node, reason) (rate(baton_kv_transfer_failed_total{OF_NODES}[$__rate_interval]))",
        "{{node}} {{reason}}",
    )
]
STALE = f"{rate('index_stale_hits_total')} / {rate('index_hits_total')}"
MEAN_STAGE = (
    f"{rate('request_stage_seconds_sum', ' by (stage)')}"
    f" / {rate('request_stage_seconds_count', ' by (stage)')}"
)
CERTIFICATES = "min by (file) (baton_certificate_expires_timestamp_seconds) * 1000"
UP = f"sum by (role) (max by (role, node) (baton_node_up{OF_NODES}))"

# (row, [(title, kind of panel, unit, [(query, legend), ...]), ...])
ROWS: list[tuple[str, list[tuple[str, str, str, list[tuple[str, str]]]]]] = [
    (
        "Overview",
        [
            ("Requests/s", "stat", "reqps", [(rate("request_success_total"), "")]),
            ("Prompt tokens/s", "stat", "short", [(rate("prompt_tokens_total"), "")]),
            ("Output tokens/s", "stat", "short", [(rate("generation_tokens_total"), "")]),
            ("SLO attainment", "stat", "percentunit", [(SLO, "")]),
            ("Goodput", "stat", "reqps", [(rate("slo_good_requests_total"), "")]),
            ("Failed/s", "stat", "reqps", [(rate("request_failure_total", "", FAILED), "")]),
            (
                "In flight, and of them waiting at the gateway",
                "stat",
                "short",
                [
                    (f"sum (baton_num_requests_in_flight{CALLS})", "in flight"),
                    (f"sum (baton_num_requests_queued{CALLS})", "waiting"),
                ],
            ),
            ("Engines up", "stat", "short", [(UP, "{{role}}")]),
            ("Certificates end", "stat", "dateTimeAsIso", [(CERTIFICATES, "{{file}}")]),
        ],
    ),
    (
        "Latency",
        [
            ("TTFT", "timeseries", "s", quantiles("time_to_first_token_seconds")),
            (
                "TBT (gap between tokens)",
                "timeseries",
                "s",
                quantiles("inter_token_latency_seconds"),
            ),
            ("Hand-off gap", "timeseries", "s", quantiles("handoff_gap_seconds")),
            ("TPOT", "timeseries", "s", quantiles("request_time_per_output_token_seconds")),
        ],
    ),
    (
        "Distributions",
        [
            ("TTFT", "heatmap", "s", heat("time_to_first_token_seconds")),
            ("TBT", "heatmap", "s", heat("inter_token_latency_seconds")),
            ("E2E", "timeseries", "s", quantiles("e2e_request_latency_seconds")),
        ],
    ),
    (
        "Where the time goes",
        [
            ("Mean stages to the second token", "stacked", "s", [(MEAN_STAGE, "{{stage}}")]),
            ("Queue", "timeseries", "s", quantiles("request_queue_time_seconds")),
            ("Prefill", "timeseries", "s", quantiles("request_prefill_time_seconds")),
            ("Decode", "timeseries", "s", quantiles("request_decode_time_seconds")),
            ("Inference", "timeseries", "s", quantiles("request_inference_time_seconds")),
        ],
    ),
    (
        "Calls",
        [
            (
                "Finished",
                "timeseries",
                "reqps",
                [(rate("request_success_total", " by (finished_reason)"), "{{finished_reason}}")],
            ),
            (
                "Failed, by code",
                "timeseries",
                "reqps",
                [(rate("request_failure_total", " by (reason)"), "{{reason}}")],
            ),
            (
                "Refused, by code",
                "timeseries",
                "reqps",
                [
                    (rate("request_rejections_total", " by (reason)"), "{{reason}}"),
                    (rate("http_connections_refused_total"), "HTTP connections"),
                ],
            ),
            (
                "Retries and coalesced tokens",
                "timeseries",
                "short",
                [
                    (rate("request_retries_total"), "retries/s"),
                    (rate("coalesced_tokens_total"), "coalesced tokens/s"),
                ],
            ),
            ("Prompt tokens of a call", "timeseries", "short", quantiles("request_prompt_tokens")),
            (
                "Output tokens of a call",
                "timeseries",
                "short",
                quantiles("request_generation_tokens"),
            ),
        ],
    ),
    (
        "Tenants",
        [
            (
                "Calls/s",
                "timeseries",
                "reqps",
                [(rate("tenant_requests_total", " by (tenant)"), "{{tenant}}")],
            ),
            (
                "Tokens/s",
                "timeseries",
                "short",
                [(rate("tenant_tokens_total", " by (tenant, kind)"), "{{tenant}} {{kind}}")],
            ),
        ],
    ),
    (
        "Engines",
        [
            ("Up", "timeseries", "short", of_nodes("node_up")),
            ("Running", "timeseries", "short", of_nodes("num_requests_running")),
            ("Waiting", "timeseries", "short", of_nodes("num_requests_waiting")),
            ("Tokens waiting", "timeseries", "short", of_nodes("num_tokens_waiting")),
            ("Preemptions/s", "timeseries", "short", node_rate("num_preemptions_total")),
            ("Draining", "timeseries", "short", of_nodes("node_draining")),
        ],
    ),
    (
        "KV cache",
        [
            ("In use", "usage", "percentunit", of_nodes("kv_cache_usage_perc")),
            ("Free blocks", "timeseries", "short", of_nodes("kv_free_blocks")),
            ("Leased blocks", "timeseries", "short", of_nodes("kv_leased_blocks")),
            ("Credit", "timeseries", "short", of_nodes("kv_credit_blocks")),
        ],
    ),
    (
        "KV transfer",
        [
            ("One hand-off", "timeseries", "s", quantiles("kv_transfer_seconds")),
            (
                "Bytes/s by edge",
                "timeseries",
                "Bps",
                [(rate("kv_transfer_bytes_total", BY_EDGE), EDGE)],
            ),
            ("Speed while pulling", "timeseries", "Bps", [(PULL_SPEED, "{{node}}")]),
            ("Hand-offs/s", "timeseries", "ops", node_rate("kv_pulls_total")),
            ("Failed, by code", "timeseries", "ops", FAILURES_BY_NODE),
            ("Expired leases/s", "timeseries", "ops", EXPIRED),
        ],
    ),
    (
        "Prefix cache and routing",
        [
            ("Hits by engine", "timeseries", "percentunit", [(HIT_RATE, "{{role}} {{node}}")]),
            ("Prompt tokens saved", "timeseries", "percentunit", [(CACHED, "share")]),
            (
                "Decisions",
                "timeseries",
                "ops",
                [(rate("router_decisions_total", " by (reason)"), "{{reason}}")],
            ),
            ("Index look-up", "timeseries", "s", quantiles("index_lookup_seconds")),
            ("Stale hits", "timeseries", "percentunit", [(STALE, "share")]),
            (
                "Index up",
                "timeseries",
                "short",
                [(f"min by (instance) (baton_index_up{CALLS})", "{{instance}}")],
            ),
        ],
    ),
]


def panel(number: int, title: str, kind: str, unit: str, lines: list[tuple[str, str]]) -> Any:
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
    """The whole board."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []}
        )
        y += 1
        a_line = 8 if row[0][1] == "stat" else min(len(row), 3)
        height = 4 if row[0][1] == "stat" else 8
        for index, (name, kind, unit, lines) in enumerate(row):
            made = panel(len(panels) + 1, name, kind, unit, lines)
            width = 24 // a_line
            x, line = width * (index % a_line), index // a_line
            made["gridPos"] = {"x": x, "y": y + line * height, "w": width, "h": height}
            panels.append(made)
        y += height * -(-len(row) // a_line)
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
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                },
                variable(
                    "model", "Model", "label_values(baton_num_requests_in_flight, model_name)"
                ),
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
