"""The gated feed-forward part of a layer."""

from __future__ import annotations

from torch import Tensor

from ...kernels.products.weights import Activations
from .communicator import Summand
from .layers import Linear, Outputs, Placement, Product, RowLinear, Targets


class MLP:
    """The gated feed-forward part. Each rank has an even part of the inner dimension, and gives a
    summand of the output."""

    def __init__(
        self, prefix: str, hidden: int, inner: int, placement: Placement, *, has_bias: bool = False
    ) -> None:
        names = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
        self.gate_up = Linear(
            [Outputs.of_rank(name, inner, placement.communicator) for name in names],
            hidden,
            placement,
            has_bias=has_bias,
        )
        self.down = RowLinear(f"{prefix}.down_proj", hidden, inner, placement, has_bias=has_bias)

    def __call__(self, x: Activations) -> Summand:
        return self.down(self.gate_up.gated(x, self.down.fp8_weight))

    def product(self, x: Tensor) -> Tensor:
        """The same: see RowLinear."""
        return self.down.product(self.gate_up.gated(x, self.down.fp8_weight))

    def products(self) -> list[tuple[int, Product]]:
        """See DecoderLayer."""
        return [
            (self.gate_up.weight.shape[1], self.gate_up.gated),
            (self.down.weight.shape[1], self.down.product),
        ]

    def targets(self) -> Targets:
        yield from self.gate_up.targets()
        yield from self.down.targets()
