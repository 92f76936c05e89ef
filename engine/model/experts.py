"""A mixture of experts in place of a layer's MLP (Shazeer et al. 2017).

    tensor parallel    each rank has a part of every expert's inner dimension
    expert parallel    each rank has some experts whole

In both cases the ranks' outputs add up. All ranks have the same router and compute the same choice.
`Ops.experts` routes and multiplies; construction/experts.py builds the modules.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.experts.experts import LayerLoads, Mixture
from ...kernels.products.weights import Activations, Summand
from .communicator import LayerOps
from .layers import MLP


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An MLP for all tokens, its output weighted by sigmoid(x @ gate^T); `gate` [1, hidden]."""

    mlp: MLP
    gate: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        # A product with one output and a vectorised exponential round differently by the number
        # of rows. Computed in float64 and rounded once, a row's gate does not depend on others.
        weighted = x.float() * self.gate.float()
        gate = torch.sigmoid(weighted.sum(-1, keepdim=True, dtype=torch.float64))
        down = self.mlp.down
        return gate.to(x.dtype) * down.product(self.mlp.gate_up(x, down.fp8_weight))


@dataclass(frozen=True, slots=True)
class Experts:
    """This rank's experts of one layer, and the shared expert if the model has one."""

    mixture: Mixture
    shared: SharedExpert | None
    loads: LayerLoads | None
    ops: LayerOps

    def __call__(self, x: Activations) -> Summand:
        """[tokens, hidden] -> this rank's summand, which must go to the next RMSNorm.add."""
        assert isinstance(x, Tensor), "more than one weight reads it"
        if self.shared is None:
            return self.ops.experts_summand(x, self.mixture, self.loads)
        return self.ops.experts(x, self.mixture, self.loads).add_(self.shared(x))
