"""Builds the step executor of a rank's model for its device, once, when the model is loaded.

    a CPU   its KV pool ─► steps
    a GPU   largest step measured ─► KV pool of what that leaves ─► steps ─► graphs captured

Those of a draft model or a draft head are built too. Loads no weights, and runs no request's step:
see runner.py.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ...core.engine_config import EngineConfig
from ...core.request.sampling_params import SAMPLING, SamplingParams
from ...kernels.attention.attention import AttentionBackend
from ...kernels.attention.attention_torch import TorchAttention
from ...kernels.pinned_memory import reserve_pinned_memory
from ...kernels.sampling.sample_spec import SampleSpec
from ..kv.block_pool import PADDING_BLOCK
from ..kv.kv_memory import CpuKvMemory, CudaKvMemory, KvLayout, choose_num_gpu_blocks
from ..kv.limits import spare_tokens
from ..lora.rank_adapters import RankAdapters
from ..model.decoder import Decoder
from ..model.draft_head import Head
from ..model.model_config import ModelConfig
from ..model.sharding import Heads
from ..model.weights.placement import Placement
from .batch import SequenceSlice
from .cpu_steps import CpuSteps
from .drafting.draft_model import DraftModel
from .drafting.draft_steps import MOST_ROWS, DraftSteps
from .drafting.head_steps import HeadSteps
from .gpu.graphed_model import load_kernels
from .step_sizes import most_step_tokens, seqs_for_pool

if TYPE_CHECKING:
    from .gpu.gpu_steps import GpuSteps  # needs Triton

# Every row with the most expensive sampling.
_NUMBERS: dict[str, Any] = {n: 0.5 for n, one in SAMPLING.items() if isinstance(one.default, float)}
_DEAREST_PARAMS = SamplingParams(top_k=50, logit_bias=((0, 1.0),), logprobs=20, **_NUMBERS)


class BuiltSteps(NamedTuple):
    """The KV pool of a rank, and what executes steps over it: the model, and a draft model if there
    is one."""

    kv: CpuKvMemory | CudaKvMemory
    steps: CpuSteps | GpuSteps
    draft_steps: DraftSteps | None


@dataclass(slots=True)
class StepBuilder:
    """Builds steps of `model`, placed among the ranks by `placement`, and of `drafting`, the draft
    model or head that `draft_model` describes. Appends lines for people to `notes`."""

    config: EngineConfig
    model_config: ModelConfig
    placement: Placement
    heads: Heads
    max_model_len: int
    prefill_attention: str  # by device.choose_attention
    model: Decoder
    draft_model: DraftModel | None
    drafting: Decoder | Head | None
    adapters: RankAdapters | None
    notes: list[str]
    max_num_seqs: int = field(init=False)  # see EngineLimits; known once the steps are made

    def on_cpu(self, layout: KvLayout, num_blocks: int) -> BuiltSteps:
        """Allocate a pool of `num_blocks`, with steps over it."""
        self._choose_max_num_seqs(num_blocks)
        kv = CpuKvMemory(layout, num_blocks)
        size, drafting, draft_steps = self.config.kv_block_size, self.drafting, None
        steps = CpuSteps(self.model, self._attention(kv.tensor), size, self.adapters)
        if drafting is None:
            return BuiltSteps(kv, steps, None)
        attention = self._attention(kv.tensor, self.draft_model)
        if isinstance(drafting, Decoder):
            of_draft = CpuSteps(drafting, attention, size)
            draft_steps = DraftSteps(of_draft, self.config.max_num_batched_tokens)
        else:
            new = partial(CpuSteps, attention=attention, block_size=size)
            most = most_step_tokens(self.config)
            steps.head = HeadSteps(self.model, drafting, size, most, new, new)
        return BuiltSteps(kv, steps, draft_steps)

    def on_gpu(self, layout: KvLayout) -> BuiltSteps:
        """Measure the largest step, allocate the rest as KV pool, capture the graphs."""
        config, device = self.config, self.placement.device
        # The pool gets what the largest step leaves, so that step has as many sequences as may run.
        self._choose_max_num_seqs(config.num_kv_blocks)

        most_tokens = config.max_num_batched_tokens
        most_tokens += spare_tokens(most_tokens)
        vocab_size = self.model_config.vocab_size
        batch = _largest_batch(config, self.max_num_seqs, self.max_model_len, vocab_size)

        def run_largest_step() -> None:
            pool = torch.zeros(1, *layout.block_shape, dtype=layout.dtype, device=device)
            if (draft_steps := self._gpu_draft_steps(pool)) is not None:
                DraftSteps(draft_steps, most_tokens).compute_prompts(batch)
            self.gpu_steps(pool).launch(batch).collect()

        begin_s = time.perf_counter()
        num_blocks = choose_num_gpu_blocks(
            config, layout, self.max_num_seqs, self.max_model_len, device, run_largest_step
        )
        communicator = self.placement.communicator
        num_blocks = communicator.stages.least(communicator.least(num_blocks))
        self._choose_max_num_seqs(num_blocks)
        kv = CudaKvMemory(layout, num_blocks, device)
        self.notes.append(
            f"KV pool: {num_blocks * layout.block_bytes / 1e9:.1f} GB, {num_blocks} blocks; "
            f"largest step measured in {time.perf_counter() - begin_s:.1f} s"
        )
        steps = self.gpu_steps(kv.tensor)
        draft_steps = self._gpu_draft_steps(kv.tensor)
        self._capture_graphs(steps, draft_steps)
        num_tokens = sum(len(one.token_ids) for one in batch)
        for each in (self.model, self.drafting):
            if isinstance(each, Decoder):
                num_sampled = min(num_tokens, self.max_num_seqs * (1 + config.max_drafts))
                load_kernels(each, num_tokens, num_sampled)
        reserve_pinned_memory()
        if self.adapters is not None:  # one is read before another is dropped
            self.adapters.pin_memory(config.num_host_adapters + 1)
        drafts = None if draft_steps is None else DraftSteps(draft_steps, most_tokens)
        return BuiltSteps(kv, steps, drafts)

    def _capture_graphs(self, steps: GpuSteps, draft_steps: GpuSteps | None) -> None:
        device = self.placement.device
        torch.cuda.empty_cache()  # of what loading left, or the graphs would seem to take nothing
        free_before, _ = torch.cuda.mem_get_info(device)
        begin_s = time.perf_counter()
        steps.capture_graphs()
        if draft_steps is not None:
            draft_steps.capture_graphs()
        if steps.head is not None:
            steps.head.capture_graphs()
        free_after, _ = torch.cuda.mem_get_info(device)
        num_graphs = {n: len(graphs.sizes) for n, graphs in steps.prefill_graphs.items()}
        self.notes.append(
            f"{len(steps.graphs.sizes)} graphs of up to {steps.graphs.sizes[-1]} decodes, "
            f"{num_graphs.pop(0)} of prompts, {sum(num_graphs.values())} of both in "
            f"{time.perf_counter() - begin_s:.1f} s, {(free_before - free_after) / 1e6:.0f} MB"
        )
        torch.cuda.empty_cache()  # of what capturing left; torch keeps the largest products' memory

    def gpu_steps(self, pool: torch.Tensor) -> GpuSteps:
        """Steps of the model over `pool`, followed by those of its head; graphs not captured."""
        from .gpu.gpu_steps import GpuSteps

        config, max_num_seqs = self.config, self.max_num_seqs
        of_prompts = config.max_num_batched_tokens
        of_prompts = min(config.mixed_graph_tokens, of_prompts + spare_tokens(of_prompts))
        own = GpuSteps(
            self.model,
            self._attention(pool),
            config.kv_block_size,
            max_num_seqs,
            of_prompts if max_num_seqs > 1 else 0,
            config.max_drafts,
            self.adapters,
        )
        if self.drafting is None or isinstance(self.drafting, Decoder):
            return own
        attention = self._attention(pool, self.draft_model, config.max_drafts)
        size, most = config.kv_block_size, max(most_step_tokens(config), own.most_graph_tokens)
        new = partial(GpuSteps, attention=attention, block_size=size, max_num_seqs=max_num_seqs)
        behind = partial(new, max_drafts=config.max_drafts, sampled=own.sampled)
        own.head = HeadSteps(self.model, self.drafting, size, most, behind, new)
        return own

    def _gpu_draft_steps(self, pool: torch.Tensor) -> GpuSteps | None:
        """Steps of a draft model over `pool`; graphs not captured."""
        from .gpu.gpu_steps import GpuSteps

        if not isinstance(self.drafting, Decoder):
            return None
        attention, size = self._attention(pool, self.draft_model), self.config.kv_block_size
        return GpuSteps(self.drafting, attention, size, self.max_num_seqs, 0, MOST_ROWS - 1)

    def _attention(
        self,
        pool: torch.Tensor,
        draft: DraftModel | None = None,
        max_drafts: int = MOST_ROWS - 1,
    ) -> AttentionBackend:
        """Attention over `pool` of the model, or of the draft model or head, whose decodes have up
        to `max_drafts` drafts."""
        if draft is None:
            layers = self.model.range
            of_stage = self.model_config.windows[layers.first : layers.end]
            config = dataclasses.replace(self.model_config, windows=of_stage)
        else:
            config = draft.attention_config
        dtype, max_model_len = self.placement.dtype, self.max_model_len
        if self.prefill_attention == "torch":
            return TorchAttention(pool, config.windows, dtype)
        from ...kernels.attention.attention_gpu import make_gpu_attention

        return make_gpu_attention(
            pool,
            (draft or self).heads.num_heads,
            self.max_num_seqs,
            max_model_len,
            dtype,
            prefill=self.prefill_attention,
            rows_each=1 + (self.config.max_drafts if draft is None else max_drafts),
            windows=config.windows if config.smallest_window(max_model_len) else None,
        )

    def _choose_max_num_seqs(self, num_blocks: int | None) -> None:
        """All ranks choose the same, as their pools have equally many blocks."""
        config = self.config
        self.max_num_seqs = config.max_num_seqs or seqs_for_pool(num_blocks, config.kv_block_size)


def _largest_batch(
    config: EngineConfig, max_num_seqs: int, max_model_len: int, vocab_size: int
) -> list[SequenceSlice]:
    """The step with the most tokens and sampled rows, all in the padding block."""
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
    all_allowed = np.full(-(-vocab_size // 32), -1, np.int32)
    dearest = SampleSpec(
        _DEAREST_PARAMS, key=1, fork_keys=(2, 3), allowed=all_allowed, num_candidates=20
    )
    return [
        SequenceSlice(
            [0] * length,
            0,
            [PADDING_BLOCK] * -(-length // config.kv_block_size),
            dearest,
            prompt_targets=[0] * (length - 1),
            num_prompt_top=20,
            is_prompt=True,
        )
        for length in sorted(lens)
    ]
