"""Which kernel computes a product with a weight in FP8, by shape and rows.

    up to 64 rows     streamed (Hopper), else Triton
    more              torch's _scaled_mm, where it supports shape and type, else Triton; with block
                      scales, up to 256 rows, streamed for few outputs

Scaling by rows and outputs costs cuBLAS up to 15 us: a product for the residual stream is returned
unscaled, and the norm that adds it applies the scales. That norm also sums split-K shares.

The choice was measured (`python -m baton.bench.kernels.quantised_products`): see way_table.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import TypeAlias

import torch
from torch import Tensor

from ..gluon_kernels import gluon_kernels
from .fp8_triton import Fp8Stages, Fp8Tiling, fp8_few_rows
from .way_table import look_up
from .weights import BLOCK, BlockScaled, Fp8Rows, Fp8Weight, RowScaled, Summands, Unscaled

MAX_FEW_ROWS, MAX_STREAMED_ROWS = 64, 256
_ALIGNED = 16  # _scaled_mm takes multiples of it as outputs and inputs
_BLOCKS_ALIGNED = 4 * BLOCK  # cuBLAS steps over rows of scales by multiples of 4


@dataclass(frozen=True, slots=True)
class ScaledMm:
    """torch._scaled_mm."""


Way: TypeAlias = Fp8Tiling | Fp8Stages | ScaledMm
WAYS: dict[str, type[Way]] = {
    "triton": Fp8Tiling,
    "streamed": Fp8Stages,
    "scaled_mm": ScaledMm,
}


def multiply(x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """x [rows, inputs] @ weight [outputs, inputs]^T + bias -> [rows, outputs]."""
    return multiply_by(choose(x, weight), x, weight, bias)


def multiply_by(way: Way, x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """`multiply` with this kernel; Triton's where Gluon is not available."""
    if isinstance(way, Fp8Stages) and (module := _streamed(x.data.device)):
        product: Tensor = module.fp8_streamed_product(x, weight, bias, way)
        return product
    if isinstance(way, ScaledMm):
        return scaled_mm(x, weight, bias)
    return fp8_few_rows(x, weight, bias, way if isinstance(way, Fp8Tiling) else _tiling(len(x)))


def summand(x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None) -> Tensor | Unscaled | Summands:
    """`multiply`, in a form that the norm which adds it completes."""
    if isinstance(weight, RowScaled):
        is_quicker = bias is None and len(x) > MAX_FEW_ROWS and can_scale(x, weight)
        return _unscaled(x, weight) if is_quicker else multiply(x, weight, bias)
    way = choose(x, weight)
    if isinstance(way, Fp8Stages) and way.shares > 1:
        return summands(x, weight, bias, way)
    return multiply_by(way, x, weight, bias)


def summands(x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, way: Fp8Stages) -> Summands:
    """The partial product of each split-K share."""
    module = _streamed(x.data.device)
    assert module is not None
    found: Tensor = module.fp8_streamed_summands(x, weight, bias, way)
    return Summands(found.flatten(0, 1), found.shape[1])


def _unscaled(x: Fp8Rows, weight: RowScaled) -> Unscaled:
    one = _one(x.data.device)
    data = torch._scaled_mm(
        x.data,
        weight.data.t(),
        scale_a=one,
        scale_b=one,
        out_dtype=x.dtype,
        use_fast_accum=True,
    )
    return Unscaled(data, x.scale[:, 0], weight.scale)


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def choose(x: Fp8Rows, weight: Fp8Weight) -> Way:
    """The fastest kernel on an H200 among those that this device supports."""
    num_outputs, num_inputs = weight.shape
    is_blocked = isinstance(weight, BlockScaled)
    kind = "block" if is_blocked else "row"
    num_rows, device = len(x), x.data.device
    is_grouped = not is_blocked and x.scale.shape[1] > 1
    kinds = tuple(
        name
        for name, is_there in (
            ("triton", num_rows <= MAX_FEW_ROWS and not is_grouped),
            ("streamed", can_stream(x, weight)),
            ("scaled_mm", can_scale(x, weight) and not is_grouped),
        )
        if is_there
    )
    found = look_up(kind, num_rows, num_outputs, num_inputs, kinds)
    if found is not None and found.rows < num_rows:
        found = None  # measured for fewer rows: may not suit more
    if found is not None and device.type == "cuda":
        return WAYS[found.kind](**found.way)
    if "streamed" in kinds and num_rows <= MAX_FEW_ROWS:
        return usual_stages(num_outputs)
    return ScaledMm() if "scaled_mm" in kinds and num_rows > 32 else _tiling(num_rows)


def usual_stages(num_outputs: int) -> Fp8Stages:
    """The stages where nothing was measured."""
    if num_outputs >= 64 * 96:
        return Fp8Stages(64, 2, 4, 3)
    return Fp8Stages(32, 2, 6, 3)


def _tiling(num_rows: int) -> Fp8Tiling:
    return Fp8Tiling(64, 4 if num_rows > 16 else 6)


def can_stream(x: Fp8Rows, weight: Fp8Weight) -> bool:
    """Whether fp8_streamed_gluon.py can compute this product."""
    most = MAX_STREAMED_ROWS if isinstance(weight, BlockScaled) else MAX_FEW_ROWS
    has_room = x.room in (16, 32, 64, 128, 256) and len(x) <= most
    return has_room and _streams(x.dtype, x.data.device, weight)


def takes_groups(x: Tensor, weight: Fp8Weight) -> bool:
    """Whether the product of x [rows, ..] with `weight` accepts a scale for each 128 inputs:
    quantising by groups does not need the whole row, and takes half the time."""
    if isinstance(weight, BlockScaled):
        return True
    return len(x) <= MAX_FEW_ROWS and _streams(x.dtype, x.device, weight)


def _streams(dtype: torch.dtype, device: torch.device, weight: Fp8Weight) -> bool:
    num_outputs, num_inputs = weight.shape
    is_whole = num_inputs % BLOCK == 0 and num_outputs % 32 == 0
    return dtype == torch.bfloat16 and is_whole and _streamed(device) is not None


def can_scale(x: Fp8Rows, weight: Fp8Weight) -> bool:
    """Whether torch._scaled_mm can compute this product."""
    num_outputs, num_inputs = weight.shape
    if isinstance(weight, BlockScaled):
        is_whole = num_outputs % BLOCK == 0 and num_inputs % _BLOCKS_ALIGNED == 0
    else:
        is_whole = num_outputs % _ALIGNED == 0 and num_inputs % _ALIGNED == 0
    return x.data.is_cuda and x.dtype == torch.bfloat16 and is_whole


def scaled_mm(x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """`multiply` by torch: cuBLAS or CUTLASS."""
    num_rows = len(x)
    if isinstance(weight, BlockScaled):
        data, scale = x.with_room  # strides must be aligned, and scales contiguous
        of_weight, is_fast = weight.scale.t(), False
    else:
        data, scale = x.data, x.scale.as_strided((num_rows, 1), (1, 1))
        of_weight, is_fast = weight.scale[None], True
    out = torch._scaled_mm(
        data,
        weight.data.t(),
        scale_a=scale,
        scale_b=of_weight,
        out_dtype=x.dtype,
        use_fast_accum=is_fast,
    )[:num_rows]
    return out if bias is None else out.add_(bias)


def _streamed(device: torch.device) -> ModuleType | None:
    return gluon_kernels("products.fp8_streamed_gluon", device)
