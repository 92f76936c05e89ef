"""How the ranks of one engine add up and share tensors.

A rank is one process with one device. All ranks call the same operations in the same order with
tensors of the same shapes, and every rank gets the same bits. In a pipeline these are the ranks of
one stage; the stages pass the residual stream on. Knows no model and no message.
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
    """A summand that lies no longer here, but where the ranks add it up."""


Summand: TypeAlias = Tensor | Unscaled | Summands | Sent


class Communicator:
    """One rank's end; this one is the only rank, which has nothing to add, to share or to wait for.

    An operation that another rank never joins ends in RuntimeError, or never.
    """

    rank: int = 0
    size: int = 1
    stages = Stages()  # those of the pipeline that this rank has a place in

    def connect(self) -> None:
        """Wait for the other ranks, however long they load; before the first operation."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x: x itself, overwritten, or a new tensor."""
        return x

    def linear(self, ops: Ops, x: Activations, weight: Weight, bias: Tensor | None) -> Summand:
        """`ops.linear`, for `add_rms_norm`, which must be the next operation."""
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
        """[rows, columns] -> [rows, size * columns]: the ranks' columns, in their order."""
        return x

    def broadcast(self, x: Tensor) -> None:
        """Overwrite x by rank 0's."""

    def least(self, value: int) -> int:
        """The smallest of all ranks' values."""
        return value

    def close(self) -> None:
        """Once the other ranks have ended, which may write to this one's memory until then."""
