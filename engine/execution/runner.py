"""An engine's model on its device: weights, KV pool, and the steps over them.

    config ─► placement ─► weights ─► largest step measured ─► KV pool ─► (GPU: graphs captured)

Knows no request and no schedule: what is computed together is the scheduler's choice, and a
slice's token must not depend on it. A CPU executes steps here, one after the other; a GPU's are
gpu_steps.py.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...core.config import EngineConfig
from ...core.errors import EngineFailed, StartupFailed
from ...core.model_dir import eos_token_ids, resolve_model_dir
from ...core.request.request import SAMPLING, SamplingParams
from ...kernels.attention.attention import AttentionBackend
from ...kernels.experts.experts import ExpertLoads
from ...kernels.kv.kv_blocks import copy_blocks
from ...kernels.sampling.sample_spec import SampleSpec
from ...kernels.sampling.sampling import sample
from ..kv.block_pool import CANARY_BLOCK, NUM_RESERVED_BLOCKS, PADDING_BLOCK, canary_bytes
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
from ..kv.limits import MAX_NUM_SEQS, seqs_for_pool, spare_tokens
from ..lora.rank_adapters import RankAdapters
from ..model.checkpoint import (
    OnProgress,
    check_weights,
    fill_dummy_weights,
    load_weights,
    tensor_names,
    weights_identity,
)
from ..model.communicator import Communicator
from ..model.decoder import Decoder
from ..model.experts import is_merged_name
from ..model.fingerprint import fingerprint_fields
from ..model.model_config import ModelConfig, read_model_config
from ..model.sharding import check_divisible, heads_of_rank
from .batch import CompletedStep, LaunchedStep, SampledToken, SequenceSlice
from .device import choose_attention, choose_kv_dtype, choose_placement, make_attention
from .draft_model import DraftModel, make_draft_model
from .draft_steps import MOST_ROWS, DraftSteps
from .expert_loads import ExpertLoadReader
from .step_parts import SampledRows, compute_extras, flatten, metadata_of, plan_adapters

if TYPE_CHECKING:
    from .gpu_steps import GpuSteps  # needs Triton

# What a step may need most memory for: every row sampled with all there is.
_NUMBERS: dict[str, Any] = {n: 0.5 for n, one in SAMPLING.items() if isinstance(one.default, float)}
_DEAREST_PARAMS = SamplingParams(top_k=50, logit_bias=((0, 1.0),), logprobs=20, **_NUMBERS)


# Tokens that differ more than what attention adds to all of them choose different experts.
_DUMMY_STDS = {"model.embed_tokens.weight": 8.0}


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
        self.max_model_len = _choose_max_model_len(config, self.model_config)
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
            num_layers=self.model_config.num_layers,
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
            num_blocks = choose_num_cpu_blocks(config, layout, self.max_model_len)
            self.max_num_seqs = self._choose_max_num_seqs(num_blocks)
        model, weights = self._load(on_progress)
        drafting, of_drafts = None, dict[str, str]()
        if self._draft_model is not None:
            drafting, of_drafts = self._draft_model.load()
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
            attention = self._make_attention(self.kv.tensor)
            self._steps: CpuSteps | GpuSteps = CpuSteps(
                model, attention, config.block_size, self.adapters
            )
            if drafting is not None:
                attention = self._make_attention(self.kv.tensor, self._draft_model)
                steps = CpuSteps(drafting, attention, config.block_size)
                self._draft_steps = DraftSteps(steps, config.max_num_batched_tokens)
        else:
            self._start_gpu(model, drafting, layout)
        self.host_copier = make_host_copier(config, self.kv, self._placement.device)

    def _load(self, on_progress: OnProgress | None) -> tuple[Decoder, str]:
        """The model, its weights filled, and what identifies them."""
        config, begin_s = self._config, time.perf_counter()
        try:
            is_merged = config.load_format != "dummy" and any(
                map(is_merged_name, tensor_names(self.model_dir))
            )
            ignored = self._check_weights(is_merged)
            model = Decoder(self.model_config, self._placement, self._make_loads())
            targets = dict(model.targets(has_merged_experts=is_merged))
            if config.load_format == "dummy":
                fill_dummy_weights(
                    targets,
                    std=self.model_config.initializer_range,
                    seed=config.seed,
                    stds=_DUMMY_STDS if self.model_config.experts else {},
                    on_progress=on_progress,
                )
                identity = f"dummy:{config.seed}"
            else:
                load_weights(self.model_dir, targets, ignored=ignored, on_progress=on_progress)
                identity = weights_identity(self.model_dir)
        except torch.OutOfMemoryError as error:
            raise StartupFailed(
                f"the weights do not fit into GPU memory: {error}",
                hint="use another GPU, or --dtype bfloat16",
            ) from error
        if self._placement.device.type == "cuda":
            torch.cuda.synchronize()
        num_bytes = sum(target.nbytes for target in targets.values())
        seconds = time.perf_counter() - begin_s
        self.startup_notes.append(
            f"weights: {num_bytes / 1e9:.1f} GB in {seconds:.1f} s, "
            f"{num_bytes / seconds / 1e9:.1f} GB/s"
        )
        if quantization := self.model_config.quantization:
            stays = "" if self._placement.stays_quantised else ", dequantised as they were loaded"
            self.startup_notes.append(f"{quantization.name}{stays}")
        return model, identity

    def _make_adapters(self, model: Decoder) -> RankAdapters | None:
        """Before the KV pool is measured: it gets what their slots leave."""
        config = self._config
        if not config.enable_lora:
            return None
        most = config.max_num_batched_tokens
        most = max(most + spare_tokens(most), config.prefill_chunk_tokens or 0)
        most = max(most, config.max_num_seqs or MAX_NUM_SEQS)
        dtype, max_rank = self._placement.dtype, config.max_lora_rank
        return RankAdapters(model, dtype, config.max_loras, max_rank, most)

    def _make_loads(self) -> ExpertLoads | None:
        experts = self.model_config.experts
        if experts is None:
            return None
        first_slot = NUM_RESERVED_BLOCKS * self._config.block_size
        sizes = (len(experts.layers), experts.num_experts)
        return ExpertLoads(*sizes, first_slot, self._placement.device)

    def _check_weights(self, has_merged_experts: bool) -> frozenset[str]:
        """Whether the checkpoint fills this model, before any memory is taken for it. Returns the
        tensors that it may have besides."""
        placement = dataclasses.replace(self._placement, device=torch.device("meta"))
        model = Decoder(self.model_config, placement)
        targets = dict(model.targets(has_merged_experts=has_merged_experts))
        ignored = frozenset({"lm_head.weight"} if self.model_config.has_tied_embeddings else ())
        if quantization := self.model_config.quantization:
            names = [name.removesuffix(".weight") for name, t in targets.items() if t.quantised]
            ignored |= quantization.ignored(names)
        if self._config.load_format != "dummy":
            check_weights(self.model_dir, targets, ignored=ignored)
        return ignored

    def _start_gpu(self, model: Decoder, drafting: Decoder | None, layout: KvLayout) -> None:
        """Measure the largest step, take the rest as KV pool, capture the decode graphs."""
        from .gpu_steps import GpuSteps

        config, device = self._config, self._placement.device
        # The pool's size is what a step leaves, and so is measured by as many as it may let run.
        self.max_num_seqs = self._choose_max_num_seqs(config.num_kv_blocks)

        most_tokens = config.max_num_batched_tokens
        most_tokens += spare_tokens(most_tokens)

        def new_steps(pool: torch.Tensor) -> GpuSteps:
            attention = self._make_attention(pool)
            return GpuSteps(
                model,
                attention,
                config.block_size,
                self.max_num_seqs,
                min(config.mixed_graph_tokens, most_tokens) if self.max_num_seqs > 1 else 0,
                config.max_drafts,
                self.adapters,
            )

        def new_draft_steps(pool: torch.Tensor) -> GpuSteps | None:
            if drafting is None:
                return None
            attention, num_seqs = self._make_attention(pool, self._draft_model), self.max_num_seqs
            return GpuSteps(drafting, attention, config.block_size, num_seqs, 0, MOST_ROWS - 1)

        def run_largest_step() -> None:
            pool = torch.zeros(1, *layout.block_shape, dtype=layout.dtype, device=device)
            vocab_size = self.model_config.vocab_size
            batch = _largest_batch(config, self.max_num_seqs, self.max_model_len, vocab_size)
            if (draft_steps := new_draft_steps(pool)) is not None:
                DraftSteps(draft_steps, most_tokens).compute_prompts(batch)
            new_steps(pool).launch(batch).collect()

        begin_s = time.perf_counter()
        num_blocks = choose_num_gpu_blocks(
            config, layout, self.max_num_seqs, self.max_model_len, device, run_largest_step
        )
        num_blocks = self._communicator.least(num_blocks)
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
        free_after, _ = torch.cuda.mem_get_info(device)
        num_graphs = {n: len(graphs.sizes) for n, graphs in steps.prefill_graphs.items()}
        self.startup_notes.append(
            f"{len(steps.graphs.sizes)} graphs of up to {steps.graphs.sizes[-1]} decodes, "
            f"{num_graphs.pop(0)} of prompts, {sum(num_graphs.values())} of both in "
            f"{time.perf_counter() - begin_s:.1f} s, {(free_before - free_after) / 1e6:.0f} MB"
        )
        self._steps = steps

    def _make_attention(
        self, pool: torch.Tensor, draft: DraftModel | None = None
    ) -> AttentionBackend:
        """Over `pool`, of the model or of the draft model."""
        return make_attention(
            self._prefill_attention,
            pool,
            (draft or self).heads.num_heads,
            self.max_num_seqs,
            self.model_config if draft is None else draft.attention_config,
            self.max_model_len,
            self._placement.dtype,
            self._config.max_drafts if draft is None else MOST_ROWS - 1,
        )

    def _choose_max_num_seqs(self, num_blocks: int | None) -> int:
        """See `EngineLimits`. All ranks choose alike: their pools have equally many blocks."""
        config = self._config
        return config.max_num_seqs or seqs_for_pool(num_blocks, config.block_size)

    @property
    def model(self) -> Decoder:
        """The model, for whoever wants its weights."""
        return self._steps.model

    @property
    def prefill_chunk_tokens(self) -> int:
        """See `EngineLimits`. A CPU gains nothing by larger steps."""
        is_gpu = self._placement.device.type == "cuda"
        return (self._config.prefill_chunk_tokens or 0) if is_gpu else 0

    @property
    def graph_rows(self) -> tuple[int, ...]:
        """See `EngineLimits`. A CPU pads nothing."""
        return () if isinstance(self._steps, CpuSteps) else self._steps.mixed_rows

    @property
    def runs_ahead(self) -> bool:
        """See `batch.Runner`."""
        return self._steps.runs_ahead

    def launch(self, batch: Sequence[SequenceSlice]) -> LaunchedStep:
        """See `batch.Runner`."""
        try:
            with torch.inference_mode():
                if self._draft_steps is not None:
                    self._draft_steps.compute_prompts(batch)
                return self._steps.launch(batch)
        except RuntimeError as error:  # torch's: out of memory, device lost
            raise EngineFailed(f"the step failed: {error}") from error

    def draft(self, batch: Sequence[SequenceSlice]) -> list[list[int]]:
        """See `batch.Drafter`; `--speculative-config` names a draft model."""
        assert self._draft_steps is not None
        return self._draft_steps.draft(batch)

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
        if isinstance(self._steps, CpuSteps):
            return  # its steps have completed when they are reported
        self._count = count_steps(page, self._placement.device)
        if self._count is not None:
            self._steps.count_in(self._count)

    def execute(self, batch: Sequence[SequenceSlice]) -> list[SampledToken | None]:
        """Run one step and wait for it."""
        return self.launch(batch).collect() if batch else []

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
        del self._steps, self._draft_steps
        self.kv.close()
        self._communicator.close()


def _largest_batch(
    config: EngineConfig, max_num_seqs: int, max_model_len: int, vocab_size: int
) -> list[SequenceSlice]:
    """A step of as many tokens and sampled rows as any, all in the padding block."""
    budget = config.max_num_batched_tokens
    chunk = min(config.prefill_chunk_tokens or 0, max_model_len + max_num_seqs - 2)
    budget = max(budget + spare_tokens(budget), chunk)
    num_tokens = min(budget, max_num_seqs * (max_model_len - 1))
    num_slices = min(max_num_seqs, num_tokens)
    first = min(num_tokens - num_slices + 1, max_model_len - 1)
    lens = [first, *[1] * (num_slices - 1)]
    num_left = num_tokens - sum(lens)
    for index in range(1, num_slices):
        more = min(num_left, max_model_len - 2)
        lens[index] += more
        num_left -= more
    table = [PADDING_BLOCK] * -(-max_model_len // config.block_size)
    all_allowed = np.full(-(-vocab_size // 32), -1, np.int32)
    dearest = SampleSpec(
        _DEAREST_PARAMS, key=1, fork_keys=(2, 3), allowed=all_allowed, num_candidates=20
    )
    return [
        SequenceSlice(
            [0] * length,
            0,
            table,
            dearest,
            prompt_targets=[0] * (length - 1),
            num_prompt_top=20,
            is_prompt=True,
        )
        for length in sorted(lens)
    ]


def _choose_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return model.max_position_embeddings
    if not 0 < config.max_model_len <= model.max_context_tokens:
        raise StartupFailed(
            f"--max-model-len {config.max_model_len}: "
            f"the model's context has {model.max_context_tokens} tokens"
        )
    return config.max_model_len


# BLAS multiplies a single row by another routine, whose sums round differently: with this second
# row a decode alone gives bit for bit what it gives in a batch.
_PADDING_SLICE = SequenceSlice(token_ids=(0,), start=0, block_table=(PADDING_BLOCK,), sample=None)


class CpuSteps:
    """Steps of `model` over the pool of `attention`."""

    runs_ahead = False

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        block_size: int,
        adapters: RankAdapters | None = None,
    ) -> None:
        self.model = model
        self._adapters = adapters
        self._attention = attention
        self._block_size = block_size

    def launch(self, batch: Sequence[SequenceSlice]) -> CompletedStep:
        hidden = self._forward(batch)
        rows, tokens, logits = SampledRows.of(batch), list[SampledToken](), None
        if rows.specs:
            logits = self._logits(hidden.index_select(0, torch.tensor(rows.tokens)))
            token_ids, logprobs = sample(logits, rows.specs)
            tokens += map(SampledToken, token_ids.tolist(), logprobs.tolist())
        extras = compute_extras(batch, rows, logits, hidden, self._logits, lambda whole: whole)
        if extras is not None:
            extras.add_to(tokens)
        prompt = {} if extras is None else extras.prompt_logprobs()
        return CompletedStep(rows.results(len(batch), tokens), prompt)

    def _forward(self, batch: Sequence[SequenceSlice]) -> Tensor:
        """Hidden states [tokens, hidden], perhaps with a padding row at the end."""
        if len(batch) == 1 and batch[0].num_scheduled_tokens == 1:
            batch = (*batch, _PADDING_SLICE)
        token_ids, positions, slots = map(torch.from_numpy, flatten(batch, self._block_size))
        self._attention.plan(metadata_of(batch, slots))
        plan_adapters(self._adapters, batch, len(token_ids))
        return self.model.forward(token_ids, positions, slots, self._attention)

    def _logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab]; one row is computed twice, as in `_PADDING_SLICE`."""
        if len(hidden) > 1:
            return self.model.lm_head.project(hidden)
        return self.model.lm_head.project(hidden.expand(2, -1).contiguous())[:1]
