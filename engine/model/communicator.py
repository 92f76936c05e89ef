"""Collective operations of the ranks of one engine.

A rank is one process with one device. All ranks call the same operations in the same order with
tensors of the same shapes, and all get bitwise identical results. In a pipeline the ranks are those
of one stage; `stages` connects it with the others. Knows no model and no message.
"""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

from ...kernels.layers.ops import Ops
from ...kernels.products.weights import Activations, Fp8Weight, Summand, Weight
from .stages import Stages


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

    def rank_ops(self, ops: Ops) -> LayerOps:
        """`ops` for this rank's part of the layers."""
        return ops if self.size == 1 else RankOps(ops, self)

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


class RankOps:
    """`ops` of one of several ranks. The results of `summand` and of experts are this rank's
    summands, which `add_rms_norm` adds up; it must be the next operation after `summand`."""

    def __init__(self, ops: Ops, communicator: Communicator) -> None:
        self._ops, self._communicator = ops, communicator
        self.linear, self.gated_linear, self.rms_norm = ops.linear, ops.gated_linear, ops.rms_norm
        self.experts = self.experts_summand = ops.experts

    def summand(self, x: Activations, weight: Weight, bias: Tensor | None) -> Summand:
        return self.linear(x, weight, bias)

    def add_rms_norm(
        self,
        x: Summand,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        reader: Fp8Weight | None = None,
    ) -> Activations:
        """`Ops.add_rms_norm` of the sum of all ranks' x."""
        assert isinstance(x, Tensor)
        summed = self._communicator.all_reduce(x)
        return self._ops.add_rms_norm(summed, residual, weight, eps, reader)


LayerOps: TypeAlias = Ops | RankOps
