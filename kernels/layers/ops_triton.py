"""`ops.Ops` for GPUs: Triton where fusing or few rows pay, cuBLAS for all other products."""

from __future__ import annotations

import functools
import logging
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from ..peer_reduce_triton import Exchange
from ..products.gemv_triton import few_rows_product, few_rows_tiling, gemv
from ..products.streamed_product import choose_stages
from .activation_triton import silu_and_mul
from .norm_triton import add_rms_norm, norm_heads, rms_norm

log = logging.getLogger(__name__)


@functools.cache
def _streamed(device: torch.device) -> ModuleType | None:
    """What multiplies 33 to 64 rows on a Hopper GPU, if Gluon is what it knows: that may change."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        from ..products import streamed_product_gluon
    except (ImportError, AttributeError) as error:
        log.warning(
            "products of 33 to 64 rows go by cuBLAS: this Triton has another Gluon: %s", error
        )
        return None
    return streamed_product_gluon


def send_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, exchange: Exchange, *, in_parts: bool
) -> bool:
    """`streamed_product_gluon.send_streamed_product`; False if that is not how `TritonOps.linear`
    computes this product."""
    stages = choose_stages(x, weight, is_gated=False)
    if stages is None or (streamed := _streamed(x.device)) is None:
        return False
    streamed.send_streamed_product(x, weight, bias, stages, exchange, in_parts=in_parts)
    return True


class TritonOps:
    """Ops in Triton and cuBLAS."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) == 1:
            return gemv(x, weight, bias)
        if (tiling := few_rows_tiling(x, weight)) is not None:
            return few_rows_product(x, weight, bias, tiling)
        stages = choose_stages(x, weight, is_gated=False)
        if stages is not None and (streamed := _streamed(x.device)):
            product: Tensor = streamed.streamed_product(x, weight, bias, stages)
            return product
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
        if stages is not None and (streamed := _streamed(x.device)):
            product: Tensor = streamed.streamed_product(x, weight, bias, stages, is_gated=True)
            return product
        return silu_and_mul(self.linear(x, weight, bias))
