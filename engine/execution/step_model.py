"""What steps need of what they run: the engine's model, a draft model, or a draft head; and of a
head that runs after each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.attention.attention import AttentionBackend
from ..model.communicator import Communicator
from ..model.stages import LayerRange
from .batch import StepBatch
from .runner_protocols import Drafter


class LmHead(Protocol):
    """Hidden states to logits; each of several ranks may have a part of the vocabulary."""

    def project(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab]"""
        ...

    def project_part(self, x: Tensor) -> Tensor:
        """This rank's logits: a part of the vocabulary unless `StepModel.has_whole_logits`."""
        ...

    def gather(self, parts: Tensor) -> Tensor:
        """The result of `project`, from rows of all ranks' `project_part`."""
        ...


class StepModel(Protocol):
    """See decoder.Decoder."""

    has_whole_logits: bool
    device: torch.device
    dtype: torch.dtype
    communicator: Communicator
    vocab_size: int
    range: LayerRange
    kept: Tensor | None

    @property
    def lm_head(self) -> LmHead: ...

    def forward(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, attention: AttentionBackend
    ) -> Tensor: ...


class StepHead(Drafter, Protocol):
    """See head_steps.HeadSteps."""

    def capture_graphs(self) -> None: ...

    def follow(
        self, batch: StepBatch, features: Tensor, sampled: Tensor, at: Sequence[int]
    ) -> None: ...
