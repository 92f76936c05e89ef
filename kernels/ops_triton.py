"""`ops.Ops` for GPUs: Triton where fusing or a single row pays, cuBLAS for all other products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .activation_triton import silu_and_mul
from .gemv_triton import gemv
from .norm_triton import add_rms_norm, norm_heads, rms_norm
from .split_k_triton import MAX_TILES, Tiling, split_k_product

_HEAD_OUTPUTS = 32_768  # of an LM head, or more
_MAX_HEAD_ROWS = 16
_HEAD_TILING = Tiling(outputs=32, inputs=128, splits=1, stages=4, warps=2)


class TritonOps:
    """Ops in Triton and cuBLAS, for one stream of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._arrivals = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) == 1:
            return gemv(x, weight, bias)
        tiling = tiling_for(len(x), *weight.shape)
        if tiling is not None:
            return split_k_product(x, weight, bias, self._arrivals, tiling)
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


def tiling_for(num_rows: int, num_outputs: int, num_inputs: int) -> Tiling | None:
    """Of the product that is faster than cuBLAS's, if one is: `python -m baton.bench.products`."""
    if num_rows <= _MAX_HEAD_ROWS and num_outputs >= _HEAD_OUTPUTS:
        return _HEAD_TILING
    return None
