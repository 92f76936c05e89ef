"""docs/metrics.md, made from the table of metrics."""

from __future__ import annotations

from collections.abc import Sequence

from .metric_table import OF_CALLS, OF_CERTIFICATES, OF_ENGINES, OF_ROUTING, Metric

_HEAD = """\
# Metrics

A gateway answers `GET /metrics` on its HTTP port, in OpenMetrics or in Prometheus' older text
format. Names are shown with the default prefix; `--metrics-prefix vllm` gives `vllm:` instead of
`baton_`, and then the metrics that vLLM has too carry its names, so that boards and autoscalers
made for it work. All have a label `model_name`. This page is made from the code (`make docs`).
Bounds of histograms are made for tokens that are a few milliseconds apart.

**What is measured where.** Times are of delivery at the gateway: a token counts when it is
written to the client. The first token is computed on a prefill node, and the gap behind it
contains the KV transfer and the decode node's admission: it is in `inter_token_latency_seconds`,
and also by itself in `handoff_gap_seconds`. Where a client reads slowly, tokens come coalesced: a
delivery of several has one gap, and `coalesced_tokens_total` counts the others.

**Several gateways.** Each counts its own calls: sum them. What engines say (`role`, `node`) every
gateway tells again: take the maximum over gateways, as the rules in `deploy/prometheus/` do. Of
gateways that share a port (`--num-gateways`) each has an HTTP port of its own: scrape those, since
at the shared port any of them answers.

**Bounded.** No label comes from a request but the tenant's name, of which 100 are kept apart; a
metric has 300 label sets at most, and what is beyond counts as `other`. An engine that is lost
has `node_up` 0 for ten minutes, and then its series end. An engine's counters go on where it
restarts under its name.

**Log lines.** With `--log-json` a process logs JSON lines (`time`, `level`, `process`, `logger`,
`message`), and a gateway one for each call that is over: `request_id`, `tenant`, `outcome` (`stop`,
`length` or an error's code), tokens, times, stages, nodes. No prompt is in them unless
`--log-prompts` is given too, and no error's words. Lines of one kind that come in floods are cut
short; the calls' are not.

**Traces.** With `--otlp-traces-endpoint URL` (OTLP over HTTP; `pip install 'baton-serve[otel]'`) a
gateway sends a span for each call and one for each of its stages, with the attributes of the GenAI
semantic conventions. A `traceparent` that comes over HTTP or gRPC goes on, and its word on sampling
counts; of the calls without one, `--otlp-traces-ratio` are traced.
"""


def metrics_page() -> str:
    """The page as Markdown."""
    groups = (
        *(("Calls", OF_CALLS), ("Routing", OF_ROUTING), ("Engines", OF_ENGINES)),
        ("Certificates", OF_CERTIFICATES),
    )
    tables = [f"## {title}\n\n{_table(metrics)}" for title, metrics in groups]
    return "\n".join([_HEAD, *tables])


def _table(metrics: Sequence[Metric]) -> str:
    rows = [
        f"| `baton_{metric.name}` | {metric.kind} | "
        f"{', '.join(f'`{label}`' for label in metric.labels)} | {metric.help} |"
        for metric in metrics
    ]
    return "\n".join(["| name | kind | labels | meaning |", "|---|---|---|---|", *rows, ""])
