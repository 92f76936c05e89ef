"""Where a model's weights lie and of what type they are: makes them, to be filled by a loader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ....core.errors import StartupFailed
from ....kernels.experts.experts import ExpertWeights, Int4Experts, StackedWeights
from ....kernels.layers.ops import Ops
from ....kernels.products.int4_weights import CHUNK, Int4Weight
from ....kernels.products.weights import BLOCK, FP8, BlockScaled, RowScaled, Weight
from ..communicator import Communicator
from ..quantization import BLOCK_SCALED, GROUP_SCALED, Quantization, experts_stay_packed
from .targets import Cut, Quantised, Target


@dataclass(frozen=True, slots=True)
class Placement:
    """Where weights lie, of what type they are, what computes with them, and with which ranks.

    K and V lie behind `layers_in_front` of a pool that has `pool_kv_heads` on this rank. None: as
    many as the model; with a multiple each of its heads is there several times.

    `targets`: what a checkpoint has to fill of all that was made here. `has_merged_experts`: it has
    those of a layer as one tensor, as transformers 5 writes them.
    """

    device: torch.device
    dtype: torch.dtype
    ops: Ops = field(default_factory=Ops)
    communicator: Communicator = field(default_factory=Communicator)
    has_expert_parallel: bool = False  # each rank has some experts whole
    quantization: Quantization | None = None
    stays_quantised: bool = False  # else quantised weights become `dtype` as they are loaded
    layers_in_front: int = 0  # of another model
    pool_kv_heads: int | None = None
    has_merged_experts: bool = False
    targets: dict[str, Target] = field(default_factory=dict)

    def of_model(self) -> Placement:
        """The same, with targets of its own."""
        return replace(self, targets={})

    def vector(self, size: int) -> Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def matrix(self, num_outputs: int, num_inputs: int) -> Tensor:
        """An uninitialised weight [num_outputs, num_inputs].

        On a CPU it lies column by column: BLAS is then faster for few rows of input, and from two
        rows on sums each row in an order that does not depend on how many there are.
        """
        if self.device.type == "cpu":
            return torch.empty(num_inputs, num_outputs, dtype=self.dtype).t()
        return torch.empty(num_outputs, num_inputs, dtype=self.dtype, device=self.device)

    def _matrices(self, count: int, num_outputs: int, num_inputs: int) -> Tensor:
        """[count, num_outputs, num_inputs]: as many of `matrix`, behind each other."""
        if self.device.type == "cpu":
            return torch.empty(count, num_inputs, num_outputs, dtype=self.dtype).transpose(1, 2)
        return torch.empty(count, num_outputs, num_inputs, dtype=self.dtype, device=self.device)

    def weight(self, names: Sequence[str], num_outputs: int, num_inputs: int) -> Weight:
        """An uninitialised weight of the checkpoint's projections `names`, one behind the other."""
        scaling = self._scaling_of(names)
        if scaling is None or not self.stays_quantised:
            return self.matrix(num_outputs, num_inputs)
        if scaling == GROUP_SCALED:
            if num_inputs % CHUNK:  # in no kernel's layout
                return self.matrix(num_outputs, num_inputs)
            return Int4Weight.empty(num_outputs, num_inputs, self._group_size, self.device)
        data = torch.empty(num_outputs, num_inputs, dtype=FP8, device=self.device)
        if scaling == BLOCK_SCALED:
            return BlockScaled(
                data, self._scales(-(-num_outputs // BLOCK), -(-num_inputs // BLOCK))
            )
        return RowScaled(data, self._scales(num_outputs))

    def expert_weights(
        self,
        gate_up_names: Sequence[str],
        down_names: Sequence[str],
        count: int,
        hidden: int,
        inner: int,
    ) -> tuple[StackedWeights, StackedWeights]:
        """(gate_up, down) of `count` experts, uninitialised, of the checkpoint's projections.

        In int4 both stay packed, or none does.
        """
        of_both = self._scaling_of(gate_up_names), self._scaling_of(down_names)
        sizes = ((count, 2 * inner, hidden), (count, hidden, inner))
        is_int4 = of_both == (GROUP_SCALED, GROUP_SCALED) and self.stays_quantised
        if is_int4 and experts_stay_packed(hidden, inner):
            return (
                Int4Experts.empty(*sizes[0], self._group_size, self.device),
                Int4Experts.empty(*sizes[1], self._group_size, self.device),
            )
        return (
            self._expert_weights(of_both[0], *sizes[0]),
            self._expert_weights(of_both[1], *sizes[1]),
        )

    def _expert_weights(
        self, scaling: str | None, count: int, num_outputs: int, num_inputs: int
    ) -> ExpertWeights:
        if scaling in (None, GROUP_SCALED) or not self.stays_quantised:
            return ExpertWeights(self._matrices(count, num_outputs, num_inputs))
        values = torch.empty(count, num_outputs, num_inputs, dtype=FP8, device=self.device)
        if scaling == BLOCK_SCALED:
            blocks = (-(-num_outputs // BLOCK), -(-num_inputs // BLOCK))
            return ExpertWeights(values, self._scales(count, *blocks))
        return ExpertWeights(values, self._scales(count, num_outputs))

    def merged_target(self, names: Sequence[str], weights: StackedWeights, cut: Cut) -> Target:
        """All of `weights`, made for `names`, where one tensor of the checkpoint has them."""
        matrices: Tensor | Int4Experts
        if isinstance(weights, Int4Experts):
            matrices, scale = weights, None
        else:
            matrices, scale = weights.values, weights.scale
        quantization = self.quantization
        if self._scaling_of(names) is None or quantization is None:
            return Target(matrices, cut)
        if quantization.scale_suffix is not None:
            raise StartupFailed(
                f"{names[0]} and others are one tensor, and quantised, which is not supported",
                hint="a checkpoint with a tensor for each expert is",
            )
        quantised = Quantised(quantization.scaling, None, scale, quantization.int4)
        return Target(matrices, cut, quantised)

    def target(self, name: str, weight: Weight, cut: Cut, first: int, count: int) -> Target:
        """Rows [first, first + count) of `weight`, made for the checkpoint's projection `name`."""
        scaling, quantization = self._scaling_of([name]), self.quantization
        if scaling is None or quantization is None:
            assert isinstance(weight, Tensor)
            return Target(weight[first : first + count], cut)
        scale_name, int4 = quantization.scale_of(name), quantization.int4
        if isinstance(weight, Int4Weight):
            packed = weight.part(first, count)
            return Target(packed, cut, Quantised(scaling, scale_name, None, int4))
        if isinstance(weight, Tensor):
            scale, matrix = None, weight
        elif isinstance(weight, RowScaled):
            scale, matrix = weight.scale[first : first + count], weight.data
        else:
            if first % BLOCK or cut.start % BLOCK:
                raise StartupFailed(
                    f"{name}.weight: the scales are of blocks of {BLOCK}, and its part of the "
                    f"merged weight begins at {first}, in the checkpoint at {cut.start}",
                    hint="--dtype float32 dequantises it",
                )
            rows = slice(first // BLOCK, -(-(first + count) // BLOCK))
            scale, matrix = weight.scale[rows], weight.data
        quantised = Quantised(scaling, scale_name, scale, int4)
        return Target(matrix[first : first + count], cut, quantised)

    def _scaling_of(self, names: Sequence[str]) -> str | None:
        """None if the projections are not quantised."""
        covered = {self.quantization is not None and self.quantization.covers(n) for n in names}
        if len(covered) > 1:
            raise StartupFailed(
                f"only some of {', '.join(names)} are quantised, which is not supported"
            )
        return self.quantization.scaling if self.quantization and True in covered else None

    @property
    def _group_size(self) -> int:
        """Of weights in int4 that stay packed."""
        assert self.quantization is not None and self.quantization.int4 is not None
        return self.quantization.int4.group_size or CHUNK

    def _scales(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)
