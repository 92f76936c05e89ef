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

from ...kernels.experts.experts import ExpertWeights, LayerLoads, Mixture
from ...kernels.products.weights import Activations
from .layers import Cut, FloatLinear, Outputs, Placement, Product, Target, Targets
from .mlp import MLP
from .model_config import ExpertsConfig

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
        self._placement, self._ops = placement, placement.ops
        self._loads = loads
        ranks = placement.communicator
        self._first, self._count = 0, config.num_experts
        self._inner, self._first_inner = config.intermediate_size, 0
        if placement.has_expert_parallel:
            self._count //= ranks.size
            self._first = ranks.rank * self._count
        else:
            self._inner //= ranks.size
            self._first_inner = ranks.rank * self._inner
        prefix = f"{layer}.{config.part}"
        self.router = FloatLinear(
            [Outputs.whole(f"{prefix}.gate", config.num_experts)], hidden, placement
        )
        self.mixture = Mixture(
            self.router.weight,
            ExpertWeights(placement.matrices(self._count, 2 * self._inner, hidden)),
            ExpertWeights(placement.matrices(self._count, hidden, self._inner)),
            config.num_experts_per_token,
            config.has_normed_weights,
            self._first,
        )
        self.shared: MLP | None = None
        if config.shared_intermediate_size is not None:
            inner = config.shared_intermediate_size
            self.shared = MLP(f"{prefix}.shared_expert", hidden, inner, placement)
            gate = Outputs.whole(f"{prefix}.shared_expert_gate", 1)
            self.shared_gate = FloatLinear([gate], hidden, placement)

    def __call__(self, x: Activations) -> Tensor:
        """[tokens, hidden] -> this rank's summand of the same shape."""
        assert isinstance(x, Tensor), "more than one weight reads it"
        out = self._ops.experts(x, self.mixture, self._loads)
        if self.shared is not None:
            # A product of a single output, and a vectorised exponential, round by the number of
            # rows: in float64, rounded once, a row's gate does not depend on the others.
            weighted = x.float() * self.shared_gate.weight.float()
            gate = torch.sigmoid(weighted.sum(-1, keepdim=True, dtype=torch.float64))
            out += gate.to(x.dtype) * self.shared.product(x)
        return out

    def products(self) -> list[tuple[int, Product]]:
        """None that go by a library: see DecoderLayer."""
        return []

    def targets(self) -> Targets:
        """Under the names of published checkpoints: three matrices of each expert."""
        yield from self._targets_of_all(f"{self._layer}.{self._config.part}")
        gate_name, up_name, down_name = self._config.projections
        inner, first, full = self._inner, self._first_inner, self._config.intermediate_size
        gate_up, down = self.mixture.gate_up.values, self.mixture.down.values
        for expert in range(self._config.num_experts):
            prefix = f"{self._layer}.{self._config.part}.experts.{expert}"
            local = expert - self._first
            if 0 <= local < self._count:
                gate, up = gate_up[local, :inner], gate_up[local, inner:]
                rows, cols = Cut(0, first, full), Cut(1, first, full)
                parts = (
                    (gate_name, gate, rows),
                    (up_name, up, rows),
                    (down_name, down[local], cols),
                )
                for name, part, cut in parts:
                    target = self._placement.target(f"{prefix}.{name}", part, cut, 0, len(part))
                    yield f"{prefix}.{name}.weight", target
            else:  # another rank's, of which nothing is read
                for name, part, full_rows in (
                    (gate_name, gate_up[0, :0], full),
                    (up_name, gate_up[0, :0], full),
                    (down_name, down[0, :0], down.shape[1]),
                ):
                    nothing = Cut(0, 0, full_rows)
                    target = self._placement.target(f"{prefix}.{name}", part, nothing, 0, 0)
                    yield f"{prefix}.{name}.weight", target

    def merged_targets(self) -> Targets:
        """Under the names of transformers 5: two tensors of all experts."""
        prefix = f"{self._layer}.{_MERGED_PART}"
        yield from self._targets_of_all(prefix)
        first, full = self._first_inner, self._config.intermediate_size
        gate_up_cut, down_cut = Cut(1, first, 2 * full, pieces=2), Cut(2, first, full)
        if self._count < self._config.num_experts:
            gate_up_cut = down_cut = Cut(0, self._first, self._config.num_experts)
        yield f"{prefix}.{_MERGED_GATE_UP}", Target(self.mixture.gate_up.values, gate_up_cut)
        yield f"{prefix}.{_MERGED_DOWN}", Target(self.mixture.down.values, down_cut)

    def _targets_of_all(self, prefix: str) -> Targets:
        """What is no expert of the many."""
        parts = [self.router.targets()]
        if self.shared is not None:
            parts += [self.shared.targets(), self.shared_gate.targets()]
        published = f"{self._layer}.{self._config.part}."
        for part in parts:
            for name, target in part:
                yield f"{prefix}.{name.removeprefix(published)}", target
