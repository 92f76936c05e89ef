"""Collective operations of the ranks of one engine.

A rank is one process with one device. All ranks call the same operations in the same order with
tensors of the same shapes, and all get bitwise identical results. In a pipeline the ranks are those
of one stage; `stages` connects it with the others. Knows no model and no message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from ...kernels.layers.ops import Ops
from ...kernels.products.weights import Activations, Fp8Weight, Summands, Unscaled, Weight
from .stages import Stages


@dataclass(frozen=True, slots=True)
class Sent:
    """A summand that has already been written to the memory where the ranks add it up."""


Summand: TypeAlias = Tensor | Unscaled | Summands | Sent


class Communicator:
    """One rank's end. This base class is for an engine (or stage) of one rank, where collectives do
    nothing.

    An operation that another rank never joins raises RuntimeError, or never returns.
    """

    rank: int = 0
    size: int = 1
    stages = Stages()  # this rank's place in the pipeline

    def connect(self) -> None:
        """Wait until all ranks have loaded. Call before the first operation."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x: in place, or a new tensor."""
        return x

    def linear(self, ops: Ops, x: Activations, weight: Weight, bias: Tensor | None) -> Summand:
        """`ops.linear`; its result may only go to `add_rms_norm`, as the next operation."""
        return (ops.summand if self.size == 1 else ops.linear)(x, weight, bias)

    def add_rms_norm(
        self,
        ops: Ops,
        x: Summand,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        reader: Fp8Weight | None = None,
    ) -> Activations:
        """`ops.add_rms_norm` of the sum of all ranks' x."""
        assert not isinstance(x, Sent)
        summed = self.all_reduce(x) if isinstance(x, Tensor) else x
        return ops.add_rms_norm(summed, residual, weight, eps, reader)

    def all_gather(self, x: Tensor) -> Tensor:
        """[rows, columns] -> [rows, size * columns]: the columns in rank order."""
        return x

    def broadcast(self, x: Tensor) -> None:
        """Overwrite x with rank 0's."""

    def least(self, value: int) -> int:
        """The smallest of all ranks' values."""
        return value

    def close(self) -> None:
        """Call after the other ranks have ended: until then they may write to our memory."""
