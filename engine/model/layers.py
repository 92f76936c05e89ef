"""The building blocks of the models: products with weights, norms, embeddings of tokens and of
positions, as a forward pass runs them. Of several ranks:

    Linear      each rank has some of the outputs        x whole -> y in parts
    RowLinear   each rank has some of the inputs         x in parts -> a summand of y on each rank
    RMSNorm     adds up the ranks' summands, and both to the residual stream
    Embedding   each rank has some of the vocabulary

construction/layers.py makes them. Knows no file, no name of a weight and no attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from ...kernels.kv.kv_blocks import rope_angles
from ...kernels.layers.ops import Ops
from ...kernels.lora.lora import Place
from ...kernels.products.weights import Activations, Fp8Weight, Weight
from .communicator import Communicator, Summand


class StepAdapters(Protocol):
    """What a step's LoRA adapters add to the product at a place; nothing if not `is_active`."""

    is_active: bool

    def add_to(self, product: Callable[[], Tensor], x: Activations, place: Place) -> Tensor:
        """`product` of x, and what its rows' adapters add to it."""
        ...

    def add_to_gated(self, product: Callable[[], Tensor], x: Activations, place: Place) -> Tensor:
        """`ops.silu_and_mul` of the same."""
        ...


Product = Callable[[Tensor], Activations | Summand]  # of inputs with a weight


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs [first, first + count) of the checkpoint's projection `name`, which has `full`."""

    name: str
    count: int
    first: int
    full: int


@dataclass(eq=False)
class LinearBase:
    """One or several projections of the same input, as one product.

    `bias` is None on all ranks but the first where the outputs are summands. For LoRA adapters:
    `outputs` are the checkpoint's projections in the order of their rows, `inputs` how many this
    rank has, the first, and of how many.
    """

    weight: Weight
    bias: Tensor | None
    ops: Ops
    communicator: Communicator
    outputs: Sequence[Outputs]
    inputs: tuple[int, int, int]
    adapters: StepAdapters | None = field(default=None, init=False)
    place: Place = field(init=False)  # in the adapters' bank

    @property
    def fp8_weight(self) -> Fp8Weight | None:
        return self.weight if isinstance(self.weight, Fp8Weight) else None

    def product(self, x: Activations) -> Tensor:
        """What this rank computes, without the others."""
        if self.adapters is not None and self.adapters.is_active:
            return self.adapters.add_to(lambda: self._linear(x), x, self.place)
        return self._linear(x)

    def _linear(self, x: Activations) -> Tensor:
        return self.ops.linear(x, self.weight, self.bias)


class Linear(LinearBase):
    """A product of which each rank has all inputs."""

    __call__ = LinearBase.product


class GatedLinear(LinearBase):
    """A Linear of whose outputs the first half, by SiLU, gates the second."""

    def __call__(self, x: Activations, reader: Fp8Weight | None = None) -> Activations:
        if self.adapters is not None and self.adapters.is_active:
            return self.adapters.add_to_gated(lambda: self._linear(x), x, self.place)
        return self.ops.gated_linear(x, self.weight, self.bias, reader)


class RowLinear(LinearBase):
    """A product of which each rank has an even part of the inputs: its outputs are summands."""

    def __call__(self, x: Activations) -> Summand:
        """For the next RMSNorm.add."""
        if self.adapters is not None and self.adapters.is_active:
            return self.product(x)
        return self.communicator.linear(self.ops, x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class MLP:
    """The gated feed-forward part. Each rank has an even part of the inner dimension, and gives a
    summand of the output."""

    gate_up: GatedLinear
    down: RowLinear

    def __call__(self, x: Activations) -> Summand:
        return self.down(self.gate_up(x, self.down.fp8_weight))

    def product(self, x: Tensor) -> Tensor:
        """The summand as a plain tensor, which RowLinear's need not be."""
        return self.down.product(self.gate_up(x, self.down.fp8_weight))


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Root mean square norm with a weight."""

    weight: Tensor
    eps: float
    ops: Ops
    communicator: Communicator

    def __call__(self, x: Tensor, reader: Fp8Weight | None = None) -> Activations:
        """`reader`: see Ops."""
        return self.ops.rms_norm(x, self.weight, self.eps, reader)

    def add(self, x: Summand, residual: Tensor, reader: Fp8Weight | None = None) -> Activations:
        """Add all ranks' x to `residual` in place; the norm of the sum."""
        weight, eps = self.weight, self.eps
        return self.communicator.add_rms_norm(self.ops, x, residual, weight, eps, reader)


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token ids to vectors, and back to logits.

    Each rank has the same number of rows in `weight`, from the vector of token `first` on; of the
    last ranks those behind `num_ids` may be padding, which is 0.
    """

    weight: Tensor
    first: int
    num_ids: int
    vocab_size: int
    ops: Ops
    communicator: Communicator

    def __call__(self, token_ids: Tensor) -> Tensor:
        if self.communicator.size == 1:
            return F.embedding(token_ids, self.weight)
        rows = token_ids - self.first
        is_elsewhere = (rows < 0) | (rows >= self.num_ids)
        vectors = F.embedding(rows.masked_fill_(is_elsewhere, 0), self.weight)
        return self.communicator.all_reduce(vectors.masked_fill_(is_elsewhere[:, None], 0))

    def project(self, x: Tensor) -> Tensor:
        """What an LM head computes: [rows, hidden] -> [rows, vocab], the same on all ranks."""
        return self.gather(self.project_part(x))

    def project_part(self, x: Tensor) -> Tensor:
        """The logits of this rank's vectors, and of padding: [rows, ceil(vocab / ranks)]."""
        return self.ops.linear(x, self.weight, None)

    def gather(self, parts: Tensor) -> Tensor:
        """What `project` gives, of rows of all ranks' `project_part`."""
        return self.communicator.all_gather(parts)[:, : self.vocab_size]


@dataclass(frozen=True, slots=True)
class RotaryEmbedding:
    """Positions to what `kernels.kv.kv_blocks.apply_rope` takes, once per step.

    `inv_freq` [dim/2], `scale` of cos and sin; with `trained_length` it is a table with a row for
    each position from there on: see rotary.py.
    """

    inv_freq: Tensor
    scale: float = 1.0
    trained_length: int | None = None

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [tokens] -> cos and signed sin, [tokens, 1, dim] float32 each."""
        if self.trained_length is None:
            return rope_angles(positions, self.inv_freq, self.scale)
        rows = (positions + 1 - self.trained_length).clamp(min=0)
        return rope_angles(positions, self.inv_freq.index_select(0, rows))
