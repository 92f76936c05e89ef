"""Builds the blocks of layers.py with uninitialised weights, and registers the weights in the
placement's `targets` under their checkpoint names. Knows no file and no layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from ..communicator import Communicator
from ..layers import MLP, Embedding, GatedLinear, LinearBase, RMSNorm, RowLinear
from ..sharding import Outputs
from ..weights.placement import Placement
from ..weights.targets import TensorCut, WeightTarget

L = TypeVar("L", bound=LinearBase)


def all_outputs(name: str, full: int) -> Outputs:
    return Outputs(name, full, 0, full)


def outputs_of_rank(name: str, full: int, communicator: Communicator) -> Outputs:
    """This rank's equal part of the outputs."""
    count = full // communicator.size
    return Outputs(name, count, communicator.rank * count, full)


def make_linear(
    kind: type[L],
    outputs: Sequence[Outputs],
    num_inputs: int,
    placement: Placement,
    *,
    has_bias: bool = False,
) -> L:
    """The projections `outputs` merged into one product. A RowLinear has an equal part of the
    `num_inputs` on each rank."""
    ranks = placement.communicator
    rank, size = (ranks.rank, ranks.size) if issubclass(kind, RowLinear) else (0, 1)
    width = num_inputs // size
    num_outputs, names = sum(part.count for part in outputs), [part.name for part in outputs]
    weight = placement.weight(names, num_outputs, width)
    bias = placement.vector(num_outputs) if has_bias else None
    first = 0
    for part in outputs:
        cut = TensorCut(0, part.first, part.full)
        of_weight = cut if size == 1 else TensorCut(1, rank * width, num_inputs)
        target = placement.target(part.name, weight, of_weight, first, part.count)
        placement.targets[f"{part.name}.weight"] = target
        if bias is not None:
            of_bias = WeightTarget(bias[first : first + part.count], cut)
            placement.targets[f"{part.name}.bias"] = of_bias
        first += part.count
    added_bias = None if rank else bias  # the ranks' summands add up: only one has the bias
    inputs = (width, rank * width, num_inputs)
    return kind(weight, added_bias, placement.ops, outputs, inputs)


def make_float_weight(name: str, num_outputs: int, num_inputs: int, placement: Placement) -> Tensor:
    """A weight that is whole on every rank, dequantised if quantised in the checkpoint."""
    floats = replace(placement, stays_quantised=False)
    weight = floats.weight([name], num_outputs, num_inputs)
    assert isinstance(weight, Tensor)
    target = floats.target(name, weight, TensorCut(0, 0, num_outputs), 0, num_outputs)
    placement.targets[f"{name}.weight"] = target
    return weight


def make_mlp(
    prefix: str, hidden: int, inner: int, placement: Placement, *, has_bias: bool = False
) -> MLP:
    names = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
    gate_up = [outputs_of_rank(name, inner, placement.communicator) for name in names]
    down = [all_outputs(f"{prefix}.down_proj", hidden)]
    return MLP(
        make_linear(GatedLinear, gate_up, hidden, placement, has_bias=has_bias),
        make_linear(RowLinear, down, inner, placement, has_bias=has_bias),
    )


def make_norm(name: str, size: int, eps: float, placement: Placement) -> RMSNorm:
    weight = placement.vector(size)
    placement.targets[f"{name}.weight"] = WeightTarget(weight)
    return RMSNorm(weight, eps, placement.ops)


def make_embedding(
    name: str, vocab_size: int, size: int, placement: Placement, *, is_head: bool = False
) -> Embedding:
    """`is_head`: an LM head, which is dequantised while loading if quantised in the checkpoint."""
    communicator = placement.communicator
    num_rows = -(-vocab_size // communicator.size)
    first = min(communicator.rank * num_rows, vocab_size)
    num_ids = min(num_rows, vocab_size - first)
    weight = placement.matrix(num_rows, size)
    weight[num_ids:] = 0  # padding must not be NaN
    cut = TensorCut(0, first, vocab_size)
    if is_head:
        target = placement.target(name, weight, cut, 0, num_ids)
    else:
        target = WeightTarget(weight[:num_ids], cut)
    placement.targets[f"{name}.weight"] = target
    return Embedding(weight, first, num_ids, vocab_size, placement.ops, communicator)
