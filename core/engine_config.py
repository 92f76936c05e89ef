"""One engine's configuration; the command-line flags are made from it (flags.py).

Values found out at run time (number of KV blocks) are not configuration. Ranges that a field's name
implies are checked where values come in (flags.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import StartupFailed
from .flags import flag
from .speculative_config import SpeculativeConfig, parse_speculative_config

GPU_SWAP_GIB = 4.0  # as vLLM's default
TBT_TARGET_MS = 25.0  # default of engines that take whole requests
_MAX_RANK_TIMEOUT_S = 86_400.0


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
        "compute type; auto: float32 on a CPU, the checkpoint's type on a GPU",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    kv_cache_dtype: str = flag(
        "auto",
        "type of the KV cache; auto: the model's compute type; fp8 (e4m3) and int8 need half of "
        "bfloat16's memory and read time, with a scale per token and head",
        choices=("auto", "fp8", "int8"),
    )
    load_format: str = flag(
        "auto",
        "source of the weights; dummy: random weights, only config.json is read",
        choices=("auto", "safetensors", "dummy"),
    )
    quantization: str | None = flag(
        None,
        "quantise projection weights to fp8 or int4 while loading; not needed for checkpoints that "
        "are already quantised",
        choices=("fp8", "int4"),
    )
    seed: int = flag(0, "seed of dummy weights")
    tensor_parallel_size: int = flag(
        1, "number of GPUs that each layer is split over", aliases=("tp",)
    )
    pipeline_parallel_size: int = flag(
        1,
        "number of pipeline stages; each has some of the layers and --tensor-parallel-size GPUs",
        aliases=("pp",),
    )
    pp_balance: str | None = flag(
        None,
        "balance the stages' times for prompts (only the last token needs the LM head) or for "
        "decodes; default: prefill on a prefill node that does not also decode, else decode",
        choices=("prefill", "decode"),
    )
    nnodes: int = flag(1, "number of hosts of one engine; each has the same number of stages")
    node_rank: int = flag(
        0, "index of this host among --nnodes, from 0; host 0 listens for the others"
    )
    master_addr: str | None = flag(None, "address at which the other hosts reach host 0")
    master_port: int = flag(29501, "port at --master-addr")
    rank_timeout_s: float = flag(
        20.0, "a rank that finishes no pending step for this many seconds counts as hung"
    )
    rank_start_timeout_s: float = flag(
        240.0, "a starting rank that makes no progress for this many seconds counts as hung"
    )
    max_model_len: int | None = flag(
        None,
        "most tokens of prompt and output together; default: the model's limit",
        aliases=("context-length",),
    )
    block_size: int | None = flag(
        None, "tokens per KV block, a power of two; default: 16, or 32 with an 8-bit KV cache"
    )
    num_kv_blocks: int | None = flag(
        None, "size of the KV pool in blocks; default: what fits in memory"
    )
    cpu_kv_bytes: int = flag(256 << 20, "size of the KV pool on a CPU in bytes")
    swap_space: float | None = flag(
        None,
        "GiB of host memory per GPU for KV blocks that are evicted from its pool, also those of "
        "preempted requests; 0: disabled; default: 4 on a GPU, 0 on a CPU",
    )
    kv_disk_path: str | None = flag(
        None,
        "directory for KV blocks that are evicted from the host memory of --swap-space; default: "
        "no disk tier",
    )
    kv_disk_space: float = flag(64.0, "most GiB that one engine uses in --kv-disk-path")
    gpu_memory_utilization: float = flag(
        0.9,
        "share of GPU memory for the engine: weights, KV cache and workspace",
        aliases=("mem-fraction-static",),
    )
    max_num_seqs: int | None = flag(
        None, "most sequences in one step; default: 16 to 512, by the size of the KV pool"
    )
    max_num_batched_tokens: int = flag(
        2048,
        "most tokens in one step; longer prompts are chunked; a prompt's last chunk may exceed it "
        "by 1/16",
    )
    prefill_chunk_tokens: int | None = flag(
        None,
        "most tokens of a single prompt in one step, on a prefill node's GPU; longer prompts leave "
        "half of --max-num-batched-tokens for their last step; default: 8192, unless "
        "--max-num-batched-tokens is set",
    )
    tbt_target_ms: float | None = flag(
        None,
        "promised TBT: prompts are chunked so that steps with decodes take at most this many ms; "
        "an engine with a promise serves whole requests, whatever its role; default: no promise",
    )
    mixed_graph_tokens: int = flag(
        1024,
        "on a GPU: most prompt tokens in a mixed step (prompts and decodes) that runs as a CUDA "
        "graph, 64 to 1024; 0: mixed steps run without CUDA graphs",
    )
    enable_expert_parallel: bool = flag(
        False,
        "divide a mixture's experts over the --tensor-parallel-size ranks, instead of splitting "
        "every expert",
    )
    enable_prefix_caching: bool = flag(True, "reuse the KV of common prefixes")
    enable_lora: bool = flag(False, "serve LoRA adapters in addition to the model")
    max_loras: int = flag(1, "most LoRA adapters in one step")
    max_lora_rank: int = flag(16, "largest rank of a LoRA adapter, 1 to 512")
    max_cpu_loras: int | None = flag(
        None, "most LoRA adapters in host memory; default: 2 x --max-loras"
    )
    attention_backend: str = flag(
        "auto", "kernels of prefill attention", choices=("auto", "torch", "triton", "flashinfer")
    )
    speculative_config: str | None = flag(
        None,
        "speculative decoding, as JSON, e.g. "
        '{"method": "ngram", "num_speculative_tokens": 4}; default: disabled',
    )
    num_threads: int | None = flag(None, "CPU threads per engine; default: 1")

    def __post_init__(self) -> None:
        for name in (
            *("block_size", "tensor_parallel_size", "pipeline_parallel_size", "nnodes"),
            *("prefill_chunk_tokens", "num_threads"),
        ):
            if (number := getattr(self, name)) is not None and number < 1:
                raise StartupFailed(f"--{name.replace('_', '-')} must be at least 1")
        for name in ("rank_timeout_s", "rank_start_timeout_s"):
            if not 0 < getattr(self, name) <= _MAX_RANK_TIMEOUT_S:
                flag_name = f"--{name.replace('_', '-')}"
                raise StartupFailed(f"{flag_name} must be above 0, and no more than a day")
        if self.tbt_target_ms is not None and not 0 < self.tbt_target_ms < math.inf:
            raise StartupFailed("--tbt-target-ms must be above 0")
        if self.mixed_graph_tokens and not 64 <= self.mixed_graph_tokens <= 1024:
            raise StartupFailed("--mixed-graph-tokens must be 0 or lie in [64, 1024]")
        if self.kv_block_size & (self.kv_block_size - 1):
            raise StartupFailed("--block-size must be a power of two", hint="16 suits most models")
        if self.max_loras < 1 or not 1 <= self.max_lora_rank <= 512:
            raise StartupFailed("--max-loras must be at least 1, --max-lora-rank 1 to 512")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise StartupFailed("--max-cpu-loras must be at least --max-loras")
        if self.swap_space is not None and not 0 <= self.swap_space < math.inf:
            raise StartupFailed("--swap-space must be 0 or more")
        self._check_disk()
        if not 0 < self.gpu_memory_utilization <= 1:
            raise StartupFailed("--gpu-memory-utilization must lie in (0, 1]")
        self.speculation  # noqa: B018  # raises what is wrong with it
        self._check_pipeline()

    @property
    def kv_block_size(self) -> int:
        """Tokens per KV block. With KV in 8 bits, a head's part of a block is whole cache lines
        from 32 tokens on: an H200 reads them 3 % faster."""
        return self.block_size or (16 if self.kv_cache_dtype == "auto" else 32)

    def _check_disk(self) -> None:
        if not 0 < self.kv_disk_space < math.inf:
            raise StartupFailed("--kv-disk-space must be above 0")
        if self.kv_disk_path == "":
            raise StartupFailed("--kv-disk-path must name a directory")
        if self.kv_disk_path is not None and self.num_ranks > 1:
            raise StartupFailed(f"--kv-disk-path is not for engines with {self.size_flags}")
        if self.kv_disk_path is not None and self.swap_space == 0:
            raise StartupFailed("--kv-disk-path needs --swap-space above 0")

    def _check_pipeline(self) -> None:
        """Raises StartupFailed if a flag excludes several stages, or the hosts' flags are wrong."""
        if self.speculation is not None and self.pipeline_parallel_size > 1:
            raise StartupFailed(
                "--speculative-config is not for engines with --pipeline-parallel-size above 1",
                hint="--tensor-parallel-size",
            )
        if self.pipeline_parallel_size % self.nnodes:
            raise StartupFailed(
                f"--nnodes {self.nnodes} does not divide --pipeline-parallel-size "
                f"{self.pipeline_parallel_size}: a stage is on one host"
            )
        if not 0 <= self.node_rank < self.nnodes:
            raise StartupFailed(f"--node-rank must lie in [0, {self.nnodes}): there are --nnodes")
        if self.nnodes > 1 and not self.master_addr:
            raise StartupFailed("--nnodes above 1 needs --master-addr")

    @property
    def master(self) -> str:
        """--master-addr and --master-port as they are dialled."""
        host = self.master_addr or ""
        return f"[{host}]:{self.master_port}" if ":" in host else f"{host}:{self.master_port}"

    @property
    def ranks_per_host(self) -> int:
        return self.num_ranks // self.nnodes

    @property
    def num_ranks(self) -> int:
        """Processes of an engine, each with a GPU of its own if there are any."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def size_flags(self) -> str:
        """The flags that determine `num_ranks`, as text for people."""
        text = f"--tensor-parallel-size {self.tensor_parallel_size}"
        num_stages = self.pipeline_parallel_size
        return text if num_stages == 1 else f"{text} x --pipeline-parallel-size {num_stages}"

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """`--speculative-config`; raises StartupFailed."""
        text = self.speculative_config
        return None if text is None else parse_speculative_config(text)

    @property
    def max_drafts(self) -> int:
        """Most draft tokens per sequence and step; 0: no speculation."""
        return 0 if (of := self.speculation) is None else of.num_speculative_tokens

    @property
    def num_host_adapters(self) -> int:
        """LoRA adapters that host memory may hold."""
        return self.max_cpu_loras or 2 * self.max_loras

    @property
    def tbt_target_s(self) -> float | None:
        return None if self.tbt_target_ms is None else self.tbt_target_ms / 1000

    def swap_bytes(self, device_type: str) -> int:
        """Bytes of host memory for KV blocks, on "cuda" or "cpu"; 0 without prefix caching."""
        if not self.enable_prefix_caching:
            return 0
        gib = self.swap_space
        if gib is None:
            gib = GPU_SWAP_GIB if device_type == "cuda" else 0.0
        return int(gib * 2**30)
