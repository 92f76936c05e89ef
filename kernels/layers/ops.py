"""The element-wise and linear operations of a model.

`Ops` is in plain torch: for CPUs, and the reference. ops_triton.TritonOps is for GPUs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..experts.experts import LayerLoads, Mixture, tokens_by_expert
from ..products.int4_weights import Int4Weight
from ..products.weights import Activations, Fp8Weight, Summand, Weight, quantise_activations


class Ops:
    """Operations in plain torch. All tensors are contiguous, [tokens, ...], of the model's type.

    `reader`: the FP8 weight of the only product that reads a result; the result may be quantised
    for it.
    """

    def linear(self, x: Activations, weight: Weight, bias: Tensor | None) -> Tensor:
        """x @ weight^T + bias; weight [outputs, inputs]. For an FP8 weight, x is quantised too."""
        if isinstance(weight, Tensor):
            assert isinstance(x, Tensor)
            return _product(x, weight, bias)
        if isinstance(weight, Int4Weight):
            assert isinstance(x, Tensor)
            return _product(x, weight.dequantised(x.dtype), bias)
        if isinstance(x, Tensor):
            x = quantise_activations(x, weight)
        return _product(x.dequantised(x.dtype), weight.dequantised(x.dtype), bias)

    def summand(self, x: Activations, weight: Weight, bias: Tensor | None) -> Summand:
        """`linear`; the result may have a form that only `add_rms_norm` reads."""
        return self.linear(x, weight, bias)

    def gated_linear(
        self,
        x: Activations,
        weight: Weight,
        bias: Tensor | None,
        reader: Fp8Weight | None = None,
    ) -> Activations:
        """`silu_and_mul` of the result of `linear`."""
        return silu_and_mul(self.linear(x, weight, bias))

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, reader: Fp8Weight | None = None
    ) -> Activations:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019).

        The mean is computed in float32 for any type of `x`.
        """
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(
        self,
        x: Summand,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        reader: Fp8Weight | None = None,
    ) -> Activations:
        """Add x to `residual` in place; return the norm of the sum."""
        assert isinstance(x, Tensor)
        return self.rms_norm(residual.add_(x), weight, eps, reader)

    def experts(self, x: Tensor, mixture: Mixture, loads: LayerLoads | None) -> Tensor:
        """The weighted sum of each token's experts on this rank; same shape as x."""
        out = torch.zeros_like(x)
        for local, tokens, weights in tokens_by_expert(x, mixture, loads):
            gated = self.gated_linear(x[tokens], mixture.gate_up.of(local), None)
            product = self.linear(gated, mixture.down.of(local), None)
            out.index_add_(0, tokens, product * weights)
        return out

    def experts_summand(self, x: Tensor, mixture: Mixture, loads: LayerLoads | None) -> Summand:
        """`experts`; the result may have a form that only `add_rms_norm` reads."""
        return self.experts(x, mixture, loads)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear, with a single row computed as two: BLAS has another routine for one row, which
    rounds differently, and a decode must have the same bits alone as in a batch."""
    if len(x) == 1:  # joined: torch copies an expanded row too, in more time
        return F.linear(torch.cat((x, x)), weight, bias)[:1]
    return F.linear(x, weight, bias)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU (Shazeer 2020): silu(gate) * up. [tokens, 2 * dim], gate first -> [tokens, dim]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
