"""A mixture of experts in place of a layer's MLP (Shazeer et al. 2017).

Holds the weights of all experts as two stacks and hands out views of them under the checkpoint's
names, those of published checkpoints or those of transformers 5, where a layer's experts are one
tensor. How tokens are routed and multiplied is `Ops.experts`'.

    several ranks      each has a part of every expert's inner dimension
    expert parallel    each has some experts whole

In both cases the ranks' outputs add up. The router is the same on all ranks, and so is its choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.experts.experts import LayerLoads, Mixture
from ...kernels.products.weights import Activations
from .communicator import Summand
from .layers import MLP, FloatLinear, Outputs
from .model_config import ExpertsConfig
from .weights.placement import Placement
from .weights.targets import Cut

_MERGED_PART = "mlp"
_MERGED_GATE_UP, _MERGED_DOWN = "experts.gate_up_proj", "experts.down_proj"


def is_merged_name(name: str) -> bool:
    """Whether a checkpoint with a tensor of this name has all experts of a layer in one."""
    return name.endswith(f".{_MERGED_GATE_UP}")


class Experts:
    """The experts of one layer that this rank has, and the shared one if there is one."""

    def __init__(
        self,
        layer: str,
        hidden: int,
        config: ExpertsConfig,
        placement: Placement,
        loads: LayerLoads | None,
    ) -> None:
        self._layer, self._config = layer, config
        self._ops, self._loads = placement.ops, loads
        self._communicator = ranks = placement.communicator
        self._first, self._count = 0, config.num_experts
        self._inner, self._first_inner = config.intermediate_size, 0
        if placement.has_expert_parallel:
            self._count //= ranks.size
            self._first = ranks.rank * self._count
        else:
            self._inner //= ranks.size
            self._first_inner = ranks.rank * self._inner
        prefix, of_all = f"{layer}.{config.part}", placement.of_model()  # but the many experts
        self.router = FloatLinear(
            [Outputs.whole(f"{prefix}.gate", config.num_experts)], hidden, of_all
        )
        gate_up, down = placement.expert_weights(
            self._names(0) + self._names(1), self._names(2), self._count, hidden, self._inner
        )
        self.mixture = Mixture(
            self.router.weight,
            gate_up,
            down,
            config.num_experts_per_token,
            config.has_normed_weights,
            self._first,
        )
        self.shared: MLP | None = None
        if config.shared_intermediate_size is not None:
            inner = config.shared_intermediate_size
            self.shared = MLP(f"{prefix}.shared_expert", hidden, inner, of_all)
            gate = Outputs.whole(f"{prefix}.shared_expert_gate", 1)
            self.shared_gate = FloatLinear([gate], hidden, of_all)
        named = f"{layer}.{_MERGED_PART}" if placement.has_merged_experts else prefix
        for name, target in of_all.targets.items():
            placement.targets[f"{named}{name.removeprefix(prefix)}"] = target
        if placement.has_merged_experts:
            self._name_merged(placement)
        else:
            self._name_published(placement)

    def __call__(self, x: Activations) -> Summand:
        """[tokens, hidden] -> this rank's summand of the same shape, for the next RMSNorm.add."""
        assert isinstance(x, Tensor), "more than one weight reads it"
        if self.shared is None and self._communicator.size == 1:
            return self._ops.experts_summand(x, self.mixture, self._loads)
        out = self._ops.experts(x, self.mixture, self._loads)
        if self.shared is not None:
            # A product of a single output, and a vectorised exponential, round by the number of
            # rows: in float64, rounded once, a row's gate does not depend on the others.
            weighted = x.float() * self.shared_gate.weight.float()
            gate = torch.sigmoid(weighted.sum(-1, keepdim=True, dtype=torch.float64))
            out += gate.to(x.dtype) * self.shared.product(x)
        return out

    def _names(self, projection: int) -> list[str]:
        """Of gate, up or down of all experts in published checkpoints."""
        part, name = f"{self._layer}.{self._config.part}", self._config.projections[projection]
        return [f"{part}.experts.{expert}.{name}" for expert in range(self._config.num_experts)]

    def _name_published(self, placement: Placement) -> None:
        """Three matrices of each expert."""
        inner, first, full = self._inner, self._first_inner, self._config.intermediate_size
        rows, columns = Cut(0, first, full), Cut(1, first, full)
        for expert, names in enumerate(zip(*map(self._names, range(3)), strict=True)):
            local = expert - self._first
            is_mine = 0 <= local < self._count
            of_it = local if is_mine else 0
            gate_up, down = self.mixture.gate_up.of(of_it), self.mixture.down.of(of_it)
            parts = ((gate_up, rows, 0), (gate_up, rows, inner), (down, columns, 0))
            for name, (weight, cut, start) in zip(names, parts, strict=True):
                num_rows = inner if weight is gate_up else len(down)
                if not is_mine:  # another rank's, of which nothing is read
                    cut, start, num_rows = Cut(0, 0, num_rows), 0, 0
                target = placement.target(name, weight, cut, start, num_rows)
                placement.targets[f"{name}.weight"] = target

    def _name_merged(self, placement: Placement) -> None:
        """Two tensors of all experts."""
        first, full = self._first_inner, self._config.intermediate_size
        gate_up_cut, down_cut = Cut(1, first, 2 * full, pieces=2), Cut(2, first, full)
        if self._count < self._config.num_experts:
            gate_up_cut = down_cut = Cut(0, self._first, self._config.num_experts)
        for name, names, weights, cut in (
            (_MERGED_GATE_UP, self._names(0), self.mixture.gate_up, gate_up_cut),
            (_MERGED_DOWN, self._names(2), self.mixture.down, down_cut),
        ):
            target = placement.merged_target(names, weights, cut)
            placement.targets[f"{self._layer}.{_MERGED_PART}.{name}"] = target
