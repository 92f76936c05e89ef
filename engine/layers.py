"""The building blocks of the models: weights and the products with them.

Each block names its weights as checkpoints do, by `targets()`: pairs of a checkpoint tensor's name
and the view of ours it goes to. Merged projections hand out views into one matrix, so the loader
knows nothing of merging. Knows no file and no attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.ops import Ops, TorchOps

Target = tuple[str, Tensor]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where weights lie, of what type they are, and what computes with them."""

    device: torch.device
    dtype: torch.dtype
    ops: Ops = field(default_factory=TorchOps)

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


class Linear:
    """One or several projections of the same input, as one product.

    `outputs` are the checkpoint's projections in the order of their rows: name and rows.
    """

    def __init__(
        self,
        outputs: Sequence[tuple[str, int]],
        num_inputs: int,
        placement: Placement,
        *,
        has_bias: bool = False,
    ) -> None:
        self._outputs = outputs
        self._ops = placement.ops
        num_outputs = sum(size for _, size in outputs)
        self.weight = placement.matrix(num_outputs, num_inputs)
        self.bias = placement.vector(num_outputs) if has_bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self.weight, self.bias)

    def targets(self) -> Iterator[Target]:
        first = 0
        for name, size in self._outputs:
            yield f"{name}.weight", self.weight[first : first + size]
            if self.bias is not None:
                yield f"{name}.bias", self.bias[first : first + size]
            first += size


class RMSNorm:
    """Root mean square norm with a weight."""

    def __init__(self, name: str, size: int, eps: float, placement: Placement) -> None:
        self._name = name
        self._eps = eps
        self._ops = placement.ops
        self.weight = placement.vector(size)

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self.weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to `residual` in place; the norm of the sum."""
        return self._ops.add_rms_norm(x, residual, self.weight, self._eps)

    def targets(self) -> Iterator[Target]:
        yield f"{self._name}.weight", self.weight


class Embedding:
    """Token ids to vectors."""

    def __init__(self, name: str, vocab_size: int, size: int, placement: Placement) -> None:
        self._name = name
        self._ops = placement.ops
        self.weight = placement.matrix(vocab_size, size)

    def __call__(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)

    def project(self, x: Tensor) -> Tensor:
        """The products with every vector: what a tied LM head computes."""
        return self._ops.linear(x, self.weight, None)

    def targets(self) -> Iterator[Target]:
        yield f"{self._name}.weight", self.weight
