"""An engine's model on its device: weights, KV pool, and the steps over them.

    config ─► placement ─► weights ─► largest step measured ─► KV pool ─► (GPU: graphs captured)

Knows no request and no schedule: what is computed together is the scheduler's choice, and a
slice's token must not depend on it. What executes steps is cpu_steps.py and gpu_steps.py.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from ...core.engine_config import EngineConfig
from ...core.errors import EngineFailed
from ...core.model_dir import eos_token_ids, resolve_model_dir
from ...kernels.attention.attention import AttentionBackend
from ...kernels.experts.expert_loads import ExpertLoadReader
from ...kernels.kv.kv_blocks import copy_blocks
from ...kernels.upload import reserve_pinned_memory
from ..kv.block_pool import CANARY_BLOCK, canary_bytes
from ..kv.cuda_step_count import CudaStepCount, count_steps
from ..kv.generations import SharedGenerations
from ..kv.host_copies import make_host_copier
from ..kv.kv_memory import (
    CpuKvMemory,
    CudaKvMemory,
    KvLayout,
    choose_num_cpu_blocks,
    choose_num_gpu_blocks,
)
from ..kv.limits import MAX_NUM_SEQS, decode_graph_rows, seqs_for_pool, spare_tokens
from ..lora.rank_adapters import RankAdapters
from ..model.communicator import Communicator
from ..model.decoder import Decoder
from ..model.draft_head import Head
from ..model.fingerprint import fingerprint_fields
from ..model.model_config import read_model_config
from ..model.sharding import check_divisible, heads_of_rank
from ..model.stages import layer_ranges
from ..model.weights.filling import OnProgress
from .batch import LaunchedStep, SequenceSlice, StepBatch
from .cpu_steps import CpuSteps
from .device import choose_attention, choose_kv_dtype, choose_placement, make_attention
from .drafting.draft_model import DraftModel
from .drafting.draft_steps import MOST_ROWS, DraftSteps
from .drafting.head_model import make_draft_model
from .drafting.head_steps import HeadSteps
from .largest_step import largest_batch
from .model_loading import choose_max_model_len, load_model
from .step_model import load_kernels

if TYPE_CHECKING:
    from .gpu_steps import GpuSteps  # needs Triton


class ModelRunner:
    """A `batch.Runner` of one rank. `startup_notes` are lines for people.

    All ranks of an engine are made, and launch the same steps, at the same time.
    """

    kv: CpuKvMemory | CudaKvMemory

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
        self.eos_token_ids = eos_token_ids(self.model_dir)
        self.max_model_len = choose_max_model_len(config, self.model_config)
        self._config = config
        self._count: CudaStepCount | None = None
        self._communicator = communicator
        has_expert_parallel = config.enable_expert_parallel
        placement = choose_placement(config, self.model_config)
        check_divisible(
            self.model_config,
            communicator.size,
            has_expert_parallel=has_expert_parallel,
            stays_quantised=placement.stays_quantised,
        )
        self.heads = heads_of_rank(self.model_config, communicator.rank, communicator.size)
        self.stages = layer_ranges(
            self.model_config,
            config.pipeline_parallel_size,
            decodes=config.pp_balance != "prefill",
        )
        self.layers = self.stages[communicator.stages.stage]
        self._placement = dataclasses.replace(
            placement, communicator=communicator, has_expert_parallel=has_expert_parallel
        )
        self._prefill_attention = choose_attention(
            config, self.model_config, self._placement, self.max_model_len
        )
        self.startup_notes = [
            f"{self._placement.device}, {self._prefill_attention} attention for prefill"
        ]
        if config.device == "auto" and self._placement.device.type == "cpu":
            self.startup_notes.append("no GPU found: running on the CPU, as with --device cpu")
        layout = KvLayout(
            num_layers=len(self.layers),
            num_kv_heads=self.heads.num_kv_heads,
            block_size=config.block_size,
            head_dim=self.model_config.head_dim,
            dtype=choose_kv_dtype(config, self.model_config, self._placement),
        )
        self._draft_model = make_draft_model(
            config, self.model_dir, self.model_config, self._placement
        )
        if self._draft_model is not None:
            layout = self._draft_model.beside(layout)
        if self._placement.device.type == "cpu":
            # Before the weights: an error over too little memory should not wait for them.
            more = max(map(len, self.stages)) - len(self.layers)
            largest = dataclasses.replace(layout, num_layers=layout.num_layers + more)
            num_blocks = choose_num_cpu_blocks(config, largest, self.max_model_len)
            self.max_num_seqs = self._choose_max_num_seqs(num_blocks)
        model, weights = load_model(
            config,
            self.model_dir,
            self.model_config,
            self.layers,
            self._placement,
            on_progress,
            self.startup_notes,
        )
        self.model = model  # for whoever wants its weights
        drafting, of_drafts = None, dict[str, str]()
        if self._draft_model is not None:
            notes = self.startup_notes
            drafting, of_drafts = self._draft_model.load_beside(model, notes)
        self.adapters = self._make_adapters(model)
        self._expert_loads = None if model.loads is None else ExpertLoadReader(model.loads)
        communicator.connect()
        self.fingerprint = fingerprint_fields(
            self.model_config, weights, layout, self._placement.dtype, config.kv_cache_dtype
        )
        self.fingerprint |= of_drafts
        self._draft_steps: DraftSteps | None = None
        if self._placement.device.type == "cpu":
            self.kv = CpuKvMemory(layout, num_blocks)
            self._start_cpu(model, drafting)
        else:
            self._start_gpu(model, drafting, layout)
        self._head_steps = self._steps.head
        self.host_copier = make_host_copier(config, self.kv, self._placement.device)
        communicator.stages.begin()

    def _make_adapters(self, model: Decoder) -> RankAdapters | None:
        """Before the KV pool is measured: it gets what their slots leave."""
        config = self._config
        if not config.enable_lora:
            return None
        dtype, max_rank = self._placement.dtype, config.max_lora_rank
        return RankAdapters(model, dtype, config.max_loras, max_rank, self._most_step_tokens)

    @property
    def _most_step_tokens(self) -> int:
        """Without padding of prompts; with that of decodes in graphs."""
        config = self._config
        most = config.max_num_batched_tokens
        most = max(most + spare_tokens(most), config.prefill_chunk_tokens or 0)
        return max(most, decode_graph_rows(config.max_num_seqs or MAX_NUM_SEQS, config.max_drafts))

    def _start_cpu(self, model: Decoder, drafting: Decoder | Head | None) -> None:
        config = self._config
        attention = self._make_attention(self.kv.tensor)
        self._steps: CpuSteps | GpuSteps
        self._steps = CpuSteps(model, attention, config.block_size, self.adapters)
        if drafting is None:
            return
        attention = self._make_attention(self.kv.tensor, self._draft_model)
        if isinstance(drafting, Decoder):
            steps = CpuSteps(drafting, attention, config.block_size)
            self._draft_steps = DraftSteps(steps, config.max_num_batched_tokens)
        else:
            size = config.block_size
            new = partial(CpuSteps, attention=attention, block_size=size)
            most = self._most_step_tokens
            self._steps.head = HeadSteps(model, drafting, size, most, new, new)

    def _start_gpu(self, model: Decoder, drafting: Decoder | Head | None, layout: KvLayout) -> None:
        """Measure the largest step, take the rest as KV pool, capture the decode graphs."""
        from .gpu_steps import GpuSteps

        config, device = self._config, self._placement.device
        # The pool's size is what a step leaves, and so is measured by as many as it may let run.
        self.max_num_seqs = self._choose_max_num_seqs(config.num_kv_blocks)

        most_tokens = config.max_num_batched_tokens
        most_tokens += spare_tokens(most_tokens)

        def new_steps(pool: torch.Tensor) -> GpuSteps:
            head = drafting if isinstance(drafting, Head) else None
            return self._new_gpu_steps(model, head, pool)

        def new_draft_steps(pool: torch.Tensor) -> GpuSteps | None:
            if not isinstance(drafting, Decoder):
                return None
            attention, num_seqs = self._make_attention(pool, self._draft_model), self.max_num_seqs
            return GpuSteps(drafting, attention, config.block_size, num_seqs, 0, MOST_ROWS - 1)

        vocab_size = self.model_config.vocab_size
        batch = largest_batch(config, self.max_num_seqs, self.max_model_len, vocab_size)

        def run_largest_step() -> None:
            pool = torch.zeros(1, *layout.block_shape, dtype=layout.dtype, device=device)
            if (draft_steps := new_draft_steps(pool)) is not None:
                DraftSteps(draft_steps, most_tokens).compute_prompts(batch)
            new_steps(pool).launch(batch).collect()

        begin_s = time.perf_counter()
        num_blocks = choose_num_gpu_blocks(
            config, layout, self.max_num_seqs, self.max_model_len, device, run_largest_step
        )
        num_blocks = self._communicator.stages.least(self._communicator.least(num_blocks))
        self.max_num_seqs = self._choose_max_num_seqs(num_blocks)
        self.kv = CudaKvMemory(layout, num_blocks, device)
        self.startup_notes.append(
            f"KV pool: {num_blocks * layout.block_bytes / 1e9:.1f} GB, {num_blocks} blocks; "
            f"largest step measured in {time.perf_counter() - begin_s:.1f} s"
        )
        steps = new_steps(self.kv.tensor)
        draft_steps = new_draft_steps(self.kv.tensor)
        torch.cuda.empty_cache()  # of what loading left, or the graphs would seem to take nothing
        free_before, _ = torch.cuda.mem_get_info(device)
        begin_s = time.perf_counter()
        steps.capture_graphs()
        if draft_steps is not None:
            draft_steps.capture_graphs()
            self._draft_steps = DraftSteps(draft_steps, most_tokens)
        if steps.head is not None:
            steps.head.capture_graphs()
        free_after, _ = torch.cuda.mem_get_info(device)
        num_graphs = {n: len(graphs.sizes) for n, graphs in steps.prefill_graphs.items()}
        self.startup_notes.append(
            f"{len(steps.graphs.sizes)} graphs of up to {steps.graphs.sizes[-1]} decodes, "
            f"{num_graphs.pop(0)} of prompts, {sum(num_graphs.values())} of both in "
            f"{time.perf_counter() - begin_s:.1f} s, {(free_before - free_after) / 1e6:.0f} MB"
        )
        torch.cuda.empty_cache()  # of what capturing left; torch keeps the largest products' memory
        num_tokens = sum(one.num_scheduled_tokens for one in batch)
        for each in (model, drafting):
            if isinstance(each, Decoder):
                num_sampled = min(num_tokens, self.max_num_seqs * (1 + config.max_drafts))
                load_kernels(each, num_tokens, num_sampled)
        reserve_pinned_memory()
        if self.adapters is not None:  # one is read before another is dropped
            self.adapters.pin_memory(config.num_host_adapters + 1)
        self._steps = steps

    def _new_gpu_steps(self, model: Decoder, head: Head | None, pool: torch.Tensor) -> GpuSteps:
        """Of `model`, and behind them those of its head."""
        from .gpu_steps import GpuSteps

        config, max_num_seqs = self._config, self.max_num_seqs
        of_prompts = config.max_num_batched_tokens
        of_prompts = min(config.mixed_graph_tokens, of_prompts + spare_tokens(of_prompts))
        own = GpuSteps(
            model,
            self._make_attention(pool),
            config.block_size,
            max_num_seqs,
            of_prompts if max_num_seqs > 1 else 0,
            config.max_drafts,
            self.adapters,
        )
        if head is None:
            return own
        attention = self._make_attention(pool, self._draft_model, config.max_drafts)
        size, most = config.block_size, max(self._most_step_tokens, own.most_graph_tokens)
        new = partial(GpuSteps, attention=attention, block_size=size, max_num_seqs=max_num_seqs)
        behind = partial(new, max_drafts=config.max_drafts, sampled=own.sampled)
        own.head = HeadSteps(model, head, size, most, behind, new)
        return own

    def _make_attention(
        self,
        pool: torch.Tensor,
        draft: DraftModel | None = None,
        max_drafts: int = MOST_ROWS - 1,
    ) -> AttentionBackend:
        """Over `pool`, of the model, or of the draft model or head, whose decodes have so many
        drafts."""
        if draft is None:
            of_stage = self.model_config.windows[self.layers.first : self.layers.end]
            config = dataclasses.replace(self.model_config, windows=of_stage)
        else:
            config = draft.attention_config
        return make_attention(
            self._prefill_attention,
            pool,
            (draft or self).heads.num_heads,
            self.max_num_seqs,
            config,
            self.max_model_len,
            self._placement.dtype,
            self._config.max_drafts if draft is None else max_drafts,
        )

    def _choose_max_num_seqs(self, num_blocks: int | None) -> int:
        """See `EngineLimits`. All ranks choose alike: their pools have equally many blocks."""
        config = self._config
        return config.max_num_seqs or seqs_for_pool(num_blocks, config.block_size)

    @property
    def engine_block_bytes(self) -> int:
        """A KV block's on all ranks together."""
        of_layer = self.kv.block_bytes // len(self.layers)
        return of_layer * self.model_config.num_layers * self._communicator.size

    @property
    def prefill_chunk_tokens(self) -> int:
        """See `EngineLimits`. A CPU gains nothing by larger steps, and a pipeline is filled by
        smaller ones."""
        is_gpu = self._placement.device.type == "cuda"
        is_pipeline = self._config.pipeline_parallel_size > 1
        return (self._config.prefill_chunk_tokens or 0) if is_gpu and not is_pipeline else 0

    @property
    def graph_rows(self) -> tuple[int, ...]:
        """See `EngineLimits`. A CPU pads nothing."""
        return () if isinstance(self._steps, CpuSteps) else self._steps.mixed_rows

    @property
    def graph_prompt_tokens(self) -> int:
        """See `EngineLimits`."""
        return 0 if isinstance(self._steps, CpuSteps) else self._steps.mixed_tokens

    @property
    def runs_ahead(self) -> bool:
        """See `batch.Runner`."""
        return self._steps.runs_ahead

    def launch(self, batch: Sequence[SequenceSlice]) -> LaunchedStep:
        """See `batch.Runner`."""
        try:
            with torch.inference_mode():
                batch = StepBatch.of(batch)
                if self._draft_steps is not None:
                    self._draft_steps.compute_prompts(batch.others)
                return self._steps.launch(batch)
        except RuntimeError as error:  # torch's: out of memory, device lost
            raise EngineFailed(f"the step failed: {error}") from error

    def draft(self, batch: Sequence[SequenceSlice]) -> list[list[int]]:
        """See `batch.Drafter`; `--speculative-config` asks for a draft model or a head."""
        drafter = self._draft_steps or self._head_steps
        assert drafter is not None
        return drafter.draft(batch)

    def expert_tokens(self) -> tuple[int, ...]:
        """How many tokens chose each expert, over all layers; empty without experts. Never waits,
        and is a little behind."""
        return () if self._expert_loads is None else self._expert_loads.read()

    def forget_expert_tokens(self) -> None:
        """Count them from 0 again: what steps had before the first request was nobody's."""
        if self._expert_loads is not None:
            self._expert_loads.forget()

    def count_steps(self, page: SharedGenerations) -> None:
        """Let those who read `page` see which steps have completed, if this device can."""
        if isinstance(self._steps, CpuSteps) or self._config.pipeline_parallel_size > 1:
            return  # its steps have completed, on all stages, when they are reported
        self._count = count_steps(page, self._placement.device)
        if self._count is not None:
            self._steps.count_in(self._count)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `batch.Runner`; no target may repeat.

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

    def write_canary(self, incarnation: str) -> None:
        """Fill the canary block, so that a puller can check that it reads this pool rightly."""
        pattern = bytearray(canary_bytes(incarnation, self.kv.block_bytes))
        block = self.kv.tensor[CANARY_BLOCK].view(torch.uint8)
        block.copy_(torch.frombuffer(pattern, dtype=torch.uint8).view(block.shape))

    def close(self) -> None:
        """Give the KV memory back; no step may be in flight."""
        if self.host_copier is not None:
            self.host_copier.close()
        if self._count is not None:
            self._count.close()
        del self._steps, self._draft_steps, self._head_steps
        self.kv.close()
        self._communicator.close()
