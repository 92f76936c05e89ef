"""The building blocks of the models: weights and the products with them.

Each block names its weights as checkpoints do, by `targets()`: pairs of a checkpoint tensor's name
and the view of ours it goes to. Merged projections hand out views into one matrix, so the loader
knows nothing of merging. Where several ranks share a model:

    Linear      each rank has some of the outputs        x whole -> y in parts
    RowLinear   each rank has some of the inputs         x in parts -> a summand of y on each rank
    RMSNorm     adds up the ranks' summands, and both to the residual stream
    Embedding   each rank has some of the vocabulary

Knows no file and no attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.errors import StartupFailed
from ...kernels.experts.experts import ExpertWeights
from ...kernels.kv.kv_blocks import rope_angles
from ...kernels.layers.ops import Ops
from ...kernels.products.int4_weights import CHUNK, Int4Weight
from ...kernels.products.weights import (
    BLOCK,
    FP8,
    Activations,
    BlockScaled,
    Fp8Weight,
    RowScaled,
    Weight,
)
from .communicator import Communicator, Summand
from .int4.int4_layout import Int4
from .quantization import BLOCK_SCALED, GROUP_SCALED, Quantization
from .rope_config import DynamicScaling, LinearScaling, Llama3Scaling, RopeConfig, YarnScaling


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a checkpoint's tensor: from `start` on along `dim`, where that has `full`.

    `pieces`: that part of each of so many equal pieces of the dimension.
    """

    dim: int
    start: int
    full: int
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class Quantised:
    """How the weight of a target is quantised."""

    scaling: str  # as Quantization's
    scale_name: str | None  # of the checkpoint's tensor; None: quantised as it is loaded
    scale: Tensor | None  # as the weight's, to be filled; None: the target has none
    int4: Int4 | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint's tensor goes, or with `cut` as much of it as `tensor` has room for.

    One in int4 goes by the name that its weight has in floats, X.weight.
    """

    tensor: Tensor | Int4Weight
    cut: Cut | None = None
    quantised: Quantised | None = None

    @property
    def full_shape(self) -> tuple[int, ...]:
        """That of the checkpoint's tensor."""
        shape = list(self.tensor.shape)
        if self.cut is not None:
            shape[self.cut.dim] = self.cut.full
        return tuple(shape)

    def parts(self) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
        """Views of `tensor`, of floats, each with the slices of the checkpoint's tensor."""
        cut, tensor = self.cut, self.floats
        if cut is None:
            yield tensor, (slice(None),)
            return
        count = tensor.shape[cut.dim] // cut.pieces
        for piece in range(cut.pieces):
            start = piece * (cut.full // cut.pieces) + cut.start
            wanted = (*[slice(None)] * cut.dim, slice(start, start + count))
            yield tensor.narrow(cut.dim, piece * count, count), wanted

    @property
    def first(self) -> tuple[int, int]:
        """Of a matrix: where the part begins in the checkpoint's tensor."""
        if self.cut is None:
            return 0, 0
        return (self.cut.start, 0) if self.cut.dim == 0 else (0, self.cut.start)

    @property
    def floats(self) -> Tensor:
        """`tensor`, where it is not packed."""
        assert isinstance(self.tensor, Tensor)
        return self.tensor

    @property
    def int4(self) -> Int4 | None:
        return None if self.quantised is None else self.quantised.int4

    @property
    def nbytes(self) -> int:
        scale = None if self.quantised is None else self.quantised.scale
        return self.tensor.nbytes + (0 if scale is None else scale.nbytes)


class ProductAdapters(Protocol):
    """What a step's LoRA adapters add to one product; nothing where they are not `is_active`."""

    @property
    def is_active(self) -> bool: ...

    def add(self, product: Tensor, x: Activations) -> None: ...


Targets = Iterator[tuple[str, Target]]
Product = Callable[[Tensor], Activations]  # of inputs with a weight


@dataclass(frozen=True, slots=True)
class Placement:
    """Where weights lie, of what type they are, what computes with them, and with which ranks."""

    device: torch.device
    dtype: torch.dtype
    ops: Ops = field(default_factory=Ops)
    communicator: Communicator = field(default_factory=Communicator)
    has_expert_parallel: bool = False  # each rank has some experts whole
    quantization: Quantization | None = None
    stays_quantised: bool = False  # else quantised weights become `dtype` as they are loaded

    def vector(self, size: int) -> Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def matrix(self, num_outputs: int, num_inputs: int) -> Tensor:
        """An uninitialised weight [num_outputs, num_inputs].

        On a CPU it lies column by column: BLAS is then faster for few rows of input, and from two
        rows on sums each row in an order that does not depend on how many there are.
        """
        if self.device.type == "cpu":
            return torch.empty(num_inputs, num_outputs, dtype=self.dtype).t()
        return torch.empty(num_outputs, num_inputs, dtype=self.dtype, device=self.device)

    def _matrices(self, count: int, num_outputs: int, num_inputs: int) -> Tensor:
        """[count, num_outputs, num_inputs]: as many of `matrix`, behind each other."""
        if self.device.type == "cpu":
            return torch.empty(count, num_inputs, num_outputs, dtype=self.dtype).transpose(1, 2)
        return torch.empty(count, num_outputs, num_inputs, dtype=self.dtype, device=self.device)

    def weight(self, names: Sequence[str], num_outputs: int, num_inputs: int) -> Weight:
        """An uninitialised weight of the checkpoint's projections `names`, one behind the other."""
        scaling = self._scaling_of(names)
        if scaling is None or not self.stays_quantised:
            return self.matrix(num_outputs, num_inputs)
        if scaling == GROUP_SCALED:
            if num_inputs % CHUNK:  # in no kernel's layout
                return self.matrix(num_outputs, num_inputs)
            assert self.quantization is not None and self.quantization.int4 is not None
            group_size = self.quantization.int4.group_size or CHUNK
            return Int4Weight.empty(num_outputs, num_inputs, group_size, self.device)
        data = torch.empty(num_outputs, num_inputs, dtype=FP8, device=self.device)
        if scaling == BLOCK_SCALED:
            return BlockScaled(
                data, self._scales(-(-num_outputs // BLOCK), -(-num_inputs // BLOCK))
            )
        return RowScaled(data, self._scales(num_outputs))

    def expert_weights(
        self, names: Sequence[str], count: int, num_outputs: int, num_inputs: int
    ) -> ExpertWeights:
        """`count` uninitialised ones of the checkpoint's projections `names`, behind each other."""
        scaling = self._scaling_of(names)
        if scaling in (None, GROUP_SCALED) or not self.stays_quantised:
            return ExpertWeights(self._matrices(count, num_outputs, num_inputs))
        values = torch.empty(count, num_outputs, num_inputs, dtype=FP8, device=self.device)
        if scaling == BLOCK_SCALED:
            blocks = (-(-num_outputs // BLOCK), -(-num_inputs // BLOCK))
            return ExpertWeights(values, self._scales(count, *blocks))
        return ExpertWeights(values, self._scales(count, num_outputs))

    def merged_target(self, names: Sequence[str], weights: ExpertWeights, cut: Cut) -> Target:
        """All of `weights`, made for `names`, where one tensor of the checkpoint has them."""
        quantization = self.quantization
        if self._scaling_of(names) is None or quantization is None:
            return Target(weights.values, cut)
        if quantization.scale_suffix is not None:
            raise StartupFailed(
                f"{names[0]} and others are one tensor in FP8, which is not supported",
                hint="a checkpoint with a tensor for each expert is",
            )
        return Target(weights.values, cut, Quantised(quantization.scaling, None, weights.scale))

    def target(self, name: str, weight: Weight, cut: Cut, first: int, count: int) -> Target:
        """Rows [first, first + count) of `weight`, made for the checkpoint's projection `name`."""
        scaling, quantization = self._scaling_of([name]), self.quantization
        if scaling is None or quantization is None:
            assert isinstance(weight, Tensor)
            return Target(weight[first : first + count], cut)
        scale_name, int4 = quantization.scale_of(name), quantization.int4
        if isinstance(weight, Int4Weight):
            packed = weight.part(first, count)
            return Target(packed, cut, Quantised(scaling, scale_name, None, int4))
        if isinstance(weight, Tensor):
            scale, matrix = None, weight
        elif isinstance(weight, RowScaled):
            scale, matrix = weight.scale[first : first + count], weight.data
        else:
            if first % BLOCK or cut.start % BLOCK:
                raise StartupFailed(
                    f"{name}.weight: the scales are of blocks of {BLOCK}, and its part of the "
                    f"merged weight begins at {first}, in the checkpoint at {cut.start}",
                    hint="--dtype float32 dequantises it",
                )
            rows = slice(first // BLOCK, -(-(first + count) // BLOCK))
            scale, matrix = weight.scale[rows], weight.data
        quantised = Quantised(scaling, scale_name, scale, int4)
        return Target(matrix[first : first + count], cut, quantised)

    def _scaling_of(self, names: Sequence[str]) -> str | None:
        """None if the projections are not quantised."""
        covered = {self.quantization is not None and self.quantization.covers(n) for n in names}
        if len(covered) > 1:
            raise StartupFailed(
                f"only some of {', '.join(names)} are quantised, which is not supported"
            )
        return self.quantization.scaling if self.quantization and True in covered else None

    def _scales(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)


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


class Linear:
    """One or several projections of the same input, as one product.

    `outputs` are the checkpoint's projections in the order of their rows.
    """

    adapters: ProductAdapters | None = None

    def __init__(
        self,
        outputs: Sequence[Outputs],
        num_inputs: int,
        placement: Placement,
        *,
        has_bias: bool = False,
    ) -> None:
        self.outputs = outputs
        self.inputs = (num_inputs, 0, num_inputs)  # how many, the first, of how many
        self._placement, self._ops = placement, placement.ops
        num_outputs = sum(part.count for part in outputs)
        self.weight: Weight = placement.weight(
            [part.name for part in outputs], num_outputs, num_inputs
        )
        self.bias = placement.vector(num_outputs) if has_bias else None

    @property
    def fp8_weight(self) -> Fp8Weight | None:
        return self.weight if isinstance(self.weight, Fp8Weight) else None

    def __call__(self, x: Activations) -> Tensor:
        product = self._ops.linear(x, self.weight, self.bias)
        if self.adapters is not None and self.adapters.is_active:
            self.adapters.add(product, x)
        return product

    def gated(self, x: Activations, reader: Fp8Weight | None = None) -> Activations:
        """The first half of the outputs, by SiLU, times the second."""
        if self.adapters is not None and self.adapters.is_active:
            return self._ops.silu_and_mul(self(x))
        return self._ops.gated_linear(x, self.weight, self.bias, reader)

    def targets(self) -> Targets:
        first = 0
        for part in self.outputs:
            rows, cut = slice(first, first + part.count), Cut(0, part.first, part.full)
            target = self._placement.target(part.name, self.weight, cut, first, part.count)
            yield f"{part.name}.weight", target
            if self.bias is not None:
                yield f"{part.name}.bias", Target(self.bias[rows], cut)
            first += part.count


class FloatLinear(Linear):
    """One whose weight is a tensor: what is quantised in the checkpoint is dequantised."""

    weight: Tensor

    def __init__(self, outputs: Sequence[Outputs], num_inputs: int, placement: Placement) -> None:
        super().__init__(outputs, num_inputs, replace(placement, stays_quantised=False))


class RowLinear:
    """A projection of which each rank has an even part of the inputs: its outputs are summands."""

    adapters: ProductAdapters | None = None

    def __init__(
        self,
        name: str,
        num_outputs: int,
        num_inputs: int,
        placement: Placement,
        *,
        has_bias: bool = False,
    ) -> None:
        self._name = name
        self._placement, self._ops = placement, placement.ops
        self._communicator = communicator = placement.communicator
        width = num_inputs // communicator.size
        self.outputs = [Outputs.whole(name, num_outputs)]
        self.inputs = (width, communicator.rank * width, num_inputs)  # as Linear's
        self.weight = placement.weight([name], num_outputs, width)
        self.bias = placement.vector(num_outputs) if has_bias else None

    @property
    def fp8_weight(self) -> Fp8Weight | None:
        return self.weight if isinstance(self.weight, Fp8Weight) else None

    def __call__(self, x: Activations) -> Summand:
        """For the next RMSNorm.add."""
        if self.adapters is not None and self.adapters.is_active:
            return self.product(x)
        return self._communicator.linear(self._ops, x, self.weight, self._bias_of_rank)

    def product(self, x: Activations) -> Tensor:
        """The same, for whatever is to be made of it here."""
        product = self._ops.linear(x, self.weight, self._bias_of_rank)
        if self.adapters is not None and self.adapters.is_active:
            self.adapters.add(product, x)
        return product

    @property
    def _bias_of_rank(self) -> Tensor | None:
        return self.bias if self._communicator.rank == 0 else None  # added once

    def targets(self) -> Targets:
        num_outputs, (_, first, full) = self.weight.shape[0], self.inputs
        cut = Cut(1, first, full)
        target = self._placement.target(self._name, self.weight, cut, 0, num_outputs)
        yield f"{self._name}.weight", target
        if self.bias is not None:
            yield f"{self._name}.bias", Target(self.bias)


class RMSNorm:
    """Root mean square norm with a weight."""

    def __init__(self, name: str, size: int, eps: float, placement: Placement) -> None:
        self._name = name
        self._eps = eps
        self._ops = placement.ops
        self._communicator = placement.communicator
        self.weight = placement.vector(size)

    def __call__(self, x: Tensor, reader: Fp8Weight | None = None) -> Activations:
        """`reader`: see Ops."""
        return self._ops.rms_norm(x, self.weight, self._eps, reader)

    def add(self, x: Summand, residual: Tensor, reader: Fp8Weight | None = None) -> Activations:
        """Add all ranks' x to `residual` in place; the norm of the sum."""
        weight, eps = self.weight, self._eps
        return self._communicator.add_rms_norm(self._ops, x, residual, weight, eps, reader)

    def targets(self) -> Targets:
        yield f"{self._name}.weight", Target(self.weight)


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
        self._name = name
        self._is_head = is_head
        self._placement, self._ops = placement, placement.ops
        self._communicator = communicator = placement.communicator
        self._vocab_size = vocab_size
        num_rows = -(-vocab_size // communicator.size)
        self._first = min(communicator.rank * num_rows, vocab_size)
        self._num_ids = min(num_rows, vocab_size - self._first)
        self.weight = placement.matrix(num_rows, size)
        self.weight[self._num_ids :] = 0  # what is no token's must be a number all the same

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

    def targets(self) -> Targets:
        cut = Cut(0, self._first, self._vocab_size)
        if self._is_head:
            yield (
                f"{self._name}.weight",
                self._placement.target(self._name, self.weight, cut, 0, self._num_ids),
            )
        else:
            yield f"{self._name}.weight", Target(self.weight[: self._num_ids], cut)


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


def inv_freq(rope: RopeConfig, head_dim: int) -> Tensor:
    """The angle per position of each pair of dimensions, [head_dim / 2] float32.

    Not for DynamicScaling, which has one for each length.
    """
    plain: Tensor = 1.0 / (rope.theta ** _exponents(head_dim))
    match rope.scaling:
        case LinearScaling(factor):
            return plain / factor
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(plain, rope.theta, scaling)
    return plain


def dynamic_inv_freq(theta: float, scaling: DynamicScaling, head_dim: int) -> Tensor:
    """NTK-aware scaling: [1 + positions beyond the trained length, head_dim / 2] float32.

    Row 0 is for all positions within it. A position's base is that of a sequence which ends there:
    transformers' own, when it decodes token by token. (It computes a prompt beyond the trained
    length with the base of its end.) A table, because a vectorised power rounds by its place.
    """
    length, factor = scaling.max_position_embeddings, scaling.factor
    ends = torch.arange(length, int(length * factor) + 1, dtype=torch.float64)
    stretch = factor * ends / length - (factor - 1)
    bases = theta * stretch ** (head_dim / (head_dim - 2))
    return (1.0 / bases[:, None] ** _exponents(head_dim).double()).float()


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim


def _llama3(plain: Tensor, s: Llama3Scaling) -> Tensor:
    """Wavelengths above original / low_freq_factor are divided by `factor`, those below
    original / high_freq_factor stay, between the two it is interpolated (Llama 3.1)."""
    turns = s.original_max_position_embeddings * plain / (2 * math.pi)
    share = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    share = share.clamp(0, 1)  # 1: unchanged, 0: divided by the factor
    return (1 - share) * plain / s.factor + share * plain


def _yarn(plain: Tensor, theta: float, s: YarnScaling) -> Tensor:
    """NTK by parts (YaRN, section 3.2): pairs that turn more than `beta_fast` times within the
    trained length stay, those below `beta_slow` are divided, between the two by their number."""
    dim = 2 * len(plain)

    def pair_that_turns(times: float) -> float:
        length = s.original_max_position_embeddings
        return dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(s.beta_fast), pair_that_turns(s.beta_slow)
    if s.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    share = ((torch.arange(len(plain), dtype=torch.float32) - low) / width).clamp(0, 1)
    return (1 - share) * plain + share * plain / s.factor  # share 0: unchanged
