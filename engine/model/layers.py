"""The building blocks of the models: products with weights, norms, embeddings of tokens and of
positions.

Each block names its weights as checkpoints do, in its placement's targets. Of several ranks:

    Linear      each rank has some of the outputs        x whole -> y in parts
    RowLinear   each rank has some of the inputs         x in parts -> a summand of y on each rank
    RMSNorm     adds up the ranks' summands, and both to the residual stream
    Embedding   each rank has some of the vocabulary

Knows no file and no attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.kv.kv_blocks import rope_angles
from ...kernels.lora.lora import Place
from ...kernels.products.weights import Activations, Fp8Weight, Weight
from .communicator import Communicator, Summand
from .rope_config import DynamicScaling, RopeConfig, YarnScaling
from .rotary import dynamic_inv_freq, inv_freq
from .weights.placement import Placement
from .weights.targets import Cut, Target


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

    @classmethod
    def whole(cls, name: str, full: int) -> Outputs:
        return cls(name, full, 0, full)

    @classmethod
    def of_rank(cls, name: str, full: int, communicator: Communicator) -> Outputs:
        """The rank's even part."""
        count = full // communicator.size
        return cls(name, count, communicator.rank * count, full)


class LinearBase:
    """One or several projections of the same input, as one product.

    `outputs` are the checkpoint's projections in the order of their rows; `inputs`: how many this
    rank has, the first, and of how many.
    """

    adapters: StepAdapters | None = None
    place: Place  # of theirs
    divides_inputs: ClassVar = False  # evenly among the ranks

    def __init__(
        self,
        outputs: Sequence[Outputs],
        num_inputs: int,
        placement: Placement,
        *,
        has_bias: bool = False,
    ) -> None:
        self._ops, self._communicator = placement.ops, placement.communicator
        rank, size = self._communicator.rank, self._communicator.size
        rank, size = (rank, size) if self.divides_inputs else (0, 1)
        width = num_inputs // size
        self.outputs, self.inputs = outputs, (width, rank * width, num_inputs)
        num_outputs, names = sum(part.count for part in outputs), [part.name for part in outputs]
        self.weight: Weight = placement.weight(names, num_outputs, width)
        self.bias = placement.vector(num_outputs) if has_bias else None
        self._added_bias = None if rank else self.bias  # of summands it is added once
        self._name_weights(placement)

    def _name_weights(self, placement: Placement) -> None:
        first, (num_inputs, *inputs_at) = 0, self.inputs
        for part in self.outputs:
            cut = of_weight = Cut(0, part.first, part.full)
            if num_inputs < inputs_at[1]:
                of_weight = Cut(1, *inputs_at)
            target = placement.target(part.name, self.weight, of_weight, first, part.count)
            placement.targets[f"{part.name}.weight"] = target
            if self.bias is not None:
                bias = Target(self.bias[first : first + part.count], cut)
                placement.targets[f"{part.name}.bias"] = bias
            first += part.count

    @property
    def fp8_weight(self) -> Fp8Weight | None:
        return self.weight if isinstance(self.weight, Fp8Weight) else None

    def product(self, x: Activations) -> Tensor:
        """What this rank computes of it."""
        if self.adapters is not None and self.adapters.is_active:
            return self.adapters.add_to(lambda: self._linear(x), x, self.place)
        return self._linear(x)

    def _linear(self, x: Activations) -> Tensor:
        return self._ops.linear(x, self.weight, self._added_bias)

    def alone(self, x: Tensor) -> Activations | Summand:
        """What a step computes of it on this rank, without the others."""
        return self.product(x)


class Linear(LinearBase):
    """Of which each rank has all inputs."""

    __call__ = LinearBase.product


class GatedLinear(LinearBase):
    """The same, of whose outputs the first half, by SiLU, gates the second."""

    def __call__(self, x: Activations, reader: Fp8Weight | None = None) -> Activations:
        if self.adapters is not None and self.adapters.is_active:
            return self.adapters.add_to_gated(lambda: self._linear(x), x, self.place)
        return self._ops.gated_linear(x, self.weight, self.bias, reader)

    def alone(self, x: Tensor) -> Activations:
        return self(x)


class FloatLinear(Linear):
    """One whose weight is a tensor: what is quantised in the checkpoint is dequantised."""

    weight: Tensor

    def __init__(self, outputs: Sequence[Outputs], num_inputs: int, placement: Placement) -> None:
        super().__init__(outputs, num_inputs, replace(placement, stays_quantised=False))


class RowLinear(LinearBase):
    """Of which each rank has an even part of the inputs: its outputs are summands."""

    divides_inputs = True

    def __call__(self, x: Activations) -> Summand:
        """For the next RMSNorm.add."""
        if self.adapters is not None and self.adapters.is_active:
            return self.product(x)
        return self._communicator.linear(self._ops, x, self.weight, self._added_bias)

    def alone(self, x: Tensor) -> Summand:
        return self(x) if self._communicator.size == 1 else self.product(x)


