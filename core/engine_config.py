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
        "auto: float32 on a CPU, the checkpoint's on a GPU",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    kv_cache_dtype: str = flag(
        "auto",
        "auto: as the model computes; fp8 (e4m3) and int8 take half of bfloat16's memory and time "
        "to read, with a scale for each token and head",
        choices=("auto", "fp8", "int8"),
    )
    load_format: str = flag(
        "auto",
        "dummy: random weights from config.json alone",
        choices=("auto", "safetensors", "dummy"),
    )
    quantization: str | None = flag(
        None,
        "fp8, int4: quantise the weights of projections as they are loaded; a checkpoint that is "
        "quantised needs no flag",
        choices=("fp8", "int4"),
    )
    seed: int = flag(0, "seed of dummy weights")
    tensor_parallel_size: int = flag(
        1, "GPUs that each layer of an engine is spread over", aliases=("tp",)
    )
    pipeline_parallel_size: int = flag(
        1,
        "stages of an engine, each with some of the layers on --tensor-parallel-size GPUs of its "
        "own",
        aliases=("pp",),
    )
    pp_balance: str | None = flag(
        None,
        "what stages are made equally long for: prompts, of which only the last token needs the "
        "LM head, or decodes; default: prompts on a prefill node, unless it decodes too",
        choices=("prefill", "decode"),
    )
    nnodes: int = flag(1, "hosts of an engine, each with as many of its stages")
    node_rank: int = flag(
        0, "which of --nnodes this host is; on the first one the engine listens for the others"
    )
    master_addr: str | None = flag(None, "address of the first of --nnodes, as the others dial it")
    master_port: int = flag(29501, "port of --master-addr")
    rank_timeout_s: float = flag(
        20.0, "a GPU's process that takes no step for so long is taken for hung"
    )
    rank_start_timeout_s: float = flag(
        240.0, "a GPU's process that starts, and comes no further for so long, is taken for hung"
    )
    max_model_len: int | None = flag(
        None, "longest prompt + output in tokens; default: the model's", aliases=("context-length",)
    )
    block_size: int | None = flag(
        None, "tokens per KV block; default: 16, or 32 with KV in 8 bits, which begin a cache line"
    )
    num_kv_blocks: int | None = flag(None, "size of the KV pool in blocks; default: by memory")
    cpu_kv_bytes: int = flag(256 << 20, "KV pool on a CPU in bytes")
    swap_space: float | None = flag(
        None,
        "GiB of host memory for each GPU: KV blocks that leave its pool go there and come back, "
        "those of preempted requests too; 0: none; default: 4 on a GPU, 0 on a CPU",
    )
    kv_disk_path: str | None = flag(
        None,
        "directory of a disk that KV blocks go to when they leave the host memory of --swap-space; "
        "default: none",
    )
    kv_disk_space: float = flag(64.0, "GiB that an engine takes of --kv-disk-path")
    gpu_memory_utilization: float = flag(
        0.9,
        "share of GPU memory for this engine: weights, KV, work",
        aliases=("mem-fraction-static",),
    )
    max_num_seqs: int | None = flag(
        None, "most requests in one step; default: by the KV pool's size, 16 to 512"
    )
    max_num_batched_tokens: int = flag(
        2048,
        "most tokens in one step; longer prompts are chunked, but an end may take a sixteenth more",
    )
    prefill_chunk_tokens: int | None = flag(
        None,
        "most tokens of a prompt in one step on a prefill node's GPU; of a longer one half of "
        "--max-num-batched-tokens stay for the last; default: 8192, unless that flag is set",
    )
    tbt_target_ms: float | None = flag(
        None,
        "promise to running requests: a step takes no longer, if prompts can be cut for it; an "
        "engine with a promise takes whole requests, whatever its role; default: none",
    )
    mixed_graph_tokens: int = flag(
        1024,
        "on a GPU: most prompt tokens beside decodes in a step that is replayed from a CUDA graph, "
        "64 to 1024; 0: such steps are launched kernel by kernel",
    )
    enable_expert_parallel: bool = flag(
        False,
        "of a mixture of experts each of the --tensor-parallel-size ranks has some experts whole; "
        "else a part of every one",
    )
    enable_prefix_caching: bool = flag(True, "reuse KV of equal prefixes")
    enable_lora: bool = flag(False, "serve LoRA adapters beside the model")
    max_loras: int = flag(1, "LoRA adapters that requests are computed with at once")
    max_lora_rank: int = flag(16, "largest rank of a LoRA adapter, 1 to 512")
    max_cpu_loras: int | None = flag(
        None, "LoRA adapters kept in host memory; default: 2 x --max-loras"
    )
    attention_backend: str = flag(
        "auto", "prefill attention kernels", choices=("auto", "torch", "triton", "flashinfer")
    )
    speculative_config: str | None = flag(
        None,
        "JSON: how decodes are speculated, e.g. "
        '{"method": "ngram", "num_speculative_tokens": 4}; default: not at all',
    )
    num_threads: int | None = flag(None, "CPU threads of an engine; default: 1")

    def __post_init__(self) -> None:
        for name in (
            *("block_size", "tensor_parallel_size", "pipeline_parallel_size", "nnodes"),
            "prefill_chunk_tokens",
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
