"""Where a checkpoint's tensors go: a model's `targets` are views to fill, by name.

Merged projections are views into one matrix, so the loader does not depend on merging.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ....kernels.experts.experts import Int4Experts
from ....kernels.products.int4_weights import Int4Weight
from .int4_layout import Int4


@dataclass(frozen=True, slots=True)
class TensorCut:
    """A part of a checkpoint's tensor: from `start` on along `dim`, whose full size is `full`.

    `pieces`: the dimension has that many equal pieces, and the part is taken of each.
    """

    dim: int
    start: int
    full: int
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class Quantised:
    """How the weight of a target is quantised."""

    scaling: str  # as in Quantization
    scale_name: str | None  # of the checkpoint's tensor; None: quantised while loading
    scale: Tensor | None  # to be filled with the weight's scales; None: the target has none
    int4: Int4 | None = None


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """The destination of a checkpoint's tensor, or with `cut` of a part of the size of `tensor`.

    An int4 target has the name of the weight in floats, X.weight.
    """

    tensor: Tensor | Int4Weight | Int4Experts
    cut: TensorCut | None = None
    quantised: Quantised | None = None

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""
        shape = list(self.tensor.shape)
        if self.cut is not None:
            shape[self.cut.dim] = self.cut.full
        return tuple(shape)

    def parts(self) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
        """Views of the float `tensor`, each with the slices of the checkpoint's tensor to copy."""
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
    def wanted(self) -> tuple[slice, slice]:
        """The rows and columns of the checkpoint's matrix that are the target's."""
        row, column = 0, 0
        if self.cut is not None:
            row, column = (self.cut.start, 0) if self.cut.dim == 0 else (0, self.cut.start)
        num_rows, width = self.tensor.shape
        return slice(row, row + num_rows), slice(column, column + width)

    @property
    def floats(self) -> Tensor:
        """`tensor` of a target that is not packed."""
        assert isinstance(self.tensor, Tensor)
        return self.tensor

    @property
    def int4(self) -> Int4 | None:
        return None if self.quantised is None else self.quantised.int4

    @property
    def nbytes(self) -> int:
        scale = None if self.quantised is None else self.quantised.scale
        return self.tensor.nbytes + (0 if scale is None else scale.nbytes)
