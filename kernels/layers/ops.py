"""The element-wise and linear parts of a model, as one small set that each kind of device fills.

`TorchOps` serves CPUs and is the reference; ops_triton.TritonOps serves GPUs.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from .activation import silu_and_mul
from .norm import norm_heads, rms_norm


class Ops(Protocol):
    """All tensors are contiguous, [tokens, ...], and of the model's type."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x @ weight^T + bias; weight [outputs, inputs]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """norm.rms_norm."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to `residual` in place; the norm of the sum."""
        ...

    def norm_heads(
        self, qkv: Tensor, weights: tuple[Tensor, Tensor], kv_heads: int, eps: float
    ) -> Tensor:
        """norm.norm_heads; `qkv` may be overwritten."""
        ...

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """activation.silu_and_mul of `linear`."""
        ...


class TorchOps:
    """Ops in plain torch."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(residual.add_(x), weight, eps)

    def norm_heads(
        self, qkv: Tensor, weights: tuple[Tensor, Tensor], kv_heads: int, eps: float
    ) -> Tensor:
        return norm_heads(qkv, weights, kv_heads, eps)

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return silu_and_mul(F.linear(x, weight, bias))
