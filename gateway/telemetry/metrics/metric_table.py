"""All metrics that a gateway exports: name, kind, labels, meaning. The tables of docs/metrics.md
are generated from it.

Names are without the prefix. A metric with the meaning of one of vLLM's has the same name, so that
dashboards and autoscalers for vLLM work. All have the label `model_name`, which is not listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from ....core import errors
from ....core.request.request import FinishReason

_LONG_S = (0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TTFT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, *_LONG_S)
GAP_S = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03),
    *(0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10),
)
CALL_S = (0.01, 0.025, 0.05, 0.1, *_LONG_S)
STAGE_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
TRANSFER_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
LOOKUP_S = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)


# Error codes of calls that failed through no fault of the caller, and of calls refused for load.
_FAULTS = tuple(
    error.code
    for error in (
        *(errors.BatonError, errors.EngineFailed, errors.HostLost, errors.NodeLost),
        *(errors.Unavailable, errors.PromiseRefused, errors.TrialRefused, errors.DeadlineExceeded),
        *(errors.HandoffFailed, errors.StaleBlocks, errors.LeaseExpired, errors.UnknownTransfer),
        errors.Overloaded,  # no place became free in time
    )
)
_REFUSALS = tuple(e.code for e in (errors.Overloaded, errors.RateLimited, errors.Unavailable))


@dataclass(frozen=True, slots=True)
class Metric:
    """`kind`: "counter" (its name ends in _total), "gauge", or "histogram" if it has buckets.

    `known`: values of a counter's only label whose series begin at 0, before the first event, so
    that rates include the first one. `source`: the heartbeat's field with its value, see
    _FROM_HEARTBEATS.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    known: tuple[str, ...] = ()
    source: str = ""

    @property
    def kind(self) -> str:
        if self.buckets:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"


