"""An engine's model on its device: weights, KV pool, and the steps over them.

    config ─► placement ─► weights ─► KV pool and steps (step_builder.py)

Knows no request and no schedule: a slice's token must not depend on what the scheduler put in its
step. cpu_steps.py or gpu/ execute the steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from ...core.engine_config import EngineConfig
from ...core.model_dir import eos_token_ids, resolve_model_dir
from ...kernels.experts.expert_loads import ExpertLoadReader
from ...kernels.kv.kv_blocks import copy_blocks
from ..kv.block_pool import CANARY_BLOCK
from ..kv.cuda_step_count import CudaStepCount, count_steps
from ..kv.generations import SharedGenerations
from ..kv.host_copies import make_host_copier
from ..kv.kv_memory import KvLayout, canary_bytes, choose_num_cpu_blocks
from ..lora.rank_adapters import RankAdapters
from ..model.communicator import Communicator
from ..model.fingerprint import fingerprint_fields
from ..model.model_config import read_model_config
from ..model.sharding import check_divisible, heads_of_rank
from ..model.stages import layer_ranges
from ..model.weights.filling import OnProgress
from .batch import SequenceSlice, StepBatch
from .cpu_steps import CpuSteps
from .device import choose_attention, choose_kv_dtype, choose_placement
from .drafting.head_model import make_draft_model
from .gpu.gpu_step import GpuStep
from .model_loading import choose_max_model_len, load_model
from .runner_protocols import Drafter, LaunchedStep
from .step_builder import StepBuilder
from .step_sizes import most_step_tokens


class ModelRunner:
    """The Runner of one rank, and the Drafter of its draft model or head. `startup_notes` are lines
    for people.

    All ranks of an engine are made, and launch the same steps, at the same time.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_progress: OnProgress | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        """Load the model and take the KV memory; raises StartupFailed.

        `config.device` is this rank's own; without a communicator it is the only rank.
        """
        communicator = communicator or Communicator()
        assert communicator.size == config.tensor_parallel_size
        torch.set_num_threads(config.num_threads or 1)
        self.model_dir = resolve_model_dir(config.model)
        self.model_config = read_model_config(self.model_dir, config.quantization)
        self.eos_token_ids = eos_token_ids(self.model_dir, self.model_config.vocab_size)
        self.max_model_len = choose_max_model_len(config, self.model_config)
        self._config = config
        self._count: CudaStepCount | None = None
        self._communicator = communicator
        self._placement = choose_placement(config, self.model_config, communicator)
        check_divisible(
            self.model_config,
            communicator.size,
            has_expert_parallel=config.enable_expert_parallel,
            stays_quantised=self._placement.stays_quantised,
        )
        self.heads = heads_of_rank(self.model_config, communicator.rank, communicator.size)
        self.stages = layer_ranges(
            self.model_config,
            config.pipeline_parallel_size,
            decodes=config.pp_balance != "prefill",
        )
        self.layers = self.stages[communicator.stages.stage]
        prefill_attention = choose_attention(
            config, self.model_config, self._placement, self.max_model_len
        )
        self.startup_notes = [
            f"{self._placement.device}, {prefill_attention} attention for prefill"
        ]
        if config.device == "auto" and self._placement.device.type == "cpu":
            self.startup_notes.append("no GPU found: running on the CPU, as with --device cpu")
        layout = KvLayout(
            num_layers=len(self.layers),
            num_kv_heads=self.heads.num_kv_heads,
            block_size=config.kv_block_size,
            head_dim=self.model_config.head_dim,
            dtype=choose_kv_dtype(config, self.model_config, self._placement),
        )
        draft_model = make_draft_model(config, self.model_dir, self.model_config, self._placement)
        if draft_model is not None:
            layout = draft_model.beside(layout)
        if self._placement.device.type == "cpu":
            # Before the weights: an error over too little memory should not wait for them.
            more = max(map(len, self.stages)) - len(self.layers)
            largest = dataclasses.replace(layout, num_layers=layout.num_layers + more)
            num_blocks = choose_num_cpu_blocks(config, largest, self.max_model_len)
        model, weights = load_model(
            config,
            self.model_dir,
            self.model_config,
            self.layers,
            self._placement,
            on_progress,
            self.startup_notes,
        )
        self.model = model  # weights are read by adapters and checks
        drafting, of_drafts = None, dict[str, str]()
        if draft_model is not None:
            drafting, of_drafts = draft_model.load_beside(model, self.startup_notes)
        self.adapters: RankAdapters | None = None
        if config.enable_lora:  # before the KV pool is measured: it gets what their slots leave
            sizes = (config.max_loras, config.max_lora_rank, most_step_tokens(config))
            self.adapters = RankAdapters(model, self._placement.dtype, *sizes)
        self._expert_loads = None if model.loads is None else ExpertLoadReader(model.loads)
        communicator.connect()
        self.fingerprint = fingerprint_fields(
            self.model_config, weights, layout, self._placement.dtype, config.kv_cache_dtype
        )
        self.fingerprint |= of_drafts
        builder = StepBuilder(
            config,
            self.model_config,
            self._placement,
            self.heads,
            self.max_model_len,
            prefill_attention,
            model,
            draft_model,
            drafting,
            self.adapters,
            self.startup_notes,
        )
        if self._placement.device.type == "cpu":
            built = builder.on_cpu(layout, num_blocks)
        else:
            built = builder.on_gpu(layout)
        self.kv, self._steps, self._draft_steps = built
        self._drafter: Drafter | None = self._draft_steps or self._steps.head
        self.runs_ahead = self._steps.runs_ahead
        self.launch: Callable[[Sequence[SequenceSlice]], LaunchedStep] = self._steps.launch
        if self._draft_steps is not None:
            self.launch = self._launch_behind_drafts
        self.max_num_seqs = builder.max_num_seqs
        self.host_copier = make_host_copier(config, self.kv, self._placement.device)
        communicator.stages.begin()

    def _launch_behind_drafts(self, batch: Sequence[SequenceSlice]) -> LaunchedStep:
        """A step, and before it the draft model's KV of its prompts."""
        assert self._draft_steps is not None
        batch = StepBatch.of(batch)
        first = self._draft_steps.compute_prompts(batch.others)
        step = self._steps.launch(batch)
        return step.behind(first) if isinstance(step, GpuStep) else step

    def draft(self, batch: Sequence[SequenceSlice]) -> list[list[int]]:
        """See Drafter. Steps are not handed out: `close` ends the last references to the KV."""
        assert self._drafter is not None
        return self._drafter.draft(batch)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See Runner; no target may repeat.

        Waits for the device: no fence keeps the sources from being handed out while they are read.
        """
        device = self._placement.device
        sources, targets = zip(*pairs, strict=True) if pairs else ((), ())
        copy_blocks(
            self.kv.tensor,
            torch.tensor(sources, dtype=torch.int64, device=device),
            torch.tensor(targets, dtype=torch.int64, device=device),
        )
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    @property
    def engine_block_bytes(self) -> int:
        """Bytes of a KV block on all ranks together."""
        of_layer = self.kv.block_bytes // len(self.layers)
        return of_layer * self.model_config.num_layers * self._communicator.size

    @property
    def prefill_chunk_tokens(self) -> int:
        """See `EngineLimits`. 0 on a CPU, which gains nothing by larger steps, and in a pipeline,
        which smaller ones fill."""
        is_gpu = self._placement.device.type == "cuda"
        is_pipeline = self._config.pipeline_parallel_size > 1
        return (self._config.prefill_chunk_tokens or 0) if is_gpu and not is_pipeline else 0

    @property
    def graph_rows(self) -> tuple[int, ...]:
        """See `EngineLimits`. Empty on a CPU, which pads nothing."""
        return () if isinstance(self._steps, CpuSteps) else self._steps.mixed_rows

    @property
    def graph_prompt_tokens(self) -> int:
        """See `EngineLimits`."""
        return 0 if isinstance(self._steps, CpuSteps) else self._steps.mixed_tokens

    def expert_tokens(self) -> tuple[int, ...]:
        """How many tokens chose each expert, over all layers; empty without experts. Does not wait
        for the device, so the last steps may be missing."""
        return () if self._expert_loads is None else self._expert_loads.read()

    def forget_expert_tokens(self) -> None:
        """Reset the counts after the test steps, which belong to no request."""
        if self._expert_loads is not None:
            self._expert_loads.forget()

    def count_steps(self, page: SharedGenerations) -> None:
        """Publish the number of completed steps in `page`, if this device can write it."""
        if isinstance(self._steps, CpuSteps) or self._config.pipeline_parallel_size > 1:
            return  # steps are reported once they have completed, on all stages
        self._count = count_steps(page, self._placement.device)
        if self._count is not None:
            self._steps.count_in(self._count)

    def write_canary(self, incarnation: str) -> None:
        """Fill the canary block, by which a puller checks that it reads this pool correctly."""
        pattern = bytearray(canary_bytes(incarnation, self.kv.block_bytes))
        block = self.kv.tensor[CANARY_BLOCK].view(torch.uint8)
        block.copy_(torch.frombuffer(pattern, dtype=torch.uint8).view(block.shape))

    def close(self) -> None:
        """Release the KV memory; no step may be in flight."""
        if self.host_copier is not None:
            self.host_copier.close()
        if self._count is not None:
            self._count.close()
        del self.launch, self._steps, self._draft_steps, self._drafter
        self.kv.close()
        self._communicator.close()
