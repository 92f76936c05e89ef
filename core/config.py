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
        "Redis for membership and the prefix index; redis+spawn:// starts a private server; for a "
        "URL with a password use BATON_REDIS_URL",
    )
    cluster: str = flag("default", "name of the deployment; prefix of its Redis keys")
    cluster_secret: str | None = flag(
        None, "shared secret of gateways and nodes; prefer BATON_CLUSTER_SECRET"
    )
    cluster_secret_also: str | None = flag(
        None,
        "second secret that is accepted too, for rotation; prefer BATON_CLUSTER_SECRET_ALSO",
    )
    cluster_ca: str | None = flag(
        None, "CA of the cluster, PEM; enables mutual TLS between gateways and nodes"
    )
    cluster_cert: str | None = flag(None, "this process's certificate in the cluster, PEM")
    cluster_key: str | None = flag(None, "private key of --cluster-cert, PEM")

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
    port: int = flag(0, "gRPC port; if it is 0 or taken, a free port is chosen")
    advertise: str | None = flag(
        None,
        "host:port at which others reach this node, behind a port mapping or proxy; further "
        "addresses, separated by commas, are accepted in handshakes",
    )
    engine_port: int = flag(
        0, "port of the node's first engine; the others use the next ports; 0: free ports"
    )
    advertise_engine: str | None = flag(
        None, "like --advertise, for the first engine; the others have the next ports"
    )
    gpus: str | None = flag(
        None,
        "GPU ids, e.g. 0,1; for baton up: the GPUs to choose from",
        aliases=("device-ids",),
    )
    num_engines: int | None = flag(None, "number of engines on a CPU node; default: 1")
    name: str | None = flag(None, "name of the node in logs and metrics; default: role and port")
    lease_s: float = flag(
        10.0, "seconds that computed KV is held for a puller that does not renew its lease"
    )
    credit_fraction: float = flag(
        0.5, "largest share of a prefill engine's KV pool that may be held for pullers"
    )
    heartbeat_s: float = flag(0.25, "seconds between heartbeats")
    log_json: bool = flag(False, "write logs as JSON lines")
    kv_transport: str = flag(
        "auto",
        "transport by which decode engines pull KV; auto: the best one that reaches the source",
        choices=("auto", "shm", "cuda_ipc", "nccl", "cuda_staged", "tcp"),
    )
    kv_copy: str = flag(
        "auto",
        "what copies KV over cuda_ipc: a kernel or the copy engines; auto: the faster, measured",
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
    """One gateway."""

    host: str = flag("127.0.0.1", "address to listen on")
    insecure_bind: bool = flag(
        False, "listen beyond this host without TLS or keys: the network is the boundary"
    )
    grpc_port: int = flag(50051, "gRPC port; 0 takes a free one")
    http_port: int = flag(8000, "HTTP port; 0 takes a free one")
    num_gateways: int = flag(
        1, "number of gateway processes that share the ports; metrics and limits are per process"
    )
    reuse_port: bool = flag(
        False, "share the ports with other gateways of the same user that also have this flag"
    )
    own_http_port: int | None = flag(
        None,
        "a second, unshared HTTP port for metrics scrapers and the dashboard; with --num-gateways, "
        "of the first gateway: the others use the next ports; default: a free port if the ports "
        "are shared, else none",
    )
    model: str = flag("demo", "model directory; the gateway reads only its tokenizer")
    served_model_name: str | None = flag(None, "name clients use; default: the directory's name")
    lora_modules: tuple[str, ...] = flag(
        (), "LoRA adapters to serve, each as name=path; engines need --enable-lora"
    )
    skip_tokenizer_init: bool = flag(
        False, "accept and return token ids only, for models without a tokenizer"
    )
    special_tokens_in_prompts: str = flag(
        "allow",
        "text of special tokens in a prompt (not a chat): allow encodes it as the token, refuse "
        "returns an error",
        choices=("allow", "refuse"),
    )
    tool_call_parser: str = flag(
        "auto",
        "format of the model's tool calls; auto: from its chat template",
        choices=(
            *("auto", "deepseek_v3", "deepseek_v31", "hermes", "kimi_k2", "llama3_json"),
            *("mistral", "pythonic", "qwen3_coder"),
        ),
    )
    reasoning_parser: str = flag(
        "auto",
        "format of the model's reasoning; auto: from its chat template; none: reasoning is normal "
        "text",
        choices=(
            *("auto", "none", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2"),
            *("mistral", "qwen3", "seed_oss"),
        ),
    )
    response_store_mib: int = flag(
        64,
        "MiB of memory for stored conversations of /v1/responses (previous_response_id); 0: "
        "none are stored",
    )
    response_store_s: float = flag(3600.0, "seconds that a stored conversation is kept at most")
    max_num_requests: int = flag(
        1024, "most requests in flight; further ones get RESOURCE_EXHAUSTED"
    )
    max_queue_s: float | None = flag(
        None,
        "reject requests whose wait for prefill, estimated or actual, exceeds this many seconds; "
        "default: only those that would wait past their deadline",
    )
    max_request_s: float = flag(600.0, "longest deadline of a request in seconds, and the default")
    shutdown_timeout_s: float = flag(
        5.0,
        "seconds that requests in flight have to finish after SIGTERM or Ctrl-C; a second signal "
        "ends them",
        aliases=("shutdown-timeout",),
    )
    heartbeat_timeout_s: float = flag(
        1.2, "a node without a heartbeat for this many seconds counts as lost"
    )
    max_attempts: int = flag(
        3, "most attempts of a request before its error is returned to the client"
    )
    recovery_wait_s: float = flag(
        10.0, "seconds that a request waits for a node when none is left; a restart takes seconds"
    )
    api_keys: str | None = flag(
        None, "file of API keys (see `baton keys add`); callers must send one of them"
    )
    tls_cert: str | None = flag(None, "certificate chain for HTTPS and gRPC over TLS, PEM")
    tls_key: str | None = flag(None, "private key of --tls-cert, PEM")
    allowed_hosts: str = flag(
        "", "further accepted names in the HTTP Host header, e.g. llm.example.com,gateway; *: any"
    )
    share_prefix_across_tenants: bool = flag(
        False, "let the tenants of API keys share cached prefixes"
    )
    metrics_prefix: str = flag(
        "baton", "prefix of metric names; vllm: the names of vLLM, for dashboards made for it"
    )
    routing_policy: str = flag(
        "auto",
        "how engines are chosen; auto: least estimated time; the others are for comparison",
        choices=("auto", "least_loaded", "round_robin", "random", "session_affinity"),
    )
    move_promises: bool = flag(
        True,
        "let the gateway that holds the Redis lease move TBT promises between the engines that "
        "were started with one, as the mix of prompts and outputs changes",
    )
    move_requests: bool = flag(
        True,
        "move running requests from an engine whose decodes alone exceed its TBT promise to an "
        "engine that can take them and keep its own",
    )
    slo_ttft_s: float = flag(
        0.5,
        "TTFT target in seconds, for slo_good_requests_total and for moving promises",
    )
    slo_tbt_s: float = flag(
        0.05, "target for the longest gap between tokens in seconds, for slo_good_requests_total"
    )
    otlp_traces_endpoint: str | None = flag(
        None, "OTLP/HTTP collector for traces of calls, e.g. http://127.0.0.1:4318"
    )
    otlp_traces_ratio: float = flag(1.0, "share of the calls without a traceparent that are traced")
    log_json: bool = flag(False, "write logs as JSON lines, with one line per ended call")
    log_prompts: bool = flag(
        False, "include prompts in the log lines of calls; they may be confidential"
    )

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*:?", self.metrics_prefix):
            raise StartupFailed("--metrics-prefix must be letters, digits and underscores")
        if self.response_store_mib < 0:
            raise StartupFailed("--response-store-mib must not be negative")
        for name in ("max_request_s", "heartbeat_timeout_s", "response_store_s"):
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
        None, "GPU ids of the prefill node, e.g. 0,1; default: half of the GPUs, or the rest"
    )
    decode_gpus: str | None = flag(
        None, "GPU ids of the decode node, e.g. 2,3; default: half of the GPUs, or the rest"
    )
    mode: str = flag(
        "auto",
        "disaggregated: prefill engines hand all requests off to decode engines; aggregated: every "
        "engine does both; auto: both roles, and each request runs where it is estimated to finish "
        "first",
        choices=("disaggregated", "aggregated", "auto"),
    )
    num_prefill_nodes: int = flag(1, "number of prefill nodes on a CPU")
    num_decode_nodes: int = flag(1, "number of decode nodes on a CPU")
    redis_url: str = flag(
        "redis+spawn://",
        "Redis to use; redis+spawn:// starts a private server; for a URL with a password use "
        "BATON_REDIS_URL",
    )
    start_timeout_s: float = flag(300.0, "seconds that all processes have to become ready")
    certs: str | None = flag(
        None,
        "folder made by `baton certs`: TLS for clients, mutual TLS between the processes",
    )

    def __post_init__(self) -> None:
        if self.mode == "aggregated" and self.num_prefill_nodes > 1:
            raise StartupFailed(
                "--num-prefill-nodes: with --mode aggregated every engine does both",
                hint="--num-decode-nodes",
            )