TTFT = Metric(
    "time_to_first_token_seconds",
    "From a call's arrival to the delivery of its first token.",
    buckets=TTFT_S,
)
INTER_TOKEN = Metric(
    "inter_token_latency_seconds",
    "TBT: the gap between two deliveries of a stream, including the hand-off gap.",
    buckets=GAP_S,
)
HANDOFF_GAP = Metric(
    "handoff_gap_seconds",
    "From a stream's first token to its second. Includes KV transfer and decode admission, unless "
    "one engine serves the whole request or the first token is held back until they are done.",
    buckets=GAP_S,
)
TPOT = Metric(
    "request_time_per_output_token_seconds",
    "(last token - first token) / (tokens - 1), one sample per stream.",
    buckets=GAP_S,
)
E2E = Metric(
    "e2e_request_latency_seconds", "From arrival to the end of a finished call.", buckets=CALL_S
)
QUEUE = Metric(
    "request_queue_time_seconds",
    "From arrival to the prefill's first step: the queues of the gateway and the prefill node.",
    buckets=CALL_S,
)
PREFILL = Metric(
    "request_prefill_time_seconds",
    "From the prefill's first step to the first token, measured at the node.",
    buckets=CALL_S,
)
DECODE = Metric(
    "request_decode_time_seconds",
    "From the first token at the node to the call's end, including the hand-off.",
    buckets=CALL_S,
)
INFERENCE = Metric(
    "request_inference_time_seconds",
    "From the prefill's first step to the call's end.",
    buckets=CALL_S,
)
STAGE = Metric(
    "request_stage_seconds",
    "One stage of a finished call, as in the dashboard. The sum of a call's stages is the time to "
    "its second token, or without a hand-off (three stages) to its first.",
    ("stage",),
    STAGE_S,
)
PROMPT_LENGTH = Metric("request_prompt_tokens", "Prompt tokens of a finished call.", buckets=TOKENS)
OUTPUT_LENGTH = Metric(
    "request_generation_tokens", "Delivered tokens of a finished call.", buckets=TOKENS
)
PROMPT_TOKENS = Metric("prompt_tokens_total", "Prompt tokens of calls that were admitted.")
CACHED_TOKENS = Metric(
    "prompt_tokens_cached_total",
    "Prompt tokens of finished calls that were found in a prefix cache.",
)
OUTPUT_TOKENS = Metric("generation_tokens_total", "Tokens delivered to clients.")
COALESCED_TOKENS = Metric(
    "coalesced_tokens_total",
    "Tokens delivered together with an earlier one because the client reads too slowly.",
)
SUCCESSES = Metric(
    "request_success_total",
    "Finished calls.",
    ("finished_reason",),
    known=tuple(reason.value for reason in FinishReason),
)
FAILURES = Metric(
    "request_failure_total",
    "Admitted calls that did not finish, by error code; cancelled: by the client.",
    ("reason",),
    known=_FAULTS,
)
REJECTIONS = Metric(
    "request_rejections_total",
    "Calls that were not admitted, by error code.",
    ("reason",),
    known=_REFUSALS,
)
CONNECTIONS_REFUSED = Metric(
    "http_connections_refused_total",
    "Connections answered with 503: too many, or too few file descriptors are left.",
)
RETRIES = Metric("request_retries_total", "Attempts of finished calls after the first one.")
DEPLOYMENT_RUNNING = Metric(
    "deployment_requests_running", "Requests in the batches of all engines."
)
DEPLOYMENT_WAITING = Metric(
    "deployment_requests_waiting", "Requests that wait at this gateway or any engine."
)
DEPLOYMENT_KV_USAGE = Metric(
    "deployment_kv_cache_usage_perc",
    "Share of KV blocks in use, 0 to 1, of the role with the larger share.",
)
IN_FLIGHT = Metric("num_requests_in_flight", "Admitted calls that have not ended.")
SLO_JUDGED = Metric(
    "slo_judged_requests_total", "Calls that ended and were not cancelled by their client."
)
SLO_GOOD = Metric(
    "slo_good_requests_total",
    "Of slo_judged_requests_total: finished, with TTFT and every gap within the two --slo targets.",
)
TENANT_REQUESTS = Metric("tenant_requests_total", "Calls that ended, by tenant.", ("tenant",))
TENANT_TOKENS = Metric(
    "tenant_tokens_total", "Tokens by tenant; kind is prompt or generation.", ("tenant", "kind")
)
KV_SECONDS = Metric(
    "kv_transfer_seconds",
    "One hand-off, from reserving memory to its last block, by prefill and decode engine.",
    ("transport", "src", "dst"),
    TRANSFER_S,
)
KV_BYTES = Metric(
    "kv_transfer_bytes_total",
    "Bytes transferred by the hand-offs of finished calls.",
    ("transport", "src", "dst"),
)
QUEUED = Metric(
    "num_requests_queued",
    "Requests that wait at the gateway: for room on a decode engine, for their caller's turn, or "
    "until an engine is available.",
)
LORA = Metric(
    "lora_requests_info",
    "Unix time of this sample. Labels: most LoRA adapters in an engine's step; names, separated by "
    "commas, of the adapters that run and of those that wait.",
    ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
)
DECISIONS = Metric(
    "router_decisions_total",
    "Routing decisions. local: one engine for the whole request; cached_prefix: a pair of which "
    "the prefill engine has part of the prompt cached; least_loaded: another pair; retry: after a "
    "failed attempt or an engine's refusal; unavailable: no engine, counted at each try.",
    ("reason",),
)
MOVES = Metric(
    "request_moves_total",
    "Moves of running requests from an engine whose promise was broken or withdrawn. moved; or "
    "the request stayed: refused (it would break the other engine's promise), failed, late, "
    "differs (the other engine chose another token), lost (the other engine), ended (the request "
    "ended meanwhile). planned_again: a prompt that had no room beside decodes and was routed to "
    "an engine without a promise.",
    ("outcome",),
)
LOOKUP = Metric(
    "index_lookup_seconds",
    "Time to hash a prompt and look it up in the local copy of the prefix index.",
    buckets=LOOKUP_S,
)
INDEX_HITS = Metric(
    "index_hits_total", "Completed prefills for which the prefix index listed cached tokens."
)
INDEX_STALE = Metric(
    "index_stale_hits_total",
    "Of index_hits_total: prefills that found fewer cached tokens than listed.",
)
INDEX_UP = Metric("index_up", "1 while the prefix index's Redis is reachable.")

