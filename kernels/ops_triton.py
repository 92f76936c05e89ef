"""`ops.Ops` for GPUs: Triton where fusing or a single row pays, cuBLAS for all other products."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .activation_triton import silu_and_mul
from .gemv_triton import MAX_FEW_ROWS, few_rows_product, gemv
from .norm_triton import add_rms_norm, norm_heads, rms_norm

_HEAD_OUTPUTS = 32_768  # of an LM head, or more


class TritonOps:
    """Ops in Triton and cuBLAS."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) == 1:
            return gemv(x, weight, bias)
        if len(x) <= MAX_FEW_ROWS and len(weight) >= _HEAD_OUTPUTS and bias is None:
            return few_rows_product(x, weight)
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(x, residual, weight, eps)

    def norm_heads(
        self, qkv: Tensor, weights: tuple[Tensor, Tensor], kv_heads: int, eps: float
    ) -> Tensor:
        return norm_heads(qkv, weights, kv_heads, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return silu_and_mul(gate_up)
