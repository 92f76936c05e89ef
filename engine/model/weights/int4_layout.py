"""The layouts of int4 weights in checkpoints: the tensors of a projection, and their shapes.

    layout        numbers               zeros                  scales             others
    gptq          qweight [in/8, out]   qzeros [groups, out/8] scales [groups, out]  g_idx [in]
    awq           qweight [in, out/8]   qzeros [groups, out/8] scales [groups, out]
    compressed    weight_packed         weight_zero_point      weight_scale       weight_shape,
                  [out, in/8]           [out/8, groups]        [out, groups]      weight_g_idx

Words of 32 bits hold eight numbers or zeros, the first in the lowest bits; awq has another order.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

NUMBERS_OF_WORD = 8
_IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the position in a word of its n-th number
_GROUP = 0  # stands for the group size


@dataclass(frozen=True, slots=True)
class Piece:
    """One of the matrices of a weight."""

    suffix: str  # after the projection's name
    inputs: int  # that one element covers
    outputs: int
    has_outputs_first: bool = False  # [outputs, inputs], else [inputs, outputs]
    order: tuple[int, ...] = _IN_ORDER

    def shape(self, outputs: int, inputs: int, group_size: int | None) -> tuple[int, int]:
        """The matrix's shape for a weight of `outputs` and `inputs`."""
        sizes = (outputs // self.outputs, inputs // (self.inputs or group_size or inputs))
        return sizes if self.has_outputs_first else (sizes[1], sizes[0])

    def part(self, outputs: slice, inputs: slice, group_size: int | None) -> tuple[slice, slice]:
        """The slices with these outputs, in whole words, and inputs, multiples of `Int4.unit`."""
        each = self.inputs or group_size
        if each is None:
            columns = slice(0, 1)
        else:
            columns = slice(inputs.start // each, -(-inputs.stop // each))
        rows = slice(outputs.start // self.outputs, -(-outputs.stop // self.outputs))
        return (rows, columns) if self.has_outputs_first else (columns, rows)


@dataclass(frozen=True, slots=True)
class Int4Layout:
    """The tensors of a projection in the checkpoints of one format."""

    numbers: Piece
    zeros: Piece
    scales: Piece
    order: str | None = None  # suffix of the tensor with the group of each input
    shape: str | None = None  # suffix of the tensor [outputs, inputs]
    has_spare_biases: bool = False  # biases of zeros where the architecture has none

    @property
    def besides(self) -> tuple[str, ...]:
        """Suffixes of the tensors other than `numbers`."""
        named = (self.zeros.suffix, self.scales.suffix, self.order, self.shape)
        return tuple(suffix for suffix in named if suffix is not None)


LAYOUTS = {
    "gptq": Int4Layout(
        Piece(".qweight", NUMBERS_OF_WORD, 1),
        Piece(".qzeros", _GROUP, NUMBERS_OF_WORD),
        Piece(".scales", _GROUP, 1),
        order=".g_idx",
        has_spare_biases=True,
    ),
    "awq": Int4Layout(
        Piece(".qweight", 1, NUMBERS_OF_WORD, order=_AWQ_ORDER),
        Piece(".qzeros", _GROUP, NUMBERS_OF_WORD, order=_AWQ_ORDER),
        Piece(".scales", _GROUP, 1),
    ),
    "compressed": Int4Layout(
        Piece(".weight_packed", NUMBERS_OF_WORD, 1, has_outputs_first=True),
        Piece(".weight_zero_point", _GROUP, NUMBERS_OF_WORD, has_outputs_first=True),
        Piece(".weight_scale", _GROUP, 1, has_outputs_first=True),
        order=".weight_g_idx",
        shape=".weight_shape",
    ),
}


@dataclass(frozen=True, slots=True)
class Int4:
    """How the weights of a model are quantised to four bits."""

    group_size: int | None  # inputs that share a scale; None: all inputs
    layout_name: str | None = None  # of LAYOUTS; None: quantised while loading
    has_zeros: bool = False  # in the checkpoint, else all are 8
    zero_offset: int = 0  # added to the zeros of the checkpoint
    is_ordered: bool = False  # groups of inputs in any order: the checkpoint must have `order`

    @property
    def layout(self) -> Int4Layout:
        assert self.layout_name is not None
        return LAYOUTS[self.layout_name]

    @property
    def unit(self) -> int:
        """The inputs of a rank's part must be a multiple of this."""
        return self.group_size or NUMBERS_OF_WORD

    @property
    def pieces(self) -> Iterator[Piece]:
        """The matrices that a checkpoint must have."""
        layout = self.layout
        yield from (layout.numbers, layout.scales)
        if self.has_zeros:
            yield layout.zeros
