"""`ops.Ops` for GPUs: Triton where fusing or few rows pay, cuBLAS for all other products."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .activation_triton import silu_and_mul
from .gemv_triton import few_rows_product, few_rows_tiling, gemv
from .norm_triton import add_rms_norm, norm_heads, rms_norm
from .streamed_product import choose_stages

log = logging.getLogger(__name__)


@functools.cache
def _streamed_product(device: torch.device) -> Callable[..., Tensor] | None:
    """What multiplies 33 to 64 rows on a Hopper GPU, if Gluon is what it knows: that may change."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        from .streamed_product_gluon import streamed_product
    except (ImportError, AttributeError) as error:
        log.warning(
            "products of 33 to 64 rows go by cuBLAS: this Triton has another Gluon: %s", error
        )
        return None
    return streamed_product


class TritonOps:
    """Ops in Triton and cuBLAS."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) == 1:
            return gemv(x, weight, bias)
        if (tiling := few_rows_tiling(x, weight)) is not None:
            return few_rows_product(x, weight, bias, tiling)
        stages = choose_stages(x, weight, is_gated=False)
        if stages is not None and (streamed_product := _streamed_product(x.device)):
            return streamed_product(x, weight, bias, stages)
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(x, residual, weight, eps)

    def norm_heads(
        self, qkv: Tensor, weights: tuple[Tensor, Tensor], kv_heads: int, eps: float
    ) -> Tensor:
        return norm_heads(qkv, weights, kv_heads, eps)

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        stages = choose_stages(x, weight, is_gated=True)
        if stages is not None and (streamed_product := _streamed_product(x.device)):
            return streamed_product(x, weight, bias, stages, is_gated=True)
        return silu_and_mul(self.linear(x, weight, bias))
