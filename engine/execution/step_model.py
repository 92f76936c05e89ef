"""What steps need of what they run: the engine's model, a draft model, or a head beside one; what
follows them, if the model has a head of its own; and what is in CUDA graphs.

    stages whose operations can be captured      | receive, layers, send |
    others, over a network           receive ─►  |        layers         |  ─► send
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.attention.attention import AttentionBackend
from ..model.communicator import Communicator
from ..model.decoder import Decoder
from ..model.layers import Product
from ..model.stages import LayerRange
from .batch import Drafter, StepBatch
from .cuda_graphs import StepGraph, load_products
from .step_parts import SampledRows

_MOST_SAMPLED = 1024  # rows whose kernels are loaded at the start: more are seldom


class LmHead(Protocol):
    """Hidden states to logits; of several ranks each may have a part of the vocabulary."""

    def project(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab]"""
        ...

    def project_part(self, x: Tensor) -> Tensor:
        """Those of this rank, of all unless `StepModel.has_whole_logits`."""
        ...

    def gather(self, parts: Tensor) -> Tensor:
        """What `project` gives, of rows of all ranks' `project_part`."""
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

    def products(self) -> list[tuple[int, Product]]:
        """To be timed for the sizes of graphs; none: these are not worth it."""
        ...


class StepHead(Drafter, Protocol):
    """See head_steps.HeadSteps."""

    def capture_graphs(self) -> None: ...

    def follow(
        self,
        batch: StepBatch,
        features: Tensor,
        rows: SampledRows,
        sampled: Tensor,
        at: Sequence[int],
    ) -> None: ...


def load_kernels(model: Decoder, most_tokens: int, most_sampled: int) -> None:
    """Run a model's products that are launched outside of graphs: those of layers for steps of up
    to `most_tokens`, the LM head for up to so many sampled rows. See `rows_with_kernels`."""
    like = torch.empty(0, dtype=model.dtype, device=model.device)
    load_products(model.products(), most_tokens, like)
    if model.range.is_last:

        def project(hidden: Tensor) -> Tensor:
            """As rows that were selected have it, with no room behind them."""
            return model.lm_head.project_part(hidden.clone())

        load_products([(model.hidden_size, project)], min(most_sampled, _MOST_SAMPLED), like)


class GraphedModel:
    """`model` as graphs of up to `most_tokens` tokens have it. What is received and sent around
    them is so in the order of the stream: a graph's memory is free again once it is read."""

    def __init__(self, model: StepModel, most_tokens: int) -> None:
        self._model = model
        self._stages = model.communicator.stages
        self._received: Tensor | None = None
        if isinstance(model, Decoder) and not (self._is_whole or model.range.is_first):
            self._received = model.new_residual(most_tokens).zero_()

    @property
    def _is_whole(self) -> bool:
        return self._stages.can_be_captured

    def forward(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, attention: AttentionBackend
    ) -> Tensor:
        """To be captured."""
        if self._is_whole or not isinstance(self._model, Decoder):
            return self._model.forward(token_ids, positions, slots, attention)
        received = None if self._received is None else self._received[: len(token_ids)]
        return self._model.compute(token_ids, positions, slots, attention, received)

    def replay(self, graph: StepGraph) -> None:
        """Launch a step that was captured."""
        if self._received is not None:
            self._stages.receive(self._received[: graph.size])
        graph.replay()
        if not (self._is_whole or self._model.range.is_last):
            self._stages.send(graph.output)
