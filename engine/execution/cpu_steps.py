"""Executes steps on a CPU, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...core.errors import EngineFailed
from ...core.request.request import TokenLogprobs
from ...kernels.attention.attention import AttentionBackend
from ...kernels.sampling.sampling import sample
from ..lora.rank_adapters import RankAdapters
from .batch import SampledToken, SequenceSlice, StepBatch
from .extras import compute_extras
from .step_model import StepHead, StepModel


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A LaunchedStep that has completed: of a CPU, or received from the last pipeline stage."""

    results: list[SampledToken | None]
    prompt: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    number = 0
    device_s = None

    def has_completed(self) -> bool:
        return True

    def collect(self) -> list[SampledToken | None]:
        return self.results

    def prompt_logprobs(self) -> Mapping[int, tuple[TokenLogprobs, ...]]:
        return self.prompt


@dataclass(eq=False)
class CpuSteps:
    """Executes steps of `model` over the KV pool of `attention`."""

    model: StepModel
    attention: AttentionBackend
    block_size: int
    adapters: RankAdapters | None = None
    head: StepHead | None = field(default=None, init=False)

    runs_ahead = False

    def __post_init__(self) -> None:
        self._is_last_stage = self.model.range.is_last

    def launch(self, batch: Sequence[SequenceSlice]) -> CompletedStep:
        """Compute the step. Raises EngineFailed, as `Runner.launch`."""
        batch = StepBatch.of(batch)
        try:
            with torch.inference_mode():
                hidden = self._forward(batch)
                if not self._is_last_stage:
                    return CompletedStep(batch.results([]))
                return self._sample(batch, hidden)
        except RuntimeError as error:  # torch's: out of memory
            raise EngineFailed(f"the step failed: {error}") from error

    def sample_states(self, batch: Sequence[SequenceSlice], hidden: Tensor) -> CompletedStep:
        """A step of decodes whose hidden states are computed already."""
        return self._sample(StepBatch.of(batch), hidden)

    def _sample(self, batch: StepBatch, hidden: Tensor) -> CompletedStep:
        indices, project = batch.logits_indices, self.model.lm_head.project
        tokens, logits = list[SampledToken](), None
        token_ids = torch.empty(0, dtype=torch.int64)
        if indices:
            logits = project(hidden.index_select(0, torch.tensor(indices)))
            token_ids, logprobs = sample(logits, [*map(batch.spec, range(len(indices)))])
            tokens = SampledToken.many(token_ids.tolist(), logprobs.tolist())
        if self.head is not None:
            assert self.model.kept is not None
            self.head.follow(batch, self.model.kept, token_ids, range(len(tokens)))
        if not batch.has_extras:
            return CompletedStep(batch.results(tokens))
        extras = compute_extras(batch, logits, hidden, project, lambda whole: whole)
        extras.add_to(tokens)
        return CompletedStep(batch.results(tokens), extras.prompt_logprobs())

    def _forward(self, batch: StepBatch) -> Tensor:
        """Hidden states [tokens, hidden]."""
        token_ids, positions, slots = map(torch.from_numpy, batch.flatten(self.block_size))
        self.attention.plan(batch.metadata(slots))
        if self.adapters is not None:
            self.adapters.plan_step(batch.query_lens, batch.adapter_slots, len(token_ids))
        return self.model.forward(token_ids, positions, slots, self.attention)
