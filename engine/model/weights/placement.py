"""Allocates a model's weights, of the right type on the right device, for a loader to fill."""

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
from ..communicator import Communicator, LayerOps
from ..quantization import BLOCK_SCALED, GROUP_SCALED, Quantization, experts_stay_packed
from .targets import Quantised, TensorCut, WeightTarget


@dataclass(frozen=True, slots=True)
class Placement:
    """The device and type of weights, and the ops and ranks that compute with them.

    K and V come after `layers_in_front` layers of a pool with `pool_kv_heads` on this rank; None:
    as many as the model has. With a multiple, the pool holds several copies of each KV head.

    `targets`: all tensors made here that a checkpoint must fill. `has_merged_experts`: the
    checkpoint stores all experts of a layer in one tensor, as transformers 5 does.
    """

    device: torch.device
    dtype: torch.dtype
    ops: LayerOps = field(default_factory=Ops)
    communicator: Communicator = field(default_factory=Communicator)
    has_expert_parallel: bool = False  # each rank has some whole experts
    quantization: Quantization | None = None
    stays_quantised: bool = False  # else weights are dequantised to `dtype` while loading
    layers_in_front: int = 0  # layers of another model in the pool
    pool_kv_heads: int | None = None
    has_merged_experts: bool = False
    targets: dict[str, WeightTarget] = field(default_factory=dict)

    def of_model(self) -> Placement:
        """A copy with its own, empty targets."""
        return replace(self, targets={})

    def vector(self, size: int) -> Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def matrix(self, *shape: int) -> Tensor:
        """An uninitialised weight of `shape` [num_outputs, num_inputs], or several stacked.

        Column-major on a CPU: BLAS is then faster for few input rows, and for two or more rows the
        order of a row's sum does not depend on the number of rows.
        """
        *count, num_outputs, num_inputs = shape
        if self.device.type == "cpu":
            return torch.empty(*count, num_inputs, num_outputs, dtype=self.dtype).mT
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _fp8(self, scaling: str, *shape: int) -> tuple[Tensor, Tensor]:
        """Uninitialised FP8 weights of `shape`, as of `matrix`, and their scales."""
        *count, num_outputs, num_inputs = shape
        scales = [*count, num_outputs]
        if scaling == BLOCK_SCALED:
            scales = [*count, -(-num_outputs // BLOCK), -(-num_inputs // BLOCK)]
        data = torch.empty(shape, dtype=FP8, device=self.device)
        return data, torch.empty(scales, dtype=torch.float32, device=self.device)

    def weight(self, names: Sequence[str], num_outputs: int, num_inputs: int) -> Weight:
        """An uninitialised weight of the checkpoint's projections `names`, stacked by outputs."""
        scaling = self._scaling_of(names)
        if scaling is None or not self.stays_quantised:
            return self.matrix(num_outputs, num_inputs)
        if scaling == GROUP_SCALED:
            if num_inputs % CHUNK:  # no kernel has a layout for it
                return self.matrix(num_outputs, num_inputs)
            return Int4Weight.empty(num_outputs, num_inputs, self._group_size, self.device)
        kind = BlockScaled if scaling == BLOCK_SCALED else RowScaled
        return kind(*self._fp8(scaling, num_outputs, num_inputs))

    def expert_weights(
        self,
        gate_up_names: Sequence[str],
        down_names: Sequence[str],
        count: int,
        hidden: int,
        inner: int,
    ) -> tuple[StackedWeights, StackedWeights]:
        """Uninitialised weights (gate_up, down) of `count` experts, by checkpoint projections.

        In int4 either both stay packed or neither.
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

    def _expert_weights(self, scaling: str | None, *shape: int) -> ExpertWeights:
        if scaling in (None, GROUP_SCALED) or not self.stays_quantised:
            return ExpertWeights(self.matrix(*shape))
        return ExpertWeights(*self._fp8(scaling, *shape))

    def merged_target(
        self, names: Sequence[str], weights: StackedWeights, cut: TensorCut
    ) -> WeightTarget:
        """The target for all of `weights`, of projections `names`, stored in one tensor."""
        matrices: Tensor | Int4Experts
        if isinstance(weights, Int4Experts):
            matrices, scale = weights, None
        else:
            matrices, scale = weights.values, weights.scale
        quantization = self.quantization
        if self._scaling_of(names) is None or quantization is None:
            return WeightTarget(matrices, cut)
        if quantization.scale_suffix is not None:
            raise StartupFailed(
                f"{names[0]} and others are one tensor, and quantised, which is not supported",
                hint="a checkpoint with a tensor for each expert is",
            )
        quantised = Quantised(quantization.scaling, None, scale, quantization.int4)
        return WeightTarget(matrices, cut, quantised)

    def target(
        self, name: str, weight: Weight, cut: TensorCut, first: int, count: int
    ) -> WeightTarget:
        """The target for rows [first, first + count) of `weight`, of projection `name`."""
        scaling, quantization = self._scaling_of([name]), self.quantization
        if scaling is None or quantization is None:
            assert isinstance(weight, Tensor)
            return WeightTarget(weight[first : first + count], cut)
        scale_name, int4 = quantization.scale_of(name), quantization.int4
        if isinstance(weight, Int4Weight):
            packed = weight.part(first, count)
            return WeightTarget(packed, cut, Quantised(scaling, scale_name, None, int4))
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
        return WeightTarget(matrix[first : first + count], cut, quantised)

    def _scaling_of(self, names: Sequence[str]) -> str | None:
        """How the projections' weights are scaled; None if they are not quantised."""
        covered = {self.quantization is not None and self.quantization.covers(n) for n in names}
        if len(covered) > 1:
            raise StartupFailed(
                f"only some of {', '.join(names)} are quantised, which is not supported"
            )
        return self.quantization.scaling if self.quantization and True in covered else None

    @property
    def _group_size(self) -> int:
        """The group size of int4 weights that stay packed."""
        assert self.quantization is not None and self.quantization.int4 is not None
        return self.quantization.int4.group_size or CHUNK