CERTIFICATE_EXPIRES = Metric(
    "certificate_expires_timestamp_seconds",
    "Unix time at which the certificate in the file expires.",
    ("file",),
)

# For the live page only.
BEGAN = Metric("requests_began_total", "Calls that were admitted.")
FINISHED_PROMPT_TOKENS = Metric("finished_prompt_tokens_total", "Prompt tokens of finished calls.")
PULLER_CACHED_TOKENS = Metric("puller_cached_tokens_total", "Prompt tokens that no pull brought.")

OF_ENGINE = ("role", "node")
NODE_UP = Metric(
    "node_up",
    "1 while the engine is connected and sends heartbeats; 0 for ten minutes after it is lost.",
    OF_ENGINE,
)
KV_USAGE = Metric(
    "kv_cache_usage_perc",
    "Share of KV blocks in use, 0 to 1; cached blocks count as free.",
    OF_ENGINE,
)
EXPERT_IMBALANCE = Metric(
    "expert_load_imbalance",
    "Tokens of the busiest expert divided by the mean per expert.",
    OF_ENGINE,
)
EXPERT_RANK_IMBALANCE = Metric(
    "expert_rank_load_imbalance",
    "With --enable-expert-parallel: tokens of the busiest rank divided by the mean per rank.",
    OF_ENGINE,
)
# The other metrics of engines: name, its field in a heartbeat (ReportedLoad, its Counters), help,
# further labels.
_FROM_HEARTBEATS = (
    ("node_draining", "is_draining", "1 while the engine drains: it accepts no new requests."),
    ("num_requests_running", "num_running", "Requests in the engine's batch."),
    ("num_requests_waiting", "num_waiting", "Requests that wait at the engine."),
    ("num_tokens_waiting", "waiting_tokens", "Known tokens whose KV is not computed yet."),
    ("engine_tbt_target_seconds", "tbt_target_s",
     "The TBT promise: longest time of a step with decodes, if chunking prompts can keep it."),
    ("engine_step_cost_error", "step_cost_error",
     "Relative error of predicted step times, 90th percentile."),
    ("kv_free_blocks", "free_blocks", "KV blocks available to a new request."),
    ("kv_leased_blocks", "held_blocks", "KV blocks held for pullers, or being computed for one."),
    ("kv_credit_blocks", "credit_blocks", "KV blocks that may still be held for pullers."),
    ("num_preemptions_total", "num_preemptions", "Requests whose KV blocks were freed for others."),
    ("prefix_cache_queries_total", "prefix_query_tokens",
     "Known tokens of requests that were allocated KV blocks."),
    ("prefix_cache_hits_total", "prefix_hit_tokens",
     "Of prefix_cache_queries_total: tokens found in the prefix cache."),
    ("kv_expired_leases_total", "num_expired_leases",
     "Hand-offs whose puller did not start, or renew its lease, in time."),
    ("kv_host_blocks", "host_blocks", "Cached KV blocks in host memory."),
    ("prefix_cache_host_hits_total", "host_hit_tokens",
     "Of prefix_cache_hits_total: tokens found in host memory."),
    ("num_swaps_total", "num_swaps",
     "Preempted requests whose KV was copied to host memory."),
    ("kv_host_bytes_out_total", "host_bytes_out", "Bytes copied to host memory."),
    ("kv_host_bytes_in_total", "host_bytes_in", "Bytes copied from host memory."),
    ("kv_disk_blocks", "disk_blocks", "Cached KV blocks on disk."),
    ("prefix_cache_disk_hits_total", "disk_hit_tokens",
     "Known tokens whose KV was read from disk; also counted in prefix_cache_host_hits_total."),
    ("kv_disk_bytes_out_total", "disk_bytes_out", "Bytes of KV blocks written to disk."),
    ("kv_disk_bytes_in_total", "disk_bytes_in", "Bytes of KV blocks read from disk."),
    ("kv_disk_failures_total", "disk_failures",
     "KV blocks that could not be written to disk, or read back intact."),
    ("promised_steps_total", "num_promised_steps",
     "Steps with decodes under a TBT promise."),
    ("kept_steps_total", "num_kept_steps", "Of promised_steps_total: steps that kept the promise."),
    ("promise_refusals_total", "num_refusals",
     "Requests refused because they would have broken the promise."),
    ("kv_pulls_total", "num_transfers", "Hand-offs that a decode engine completed."),
    ("kv_pull_bytes_total", "transfer_bytes", "Bytes of completed hand-offs."),
    ("kv_pull_seconds_total", "transfer_s", "Total time of completed hand-offs."),
    ("kv_transfer_failed_total", "failed_transfers",
     "Hand-offs that failed at a decode engine, by error code.", "reason"),
    ("prefix_fetches_total", "num_fetches",
     "Prefixes pulled from other engines' caches."),
    ("prefix_fetched_blocks_total", "fetched_blocks", "KV blocks of pulled prefixes."),
    ("prefix_fetched_bytes_total", "fetched_bytes", "Bytes of pulled prefixes."),
    ("prefix_fetch_seconds_total", "fetch_s", "Total time of prefix pulls."),
    ("prefix_fetch_failed_total", "failed_fetches",
     "Prefix pulls that failed, so that the prefix was computed, by error code.", "reason"),
    ("spec_decode_num_drafts_total", "num_drafts",
     "Steps with draft tokens to verify, counted per sequence."),
    ("spec_decode_num_draft_tokens_total", "num_draft_tokens", "Draft tokens."),
    ("spec_decode_num_accepted_tokens_total", "accepted_drafts",
     "Draft tokens that were accepted."),
    ("spec_decode_num_accepted_tokens_per_pos_total", "accepted_drafts",
     "Accepted draft tokens by their position in a sequence's drafts, from 0.", "position"),
    ("spec_decode_mean_acceptance_length", "acceptance_length",
     "Mean tokens that a step with drafts adds to a sequence, including the one after the drafts."),
    ("expert_tokens_total", "expert_tokens",
     "Tokens routed to each expert of a mixture, summed over its layers.", "expert"),
)  # fmt: skip

