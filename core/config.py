"""All configuration but the engine's (engine_config.py): frozen dataclasses, validated once.

The command-line flags are made from them (flags.py), which checks the ranges that a field's name
implies. Values found out at run time are not configuration.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import StartupFailed
from .flags import MAX_PORT, flag


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """How the processes of one deployment find and trust each other."""

    redis_url: str = flag(
        "redis://127.0.0.1:6379/0",
        "membership and prefix index; redis+spawn:// starts a private server; with a password: "
        "BATON_REDIS_URL",
    )
    cluster: str = flag("default", "name of the deployment: the prefix of its Redis keys")
    cluster_secret: str | None = flag(
        None, "shared secret of gateways and nodes; better given as BATON_CLUSTER_SECRET"
    )
    cluster_secret_also: str | None = flag(
        None, "accepted beside the secret, while it is being changed; BATON_CLUSTER_SECRET_ALSO"
    )
    cluster_ca: str | None = flag(
        None, "CA of the cluster, PEM: with it, mutual TLS between gateways and nodes"
    )
    cluster_cert: str | None = flag(None, "this process's certificate in the cluster, PEM")
    cluster_key: str | None = flag(None, "the key of --cluster-cert, PEM")

    def __post_init__(self) -> None:
        if self.cluster_secret_also and not self.cluster_secret:
            raise StartupFailed("--cluster-secret-also needs --cluster-secret beside it")
        files = (self.cluster_ca, self.cluster_cert, self.cluster_key)
        if any(files) and not all(files):
            raise StartupFailed("--cluster-ca, --cluster-cert and --cluster-key belong together")


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """One node: where it listens, its GPUs, its hand-off limits."""

    host: str = flag("127.0.0.1", "address to listen on")
    insecure_bind: bool = flag(
        False, "listen beyond this host without TLS or keys: the network is the boundary"
    )
    port: int = flag(0, "gRPC port; 0, or one that is taken: a free one")
    advertise: str | None = flag(
        None,
        "host:port that others dial, where a port mapping or a proxy stands in between; more of "
        "them behind commas: also answered to",
    )
    engine_port: int = flag(
        0, "where the node's first engine listens, the others behind it; 0: free ports"
    )
    advertise_engine: str | None = flag(
        None, "as --advertise, for the first engine; the others' ports follow"
    )
    gpus: str | None = flag(
        None, "GPU ids, e.g. 0,1; of baton up: those to choose from", aliases=("device-ids",)
    )
    num_engines: int | None = flag(None, "engines on a CPU node; default 1")
    name: str | None = flag(None, "the node's name for people; default: role and port")
    lease_s: float = flag(10.0, "how long finished KV waits for a puller that says nothing")
    credit_fraction: float = flag(0.5, "share of a prefill pool that may wait to be pulled")
    heartbeat_s: float = flag(0.25, "time between heartbeats")
    log_json: bool = flag(False, "log JSON lines")
    kv_transport: str = flag(
        "auto",
        "how a decode engine fetches KV; auto: the best that reaches the source",
        choices=("auto", "shm", "cuda_ipc", "nccl", "cuda_staged", "tcp"),
    )
    kv_copy: str = flag(
        "auto",
        "what copies over cuda_ipc: a kernel, copy engines, or which does better when measured",
        choices=("auto", "kernel", "copy-engine"),
    )

    def __post_init__(self) -> None:
        if not 0.01 <= self.heartbeat_s <= 5:
            raise StartupFailed("--heartbeat-s must lie in [0.01, 5]")
        if self.lease_s <= 0:
            raise StartupFailed("--lease-s must be more than 0")
        if not 0 < self.credit_fraction <= 1:
            raise StartupFailed("--credit-fraction must lie in (0, 1]")
        if self.engine_port > MAX_PORT:
            raise StartupFailed(f"--engine-port: the last engine's is beyond {MAX_PORT}")
        _check_addresses("--advertise", self.advertise)
        _check_addresses("--advertise-engine", self.advertise_engine)


def _check_addresses(name: str, addresses: str | None) -> None:
    for address in addresses.split(",") if addresses else ():
        port = address.rpartition(":")[2]
        if not re.fullmatch(r"\S+:[0-9]{1,5}", address) or not 0 < int(port) <= MAX_PORT:
            raise StartupFailed(f"{name} {address}: not host:port, with a port of 1 to {MAX_PORT}")


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The front door."""

    host: str = flag("127.0.0.1", "address to listen on")
    insecure_bind: bool = flag(
        False, "listen beyond this host without TLS or keys: the network is the boundary"
    )
    grpc_port: int = flag(50051, "gRPC port; 0 takes a free one")
    http_port: int = flag(8000, "HTTP port; 0 takes a free one")
    num_gateways: int = flag(
        1, "whole gateways that share the ports; each has its own metrics and counts its own limits"
    )
    reuse_port: bool = flag(
        False, "share the ports with other gateways of the same user that have this flag"
    )
    own_http_port: int | None = flag(
        None,
        "a second HTTP port that is never shared, for scrapers and the dashboard; with "
        "--num-gateways the first gateway's, the others have the next ones; default: a free one "
        "where ports are shared, else none",
    )
    model: str = flag("demo", "model directory: the gateway reads its tokenizer only")
    served_model_name: str | None = flag(None, "name clients use; default: the directory's name")
    lora_modules: tuple[str, ...] = flag(
        (), "LoRA adapters to serve, name=path each; engines need --enable-lora"
    )
    skip_tokenizer_init: bool = flag(
        False, "serve token ids alone: no text, for models without a tokenizer"
    )
    special_tokens_in_prompts: str = flag(
        "allow",
        "a special token's text in a prompt that is no chat: the token, or an error",
        choices=("allow", "refuse"),
    )
    tool_call_parser: str = flag(
        "auto",
        "how the model writes tool calls; auto: by its chat template",
        choices=(
            *("auto", "deepseek_v3", "deepseek_v31", "hermes", "kimi_k2", "llama3_json"),
            *("mistral", "pythonic", "qwen3_coder"),
        ),
    )
    reasoning_parser: str = flag(
        "auto",
        "how the model marks its reasoning; auto: by its chat template; none: it is text as other",
        choices=(
            *("auto", "none", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2"),
            *("mistral", "qwen3", "seed_oss"),
        ),
    )
    response_store_mib: int = flag(
        64, "memory for conversations of /v1/responses (previous_response_id); 0: none is kept"
    )
    response_store_s: float = flag(3600.0, "how long each of them is kept at most")
    max_num_requests: int = flag(1024, "most requests in flight; more get RESOURCE_EXHAUSTED")
    max_queue_s: float | None = flag(
        None,
        "refuse what would wait longer than this for its prefill; default: only what would wait "
        "past its deadline",
    )
    max_request_s: float = flag(600.0, "longest deadline, and that of requests without one")
    shutdown_timeout_s: float = flag(
        5.0,
        "how long requests in flight may take to end at SIGTERM or Ctrl-C; a second one ends them",
        aliases=("shutdown-timeout",),
    )
    heartbeat_timeout_s: float = flag(1.2, "a node silent for so long is taken for lost")
    max_attempts: int = flag(3, "dispatches of one request before its error reaches the client")
    recovery_wait_s: float = flag(
        10.0, "how long a request waits for a node where none is left; a restart takes seconds"
    )
    api_keys: str | None = flag(
        None, "file of API keys (`baton keys add`): callers must show one of them"
    )
    tls_cert: str | None = flag(None, "certificate chain for HTTPS and gRPC over TLS, PEM")
    tls_key: str | None = flag(None, "the key of --tls-cert, PEM")
    allowed_hosts: str = flag(
        "", "further names in HTTP's Host that are ours, e.g. llm.example.com,gateway; *: any"
    )
    share_prefix_across_tenants: bool = flag(
        False, "tenants of API keys may hit each other's cached prefixes"
    )
    metrics_prefix: str = flag(
        "baton", "prefix of the metrics' names; vllm: as vLLM's own, for boards made for it"
    )
    routing_policy: str = flag(
        "auto",
        "how engines are chosen; auto: by the least estimated time; others to compare it with",
        choices=("auto", "least_loaded", "round_robin", "random", "session_affinity"),
    )
    move_promises: bool = flag(
        True,
        "let the gateway that has the lease on Redis move promises between the engines that began "
        "with one, as the mix of prompts and outputs changes",
    )
    move_requests: bool = flag(
        True,
        "move running requests from an engine whose decodes alone take longer than its promise to "
        "one that keeps its own with them",
    )
    slo_ttft_s: float = flag(
        0.5, "TTFT of a call that slo_good_requests_total counts, and for which promises move"
    )
    slo_tbt_s: float = flag(0.05, "longest gap between tokens of such a call")
    otlp_traces_endpoint: str | None = flag(
        None, "OTLP collector over HTTP for traces of calls, e.g. http://127.0.0.1:4318"
    )
    otlp_traces_ratio: float = flag(
        1.0, "share of calls to trace, of those that bring no trace of their own"
    )
    log_json: bool = flag(False, "log JSON lines, with one for each call that is over")
    log_prompts: bool = flag(False, "with the calls' lines, their prompts: mind who reads logs")

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*:?", self.metrics_prefix):
            raise StartupFailed("--metrics-prefix must be letters, digits and underscores")
        if self.response_store_mib < 0 or self.response_store_s <= 0:
            raise StartupFailed("--response-store-mib and --response-store-s must not be negative")
        for name in ("max_request_s", "heartbeat_timeout_s"):
            if getattr(self, name) <= 0:
                raise StartupFailed(f"--{name.replace('_', '-')} must be more than 0")
        if self.log_prompts and not self.log_json:
            raise StartupFailed("--log-prompts goes with --log-json")
        if not 0 <= self.otlp_traces_ratio <= 1:
            raise StartupFailed("--otlp-traces-ratio must lie in [0, 1]")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise StartupFailed("--tls-cert and --tls-key belong together")


@dataclass(frozen=True, slots=True)
class UpConfig:
    """A whole deployment on one host."""

    prefill_gpus: str | None = flag(
        None, "GPU ids of the prefill node, e.g. 0,1; default: half of them, or what is left"
    )
    decode_gpus: str | None = flag(
        None, "GPU ids of the decode node, e.g. 2,3; default: half of them, or what is left"
    )
    mode: str = flag(
        "auto",
        "disaggregated: prefill engines hand all KV to decode engines; aggregated: every engine "
        "does both; auto: both roles, and each request where it is done first",
        choices=("disaggregated", "aggregated", "auto"),
    )
    num_prefill_nodes: int = flag(1, "prefill nodes on a CPU")
    num_decode_nodes: int = flag(1, "decode nodes on a CPU")
    redis_url: str = flag(
        "redis+spawn://",
        "Redis to use; redis+spawn:// starts a private one; with a password: BATON_REDIS_URL",
    )
    start_timeout_s: float = flag(300.0, "how long all parts may take to become ready")
    certs: str | None = flag(
        None, "folder of `baton certs`: TLS in front, mutual TLS between the parts"
    )

    def __post_init__(self) -> None:
        if self.mode == "aggregated" and self.num_prefill_nodes > 1:
            raise StartupFailed(
                "--num-prefill-nodes: with --mode aggregated every engine does both",
                hint="--num-decode-nodes",
            )
