"""How weights of four bits lie in checkpoints: which tensors a projection has, and what of.

    layout        numbers               zeros                  scales             besides
    gptq          qweight [in/8, out]   qzeros [groups, out/8] scales [groups, out]  g_idx [in]
    awq           qweight [in, out/8]   qzeros [groups, out/8] scales [groups, out]
    compressed    weight_packed         weight_zero_point      weight_scale       weight_shape,
                  [out, in/8]           [out/8, groups]        [out, groups]      weight_g_idx

Numbers and zeros are eight to a word of 32 bits, the first in the lowest bits, but for awq's order.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

NUMBERS_OF_WORD = 8
_IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the n-th number of a word is
_GROUP = 0  # in place of a number: as many as a group has


@dataclass(frozen=True, slots=True)
class Piece:
    """One of the matrices that a weight consists of."""

    suffix: str  # behind the projection's name
    inputs: int  # of an element
    outputs: int
    has_outputs_first: bool = False  # [outputs, inputs], else [inputs, outputs]
    order: tuple[int, ...] = _IN_ORDER

    def shape(self, outputs: int, inputs: int, group_size: int | None) -> tuple[int, int]:
        """Of a weight of so many."""
        sizes = (outputs // self.outputs, inputs // (self.inputs or group_size or inputs))
        return sizes if self.has_outputs_first else (sizes[1], sizes[0])

    def part(self, outputs: slice, inputs: slice, group_size: int | None) -> tuple[slice, slice]:
        """What has these outputs, in whole words, and these inputs, which `unit` divides."""
        each = self.inputs or group_size
        if each is None:
            columns = slice(0, 1)
        else:
            columns = slice(inputs.start // each, -(-inputs.stop // each))
        rows = slice(outputs.start // self.outputs, -(-outputs.stop // self.outputs))
        return (rows, columns) if self.has_outputs_first else (columns, rows)


@dataclass(frozen=True, slots=True)
class Layout:
    """Of a format's checkpoints."""

    numbers: Piece
    zeros: Piece
    scales: Piece
    order: str | None = None  # suffix: the group of each input
    shape: str | None = None  # suffix: outputs and inputs
    has_spare_biases: bool = False  # of zeros, where the architecture has none

    @property
    def besides(self) -> tuple[str, ...]:
        """Suffixes of what has no numbers."""
        named = (self.zeros.suffix, self.scales.suffix, self.order, self.shape)
        return tuple(suffix for suffix in named if suffix is not None)


LAYOUTS = {
    "gptq": Layout(
        Piece(".qweight", NUMBERS_OF_WORD, 1),
        Piece(".qzeros", _GROUP, NUMBERS_OF_WORD),
        Piece(".scales", _GROUP, 1),
        order=".g_idx",
        has_spare_biases=True,
    ),
    "awq": Layout(
        Piece(".qweight", 1, NUMBERS_OF_WORD, order=_AWQ_ORDER),
        Piece(".qzeros", _GROUP, NUMBERS_OF_WORD, order=_AWQ_ORDER),
        Piece(".scales", _GROUP, 1),
    ),
    "compressed": Layout(
        Piece(".weight_packed", NUMBERS_OF_WORD, 1, has_outputs_first=True),
        Piece(".weight_zero_point", _GROUP, NUMBERS_OF_WORD, has_outputs_first=True),
        Piece(".weight_scale", _GROUP, 1, has_outputs_first=True),
        order=".weight_g_idx",
        shape=".weight_shape",
    ),
}


@dataclass(frozen=True, slots=True)
class Int4:
    """How the weights of a model are quantised in four bits."""

    group_size: int | None  # inputs that share a scale; None: all of an output
    layout_name: str | None = None  # of LAYOUTS; None: quantised as they are loaded
    has_zeros: bool = False  # in the checkpoint, else all are 8
    zero_offset: int = 0  # what zeros are above those in the checkpoint
    is_ordered: bool = False  # groups may be of inputs in any order: the checkpoint must name them

    @property
    def layout(self) -> Layout:
        assert self.layout_name is not None
        return LAYOUTS[self.layout_name]

    @property
    def unit(self) -> int:
        """What divides the inputs of a part."""
        return self.group_size or NUMBERS_OF_WORD

    @property
    def pieces(self) -> Iterator[Piece]:
        """That must be there."""
        layout = self.layout
        yield from (layout.numbers, layout.scales)
        if self.has_zeros:
            yield layout.zeros