class MLP:
    """The gated feed-forward part. Each rank has an even part of the inner dimension, and gives a
    summand of the output."""

    def __init__(
        self, prefix: str, hidden: int, inner: int, placement: Placement, *, has_bias: bool = False
    ) -> None:
        names = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
        self.gate_up = GatedLinear(
            [Outputs.of_rank(name, inner, placement.communicator) for name in names],
            hidden,
            placement,
            has_bias=has_bias,
        )
        down = [Outputs.whole(f"{prefix}.down_proj", hidden)]
        self.down = RowLinear(down, inner, placement, has_bias=has_bias)

    def __call__(self, x: Activations) -> Summand:
        return self.down(self.gate_up(x, self.down.fp8_weight))

    def product(self, x: Tensor) -> Tensor:
        """The same: see RowLinear."""
        return self.down.product(self.gate_up(x, self.down.fp8_weight))


class RMSNorm:
    """Root mean square norm with a weight."""

    def __init__(self, name: str, size: int, eps: float, placement: Placement) -> None:
        self._eps = eps
        self._ops, self._communicator = placement.ops, placement.communicator
        self.weight = placement.vector(size)
        placement.targets[f"{name}.weight"] = Target(self.weight)

    def __call__(self, x: Tensor, reader: Fp8Weight | None = None) -> Activations:
        """`reader`: see Ops."""
        return self._ops.rms_norm(x, self.weight, self._eps, reader)

    def add(self, x: Summand, residual: Tensor, reader: Fp8Weight | None = None) -> Activations:
        """Add all ranks' x to `residual` in place; the norm of the sum."""
        weight, eps = self.weight, self._eps
        return self._communicator.add_rms_norm(self._ops, x, residual, weight, eps, reader)


class Embedding:
    """Token ids to vectors, and back to logits. Each rank has the same number of rows.

    An LM head that is quantised in the checkpoint becomes floats as it is loaded.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        size: int,
        placement: Placement,
        *,
        is_head: bool = False,
    ) -> None:
        self._ops = placement.ops
        self._communicator = communicator = placement.communicator
        self._vocab_size = vocab_size
        num_rows = -(-vocab_size // communicator.size)
        self._first = min(communicator.rank * num_rows, vocab_size)
        self._num_ids = min(num_rows, vocab_size - self._first)
        self.weight = placement.matrix(num_rows, size)
        self.weight[self._num_ids :] = 0  # what is no token's must be a number all the same
        cut = Cut(0, self._first, vocab_size)
        if is_head:
            target = placement.target(name, self.weight, cut, 0, self._num_ids)
        else:
            target = Target(self.weight[: self._num_ids], cut)
        placement.targets[f"{name}.weight"] = target

    def __call__(self, token_ids: Tensor) -> Tensor:
        if self._communicator.size == 1:
            return F.embedding(token_ids, self.weight)
        rows = token_ids - self._first
        is_elsewhere = (rows < 0) | (rows >= self._num_ids)
        vectors = F.embedding(rows.masked_fill_(is_elsewhere, 0), self.weight)
        return self._communicator.all_reduce(vectors.masked_fill_(is_elsewhere[:, None], 0))

    def project(self, x: Tensor) -> Tensor:
        """What an LM head computes: [rows, hidden] -> [rows, vocab], the same on all ranks."""
        return self.gather(self.project_part(x))

    def project_part(self, x: Tensor) -> Tensor:
        """Those with the vectors of this rank, and with padding: [rows, ceil(vocab / ranks)]."""
        return self._ops.linear(x, self.weight, None)

    def gather(self, parts: Tensor) -> Tensor:
        """What `project` gives, of rows of all ranks' `project_part`."""
        return self._communicator.all_gather(parts)[:, : self._vocab_size]


class RotaryEmbedding:
    """Positions to what `kernels.kv.kv_blocks.apply_rope` takes, once per step."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        scaling = rope.scaling
        self._trained_length: int | None = None
        if isinstance(scaling, DynamicScaling):
            self._trained_length = scaling.max_position_embeddings
            self._inv_freq = dynamic_inv_freq(rope.theta, scaling, head_dim).to(device)
        else:
            self._inv_freq = inv_freq(rope, head_dim).to(device)
        self._scale = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [tokens] -> cos and signed sin, [tokens, 1, dim] float32 each."""
        if self._trained_length is None:
            return rope_angles(positions, self._inv_freq, self._scale)
        rows = (positions + 1 - self._trained_length).clamp(min=0)
        return rope_angles(positions, self._inv_freq.index_select(0, rows))
