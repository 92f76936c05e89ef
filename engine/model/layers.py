"""The building blocks of the models as a forward pass runs them: linear layers, norms, token and
position embeddings. With several ranks:

    Linear      each rank has some of the outputs        x whole -> y in parts
    RowLinear   each rank has some of the inputs         x in parts -> a summand of y on each rank
    RMSNorm     adds the sum of the ranks' summands to the residual stream
    Embedding   each rank has some of the vocabulary

construction/layers.py builds them. Knows no file, no weight name and no attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

from ...kernels.kv.kv_blocks import rope_angles
from ...kernels.lora.lora import AddsAdapters, Place
from ...kernels.products.weights import Activations, Fp8Weight, Summand, Weight
from .communicator import Communicator, LayerOps
from .sharding import Outputs


@dataclass(eq=False)
class LinearBase:
    """One or several projections of the same input, merged into one product.

    `bias`: where the outputs are summands, only the first rank has it. LoRA reads `outputs`, the
    merged projections in the order of their rows, and `inputs`: (count on this rank, first, total).
    """

    weight: Weight
    bias: Tensor | None
    ops: LayerOps
    outputs: Sequence[Outputs]
    inputs: tuple[int, int, int]
    adapters: AddsAdapters | None = field(default=None, init=False)
    place: Place = field(init=False)  # of this product's adapter weights

    @property
    def fp8_weight(self) -> Fp8Weight | None:
        return self.weight if isinstance(self.weight, Fp8Weight) else None

    def product(self, x: Activations) -> Tensor:
        """This rank's result, without communication."""
        if self.adapters is not None and self.adapters.is_active:
            return self.adapters.add_to(lambda: self._linear(x), x, self.place)
        return self._linear(x)

    def _linear(self, x: Activations) -> Tensor:
        return self.ops.linear(x, self.weight, self.bias)


class Linear(LinearBase):
    """Each rank has all inputs and some of the outputs."""

    __call__ = LinearBase.product


class GatedLinear(LinearBase):
    """A Linear followed by SwiGLU: silu(first half of the outputs) * second half."""

    def __call__(self, x: Activations, reader: Fp8Weight | None = None) -> Activations:
        if self.adapters is not None and self.adapters.is_active:
            return self.adapters.add_to_gated(lambda: self._linear(x), x, self.place)
        return self.ops.gated_linear(x, self.weight, self.bias, reader)


class RowLinear(LinearBase):
    """Each rank has an equal part of the inputs: its outputs are summands."""

    def __call__(self, x: Activations) -> Summand:
        """The result must go to the next RMSNorm.add."""
        if self.adapters is not None and self.adapters.is_active:
            return self.product(x)
        return self.ops.summand(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class MLP:
    """The gated feed-forward layer. Each rank has an equal part of the inner dimension and returns
    a summand of the output."""

    gate_up: GatedLinear
    down: RowLinear

    def __call__(self, x: Activations) -> Summand:
        return self.down(self.gate_up(x, self.down.fp8_weight))


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Root mean square norm with a weight."""

    weight: Tensor
    eps: float
    ops: LayerOps

    def __call__(self, x: Tensor, reader: Fp8Weight | None = None) -> Activations:
        """`reader`: see Ops."""
        return self.ops.rms_norm(x, self.weight, self.eps, reader)

    def add(self, x: Summand, residual: Tensor, reader: Fp8Weight | None = None) -> Activations:
        """Add the sum of all ranks' x to `residual` in place; return the norm of the result."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps, reader)


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token ids to vectors, and as an LM head hidden states to logits.

    This rank's `weight` has the vectors of tokens [first, first + num_ids). All ranks have the same
    number of rows; on the last ones the rest is padding of zeros.
    """

    weight: Tensor
    first: int
    num_ids: int
    vocab_size: int
    ops: LayerOps
    communicator: Communicator

    def __call__(self, token_ids: Tensor) -> Tensor:
        if self.communicator.size == 1:
            return F.embedding(token_ids, self.weight)
        rows = token_ids - self.first
        is_elsewhere = (rows < 0) | (rows >= self.num_ids)
        vectors = F.embedding(rows.masked_fill_(is_elsewhere, 0), self.weight)
        return self.communicator.all_reduce(vectors.masked_fill_(is_elsewhere[:, None], 0))

    def project(self, x: Tensor) -> Tensor:
        """LM head: [rows, hidden] -> logits [rows, vocab], the same on all ranks."""
        return self.gather(self.project_part(x))

    def project_part(self, x: Tensor) -> Tensor:
        """This rank's logits, including padding: [rows, ceil(vocab / ranks)]."""
        return self.ops.linear(x, self.weight, None)

    def gather(self, parts: Tensor) -> Tensor:
        """Complete logits [rows, vocab] from each rank's `project_part`."""
        if self.communicator.size > 1:
            parts = self.communicator.all_gather(parts)
        return parts[:, : self.vocab_size]


@dataclass(frozen=True, slots=True)
class RotaryEmbedding:
    """Positions to the cos and sin that `kernels.kv.kv_blocks.apply_rope` takes, once per step.

    `inv_freq` [dim/2]; with `trained_length` a table with one row for each position beyond it, see
    rotary.py. `scale`: a factor of cos and sin.
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
