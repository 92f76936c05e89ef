"""Where a checkpoint's tensors go: a model's `targets` are views to fill, by name.

Merged projections hand out views into one matrix, so the loader knows nothing of merging.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ....kernels.experts.experts import Int4Experts
from ....kernels.products.int4_weights import Int4Weight
from .int4_layout import Int4


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

    tensor: Tensor | Int4Weight | Int4Experts
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