CACHE_CONFIG = Metric(
    "cache_config_info",
    "Always 1. Labels: tokens per KV block; KV blocks of the engines that compute prompts.",
    ("block_size", "num_gpu_blocks"),
)

GROUPS: Mapping[str, Sequence[Metric]] = {
    "Calls": (
        *(TTFT, INTER_TOKEN, HANDOFF_GAP, TPOT, E2E, QUEUE, PREFILL, DECODE, INFERENCE, STAGE),
        *(PROMPT_LENGTH, OUTPUT_LENGTH),
        *(PROMPT_TOKENS, CACHED_TOKENS, OUTPUT_TOKENS, COALESCED_TOKENS),
        *(SUCCESSES, FAILURES, REJECTIONS, CONNECTIONS_REFUSED, RETRIES, IN_FLIGHT),
        *(SLO_JUDGED, SLO_GOOD, TENANT_REQUESTS, TENANT_TOKENS, KV_SECONDS, KV_BYTES),
    ),
    "Routing": (QUEUED, LORA, DECISIONS, MOVES, LOOKUP, INDEX_HITS, INDEX_STALE, INDEX_UP),
    "Engines": (
        *(NODE_UP, KV_USAGE, EXPERT_IMBALANCE, EXPERT_RANK_IMBALANCE),
        *(
            Metric(name, help, (*OF_ENGINE, *labels), source=source)
            for name, source, help, *labels in _FROM_HEARTBEATS
        ),
    ),
    "Deployment": (DEPLOYMENT_RUNNING, DEPLOYMENT_WAITING, DEPLOYMENT_KV_USAGE, CACHE_CONFIG),
    "Certificates": (CERTIFICATE_EXPIRES,),
}
ALL = tuple(chain.from_iterable(GROUPS.values()))
