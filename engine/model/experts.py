"""A mixture of experts in place of a layer's MLP (Shazeer et al. 2017).

    several ranks      each has a part of every expert's inner dimension
    expert parallel    each has some experts whole

In both cases the ranks' outputs add up. The router is the same on all ranks, and so is its choice.
How tokens are routed and multiplied is `Ops.experts`'. construction/experts.py makes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.experts.experts import LayerLoads, Mixture
from ...kernels.layers.ops import Ops
from ...kernels.products.weights import Activations
from .communicator import Communicator, Summand
from .layers import MLP


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """What all tokens pass, each weighted by the sigmoid of its product with `gate` [1, hidden]."""

    mlp: MLP
    gate: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        # A product of a single output, and a vectorised exponential, round by the number of
        # rows: in float64, rounded once, a row's gate does not depend on the others.
        weighted = x.float() * self.gate.float()
        gate = torch.sigmoid(weighted.sum(-1, keepdim=True, dtype=torch.float64))
        return gate.to(x.dtype) * self.mlp.product(x)


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one layer that this rank has, and the shared one if there is one."""

    mixture: Mixture
    shared: SharedExpert | None
    loads: LayerLoads | None
    ops: Ops
    communicator: Communicator

    def __call__(self, x: Activations) -> Summand:
        """[tokens, hidden] -> this rank's summand of the same shape, for the next RMSNorm.add."""
        assert isinstance(x, Tensor), "more than one weight reads it"
        if self.shared is None and self.communicator.size == 1:
            return self.ops.experts_summand(x, self.mixture, self.loads)
        out = self.ops.experts(x, self.mixture, self.loads)
        if self.shared is not None:
            out += self.shared(x)
        return out
