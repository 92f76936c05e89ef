"""The feed-forward part of a layer: one gated MLP, or a mixture of several."""

from __future__ import annotations

import torch
from torch import Tensor

from .communicator import Summand
from .layers import Linear, Outputs, Placement, RowLinear, Targets
from .model_config import ExpertsConfig


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

    def __call__(self, x: Tensor) -> Summand:
        return self.down(self.gate_up.gated(x))

    def product(self, x: Tensor) -> Tensor:
        """The same: see RowLinear."""
        return self.down.product(self.gate_up.gated(x))

    def targets(self) -> Targets:
        yield from self.gate_up.targets()
        yield from self.down.targets()


class Experts:
    """Each token goes through the few of many MLPs that a router likes best (Shazeer et al. 2017).

    The reference: one expert after the other over the tokens that chose it. The router is the same
    on all ranks, and so is its choice.
    """

    def __init__(
        self, prefix: str, hidden: int, config: ExpertsConfig, placement: Placement
    ) -> None:
        self._config = config
        router = Outputs.whole(f"{prefix}.gate", config.num_experts)
        self.router = Linear([router], hidden, placement)
        inner = config.intermediate_size
        self.experts = [
            MLP(f"{prefix}.experts.{index}", hidden, inner, placement)
            for index in range(config.num_experts)
        ]

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = self._route(x)
        out = torch.zeros_like(x)
        for index in torch.unique(chosen).tolist():
            tokens, place = torch.where(chosen == index)
            inputs = x[tokens]
            if len(tokens) == 1:
                # BLAS multiplies a single row by another routine: see cpu_steps.
                inputs = inputs.expand(2, -1)
            computed = self.experts[index].product(inputs)[: len(tokens)]
            out.index_add_(0, tokens, computed * weights[tokens, place, None])
        return out

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, hidden] -> weights and experts, [tokens, num_experts_per_token] each."""
        shares = torch.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, chosen = shares.topk(self._config.num_experts_per_token, dim=-1)
        if self._config.has_normed_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), chosen

    def targets(self) -> Targets:
        yield from self.router.targets()
        for expert in self.experts:
            yield from expert.targets()
