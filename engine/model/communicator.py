"""How the ranks of one engine add up and share tensors, as a small Protocol; and a rank alone.

A rank is one process with one device. All ranks call the same operations in the same order with
tensors of the same shapes, and every rank gets the same bits. Knows no model and no message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from ...kernels.layers.ops import Ops


@dataclass(frozen=True, slots=True)
class Sent:
    """A summand that lies no longer here, but where the ranks add it up."""


Summand: TypeAlias = Tensor | Sent


class Communicator(Protocol):
    """One rank's end. An operation that another rank never joins ends in RuntimeError, or never."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def connect(self) -> None:
        """Wait for the other ranks, however long they load; before the first operation."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x: x itself, overwritten, or a new tensor."""
        ...

    def linear(self, ops: Ops, x: Tensor, weight: Tensor, bias: Tensor | None) -> Summand:
        """`ops.linear`, for `add_rms_norm`, which must be the next operation."""
        ...

    def add_rms_norm(
        self, ops: Ops, x: Summand, residual: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        """`ops.add_rms_norm` of the sum of all ranks' x."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[rows, columns] -> [rows, size * columns]: the ranks' columns, in their order."""
        ...

    def broadcast(self, x: Tensor) -> None:
        """Overwrite x by rank 0's."""
        ...

    def least(self, value: int) -> int:
        """The smallest of all ranks' values."""
        ...

    def close(self) -> None:
        """Once the other ranks have ended, which may write to this one's memory until then."""
        ...


class Alone:
    """The only rank: nothing to add, to share or to wait for."""

    rank, size = 0, 1

    def connect(self) -> None: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def linear(self, ops: Ops, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return ops.linear(x, weight, bias)

    def add_rms_norm(
        self, ops: Ops, x: Summand, residual: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        assert isinstance(x, Tensor)
        return ops.add_rms_norm(x, residual, weight, eps)

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> None: ...

    def least(self, value: int) -> int:
        return value

    def close(self) -> None: ...
