"""All configuration: frozen dataclasses, validated once; the command-line flags are made from them.

`flag()` gives a field its help text, its aliases and its unit; core/flags.py turns a dataclass into
an argparse parser. What is found out at run time (number of KV blocks) is not configuration.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .errors import StartupFailed


def flag(
    default: Any,
    help: str,
    *,
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A dataclass field that is also a command-line flag."""
    metadata = {"help": help, "aliases": aliases, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine: model, memory, batch."""

    model: str = flag(
        "demo", "model directory, or 'demo' for the bundled one", aliases=("model-path",)
    )
    served_model_name: str | None = flag(None, "name clients use; default: the directory's name")
    device: str = flag("auto", "auto, cpu or cuda", choices=("auto", "cpu", "cuda"))
    dtype: str = flag(
        "auto",
        "auto: float32 on a CPU, the checkpoint's on a GPU",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    load_format: str = flag(
        "auto",
        "dummy: random weights from config.json alone",
        choices=("auto", "safetensors", "dummy"),
    )
    seed: int = flag(0, "seed of dummy weights")
    tensor_parallel_size: int = flag(1, "GPUs per engine", aliases=("tp",))
    max_model_len: int | None = flag(
        None, "longest prompt + output in tokens; default: the model's", aliases=("context-length",)
    )
    block_size: int = flag(16, "tokens per KV block")
    num_kv_blocks: int | None = flag(None, "size of the KV pool in blocks; default: by memory")
    cpu_kv_bytes: int = flag(256 << 20, "KV pool on a CPU in bytes")
    gpu_memory_utilization: float = flag(
        0.9, "share of GPU memory for weights, KV and work", aliases=("mem-fraction-static",)
    )
    max_num_seqs: int = flag(256, "most requests in one step")
    max_num_batched_tokens: int = flag(2048, "most tokens in one step; longer prompts are chunked")
    enable_prefix_caching: bool = flag(True, "reuse KV of equal prefixes")
    attention_backend: str = flag(
        "auto", "attention kernels", choices=("auto", "torch", "triton", "flashinfer")
    )
    num_threads: int | None = flag(None, "CPU threads of an engine; default: 1")

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "tensor_parallel_size",
        ):
            if getattr(self, name) < 1:
                raise StartupFailed(f"--{name.replace('_', '-')} must be at least 1")
        if self.block_size & (self.block_size - 1):
            raise StartupFailed("--block-size must be a power of two", hint="16 suits most models")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise StartupFailed("--gpu-memory-utilization must lie in (0, 1]")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """How the processes of one deployment find and trust each other."""

    redis_url: str = flag(
        "redis://127.0.0.1:6379/0",
        "membership and prefix index; redis+spawn:// starts a private server",
    )
    cluster: str = flag("default", "name of the deployment: the prefix of its Redis keys")
    cluster_secret: str | None = flag(
        None, "shared secret of gateways and nodes; better given as BATON_CLUSTER_SECRET"
    )


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """One node: where it listens, its GPUs, its hand-off limits."""

    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(0, "gRPC port; 0 takes a free one")
    gpus: str | None = flag(None, "GPU ids, e.g. 0,1", aliases=("device-ids",))
    num_engines: int | None = flag(None, "engines on a CPU node; default 1")
    name: str | None = flag(None, "the node's name for people; default: role and port")
    lease_s: float = flag(10.0, "how long finished KV waits for a puller that says nothing")
    credit_fraction: float = flag(0.5, "share of a prefill pool that may wait to be pulled")
    heartbeat_s: float = flag(0.25, "time between heartbeats")


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The front door."""

    host: str = flag("127.0.0.1", "address to listen on")
    grpc_port: int = flag(50051, "gRPC port; 0 takes a free one")
    model: str = flag("demo", "model directory: the gateway reads its tokenizer only")
    served_model_name: str | None = flag(None, "name clients use; default: the directory's name")
    max_num_requests: int = flag(1024, "most requests in flight; more get RESOURCE_EXHAUSTED")
    max_request_s: float = flag(600.0, "deadline of requests that come without one")
    heartbeat_timeout_s: float = flag(1.2, "a node silent for so long is taken for lost")
    max_attempts: int = flag(3, "dispatches of one request before its error reaches the client")
    recovery_wait_s: float = flag(
        10.0, "how long a request waits for a node where none is left; a restart takes seconds"
    )


@dataclass(frozen=True, slots=True)
class UpConfig:
    """A whole deployment on one host."""

    prefill_gpus: str | None = flag(None, "GPU ids of the prefill node, e.g. 0,1")
    decode_gpus: str | None = flag(None, "GPU ids of the decode node, e.g. 2,3")
    num_prefill_nodes: int = flag(1, "prefill nodes on a CPU")
    num_decode_nodes: int = flag(1, "decode nodes on a CPU")
    redis_url: str = flag("redis+spawn://", "Redis to use; redis+spawn:// starts a private one")
    start_timeout_s: float = flag(300.0, "how long all parts may take to become ready")

    def __post_init__(self) -> None:
        if self.num_prefill_nodes < 1 or self.num_decode_nodes < 1:
            raise StartupFailed("a deployment needs at least one prefill and one decode node")
