"""The part of a model that is in CUDA graphs, and loading the kernels launched outside of them.

    stages whose operations can be captured      | receive, layers, send |
    others, over a network           receive ─►  |        layers         |  ─► send

The graphs themselves are in cuda_graphs.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernels.attention.attention import AttentionBackend
from ...model.decoder import Decoder
from ...model.layers import RowLinear
from ..step_model import StepModel
from .cuda_graphs import Product, StepGraph, load_products

_MOST_SAMPLED = 1024  # rows whose kernels are loaded at start-up: more are rare


def products_of(model: StepModel) -> list[tuple[int, Product]]:
    """For each linear of a decoder's first layer: its number of inputs, and what it computes on
    this rank without communication. Empty for a draft head, whose products are not worth timing."""
    if not isinstance(model, Decoder):
        return []
    has_others = model.communicator.size > 1
    return [
        (one.weight.shape[1], one.product if has_others and isinstance(one, RowLinear) else one)
        for one in model.layers[0].linears
    ]


def load_kernels(model: Decoder, most_tokens: int, most_sampled: int) -> None:
    """Run a model's products that are launched outside of graphs: those of layers for steps of up
    to `most_tokens`, the LM head for up to `most_sampled` rows. See `rows_with_kernels`."""
    like = torch.empty(0, dtype=model.dtype, device=model.device)
    load_products(products_of(model), most_tokens, like)
    if model.range.is_last:

        def project(hidden: Tensor) -> Tensor:
            """Like selected rows, the clone has no memory after its rows (see row_room.py)."""
            return model.lm_head.project_part(hidden.clone())

        load_products([(model.hidden_size, project)], min(most_sampled, _MOST_SAMPLED), like)


class GraphedModel:
    """`model` in graphs of up to `most_tokens` tokens. Receives before a graph and sends after it
    are in stream order, so no replay overwrites memory that is still to be read."""

    def __init__(self, model: StepModel, most_tokens: int) -> None:
        self._model = model
        self._stages = model.communicator.stages
        self._is_whole = self._stages.can_be_captured
        self._received: Tensor | None = None
        if isinstance(model, Decoder) and not (self._is_whole or model.range.is_first):
            shape = (most_tokens, model.hidden_size)
            self._received = torch.zeros(shape, dtype=model.dtype, device=model.device)

    def forward(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, attention: AttentionBackend
    ) -> Tensor:
        """The part of a step that is captured."""
        if self._is_whole or not isinstance(self._model, Decoder):
            return self._model.forward(token_ids, positions, slots, attention)
        received = None if self._received is None else self._received[: len(token_ids)]
        return self._model.compute(token_ids, positions, slots, attention, received)

    def replay(self, graph: StepGraph) -> None:
        """Launch a captured step."""
        if self._received is not None:
            self._stages.receive(self._received[: graph.size])
        graph.replay()
        if not (self._is_whole or self._model.range.is_last):
            self._stages.send(graph.output)
