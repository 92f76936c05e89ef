"""`ops.Ops` for GPUs: Triton where fusing or a single row pays, cuBLAS for all other products."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .activation_triton import silu_and_mul
from .gemv_triton import gemv
from .norm_triton import add_rms_norm, rms_norm


class TritonOps:
    """Ops in Triton and cuBLAS."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return gemv(x, weight, bias) if len(x) == 1 else F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(x, residual, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return silu_and_mul(gate_up)
