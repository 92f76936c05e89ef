"""`ops.Ops` for GPUs: our own kernels where fusion pays or rows are few, cuBLAS for other products.

The products (GEMMs) are in products/, the kernels of norms and of the gated activation are here. If
the next product has FP8 weights, norms and activations quantise their results.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..experts.experts import LayerLoads, Mixture
from ..experts.experts_triton import compute_experts, experts_summand
from ..gluon_kernels import gluon_kernels
from ..launched import cdiv, launched, next_power_of_2
from ..peer_reduce_triton import Exchange
from ..products.fp8_product import multiply, summand
from ..products.gemv_triton import few_rows_product, few_rows_tiling, gemv
from ..products.int4_product import Dequantised
from ..products.int4_product import choose as choose_int4
from ..products.int4_product import multiply_by as multiply_int4
from ..products.int4_weights import Int4Weight
from ..products.streamed_product import choose_stages
from ..products.weights import (
    BLOCK,
    Activations,
    BlockScaled,
    Fp8Weight,
    RowScaled,
    Sent,
    Summand,
    Summands,
    Unscaled,
    Weight,
)
from ..row_room import empty_rows
from .ops import Ops
from .quantise_triton import (
    empty_quantised,
    quantise,
    silu_and_mul_quantised,
    store_quantised,
)

_ACTIVATION_BLOCK = 1024


def _streamed(device: torch.device) -> ModuleType | None:
    return gluon_kernels("products.streamed_product_gluon", device)


def send_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, exchange: Exchange, *, in_parts: bool
) -> bool:
    """`streamed_product_gluon.send_streamed_product`; False, with nothing launched, if
    `TritonOps.linear` does not compute this product by the streamed kernel."""
    stages = choose_stages(x, weight, is_gated=False)
    if stages is None or (streamed := _streamed(x.device)) is None:
        return False
    streamed.send_streamed_product(x, weight, bias, stages, exchange, in_parts=in_parts)
    return True


class TritonOps(Ops):
    """Ops in Triton and cuBLAS."""

    def linear(self, x: Activations, weight: Weight, bias: Tensor | None) -> Tensor:
        if isinstance(weight, Int4Weight):
            assert isinstance(x, Tensor)
            return multiply_int4(choose_int4(x, weight), x, weight, bias)
        if not isinstance(weight, Tensor):
            return multiply(quantise(x, weight) if isinstance(x, Tensor) else x, weight, bias)
        assert isinstance(x, Tensor)
        if len(x) == 1:
            return gemv(x, weight, bias)
        if (tiling := few_rows_tiling(x, weight)) is not None:
            return few_rows_product(x, weight, bias, tiling)
        stages = choose_stages(x, weight, is_gated=False)
        if stages is not None and (streamed := _streamed(x.device)):
            product: Tensor = streamed.streamed_product(x, weight, bias, stages)
            return product
        return F.linear(x, weight, bias)

    def summand(self, x: Activations, weight: Weight, bias: Tensor | None) -> Summand:
        if isinstance(weight, RowScaled | BlockScaled):
            return summand(quantise(x, weight) if isinstance(x, Tensor) else x, weight, bias)
        if isinstance(x, Tensor) and isinstance(weight, Tensor):
            stages = choose_stages(x, weight, is_gated=False, is_summand=True)
            if stages is not None and stages.shares > 1 and (streamed := _streamed(x.device)):
                found: Tensor = streamed.streamed_summands(x, weight, bias, stages)
                return Summands(found.flatten(0, 1), stages.shares)
        return self.linear(x, weight, bias)

    def gated_linear(
        self,
        x: Activations,
        weight: Weight,
        bias: Tensor | None,
        reader: Fp8Weight | None = None,
    ) -> Activations:
        if isinstance(weight, Int4Weight):
            assert isinstance(x, Tensor)
            way = choose_int4(x, weight)
            if isinstance(way, Dequantised):
                return silu_and_mul(multiply_int4(way, x, weight, bias))
            return multiply_int4(way, x, weight, bias, is_gated=True)
        if not isinstance(weight, Tensor):
            product = self.linear(x, weight, bias)
            return silu_and_mul_quantised(product, reader) if reader else silu_and_mul(product)
        assert isinstance(x, Tensor)
        stages = choose_stages(x, weight, is_gated=True)
        if stages is not None and (streamed := _streamed(x.device)):
            gated: Tensor = streamed.streamed_product(x, weight, bias, stages, is_gated=True)
            return gated
        return silu_and_mul(self.linear(x, weight, bias))

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, reader: Fp8Weight | None = None
    ) -> Activations:
        return _launch_norm(x, x, weight, eps, reader, has_residual=False)

    def add_rms_norm(
        self,
        x: Summand,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        reader: Fp8Weight | None = None,
    ) -> Activations:
        assert not isinstance(x, Sent), "it is read by RankOps"
        return _launch_norm(x, residual, weight, eps, reader, has_residual=True)

    def experts(self, x: Tensor, mixture: Mixture, loads: LayerLoads | None) -> Tensor:
        return compute_experts(x, mixture, loads)

    def experts_summand(self, x: Tensor, mixture: Mixture, loads: LayerLoads | None) -> Summand:
        return experts_summand(x, mixture, loads)


def _launch_norm(
    x: Tensor | Unscaled | Summands,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    reader: Fp8Weight | None,
    *,
    has_residual: bool,
) -> Activations:
    scales = x if isinstance(x, Unscaled) else None
    summands = x.count if isinstance(x, Summands) else 1
    x = x if isinstance(x, Tensor) else x.data
    num_tokens, dim = residual.shape
    block = next_power_of_2(dim)
    out: Activations
    if reader is None:
        out, way, room = empty_rows(residual.shape, x), 0, 0
        data = scale = out
    else:
        out, way = empty_quantised(residual, reader)
        data, scale, room, block = out.data, out.scale, out.room, max(BLOCK, block)
    _add_rms_norm[(num_tokens,)](
        x,
        weight if scales is None else scales.of_rows,
        weight if scales is None else scales.of_outputs,
        residual,
        weight,
        data,
        scale,
        dim,
        room,
        eps,
        WAY=way,
        HAS_RESIDUAL=has_residual,
        HAS_SCALES=scales is not None,
        SUMMANDS=summands,
        BLOCK=block,
        num_warps=min(16, max(1, block // 256)),
        **launch_options(x.device),
    )
    return out


@launched
@triton.jit(do_not_specialize=["room"])
def _add_rms_norm(
    x,
    of_rows,
    of_outputs,
    residual,
    weight,
    out,
    out_scale,
    dim,
    room,
    eps,
    WAY: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SCALES: tl.constexpr,  # x is unscaled; of_rows and of_outputs are its scales
    SUMMANDS: tl.constexpr,  # rows of x per row of the result
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * dim
    cols = tl.arange(0, BLOCK)
    mask = cols < dim
    scales = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_SCALES:
        of_output = tl.load(of_outputs + cols, mask=mask, other=0.0)
    let_next_in(PDL)
    wait_for_previous(PDL)
    value = tl.load(x + row * SUMMANDS + cols, mask=mask, other=0.0)
    if SUMMANDS > 1:
        total = value.to(tl.float32)
        for index in tl.static_range(1, SUMMANDS):
            some = tl.load(x + row * SUMMANDS + index * dim + cols, mask=mask, other=0.0)
            total += some.to(tl.float32)
        value = total.to(value.dtype)
    if HAS_SCALES:
        one = tl.load(of_rows + tl.program_id(0)) * of_output
        value = (value.to(tl.float32) * one).to(value.dtype)
    if HAS_RESIDUAL:
        earlier = tl.load(residual + row + cols, mask=mask, other=0.0)
        value = (value.to(tl.float32) + earlier.to(tl.float32)).to(value.dtype)
        tl.store(residual + row + cols, value, mask=mask)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / dim + eps)
    normed = (wide * scale * scales).to(value.dtype)
    if WAY == 0:
        tl.store(out + row + cols, normed, mask=mask)
    else:
        wide = normed.to(tl.float32)
        store_quantised(wide, out, out_scale, tl.program_id(0), 0, dim, room, WAY, BLOCK)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`ops.silu_and_mul`: contiguous [tokens, 2 * dim] -> [tokens, dim]."""
    num_tokens, width = gate_up.shape
    dim = width // 2
    out = empty_rows((num_tokens, dim), gate_up)
    grid = (num_tokens, cdiv(dim, _ACTIVATION_BLOCK))
    options = launch_options(gate_up.device)
    _silu_and_mul[grid](gate_up, out, dim, BLOCK=_ACTIVATION_BLOCK, num_warps=4, **options)
    return out


@launched
@triton.jit
def _silu_and_mul(gate_up, out, dim, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_in(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < dim
    row = gate_up + token * 2 * dim + cols
    gate = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row + dim, mask=mask, other=0.0)
    gated = (gate / (1.0 + tl.exp(-gate))).to(up.dtype).to(tl.float32)
    tl.store(out + token * dim + cols, (gated * up.to(tl.float32)).to(up.dtype), mask=mask)
