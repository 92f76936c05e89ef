"""The layout of an adapter's matrices in a row of the bank (kernels/lora/lora.py), by name.

Built from the model's projections: a rank has the part of A or B for its part of the weight, a
pipeline stage the adapters of its layers. Knows no file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ...kernels.lora.lora import Place
from ..model.decoder import Decoder
from ..model.layers import MLP, LinearBase
from ..model.stages import LayerRange

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class RowPart:
    """Elements [first, first + count) of `full`, stored from position `at` of a row."""

    at: int
    first: int
    count: int
    full: int


@dataclass(frozen=True, slots=True)
class Projection:
    """A projection of the checkpoint: A is [rank, inputs.full], B [outputs.full, rank]."""

    inputs: RowPart
    outputs: RowPart


@dataclass(slots=True)
class AdapterLayout:
    """The layout of one rank. `products`: each layer product, and the place of its adapters."""

    projections: dict[str, Projection] = field(default_factory=dict)
    products: list[tuple[LinearBase, Place]] = field(default_factory=list)
    row_size: int = 0
    has_experts: bool = False
    layers: LayerRange | None = None  # of this pipeline stage

    @classmethod
    def of(cls, model: Decoder) -> AdapterLayout:
        layout = cls(layers=model.range)
        for layer in model.layers:
            for linear in layer.linears:
                layout._add(linear)
        layout.has_experts = any(not isinstance(layer.mlp, MLP) for layer in model.layers)
        return layout

    def is_elsewhere(self, module: str) -> bool:
        """Whether the module belongs to a layer of another stage, which checks and reads it."""
        layers, match = self.layers, _LAYER.match(module)
        if layers is None or match is None:
            return False
        index = int(match[1])
        return index < layers.num_layers and not layers.first <= index < layers.end

    def _add(self, product: LinearBase) -> None:
        outputs = product.outputs
        num_inputs, first_input, full_inputs = product.inputs
        inputs_at = self.row_size
        outputs_at = at = inputs_at + len(outputs) * num_inputs
        for index, part in enumerate(outputs):
            self.projections[part.name] = Projection(
                RowPart(inputs_at + index * num_inputs, first_input, num_inputs, full_inputs),
                RowPart(at, part.first, part.count, part.full),
            )
            at += part.count
        self.row_size = at
        counts = tuple(part.count for part in outputs)
        self.products.append((product, Place(inputs_at, outputs_at, num_inputs, counts)))
