"""Quantises activations to FP8 in Triton: after a norm, after a gated activation, or as they are.

The scale of a row is from its largest absolute value, or each group of 128 has a scale of its own
(BlockScaled, and few rows for RowScaled): see products/weights.py. Values are first rounded to the
model's type, as if they had been stored: fused or not, results are the same.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..launched import cdiv, launched, next_power_of_2
from ..products.fp8_product import takes_groups
from ..products.fp8_triton import quantised_groups
from ..products.weights import BLOCK, FP8_MAX, LEAST_MAXIMUM, Fp8Rows, Fp8Weight

_BY_ROW, _BY_GROUP = 1, 2
_LARGEST = tl.constexpr(FP8_MAX)
_LEAST = tl.constexpr(LEAST_MAXIMUM)
_GROUP = tl.constexpr(BLOCK)
_COLUMNS = 1024  # per program that quantises by group


def empty_quantised(x: Tensor, weight: Fp8Weight) -> tuple[Fp8Rows, int]:
    """Uninitialised memory for x [rows, ..] quantised for `weight`; and the WAY of
    `store_quantised`."""
    in_groups = takes_groups(x, weight)
    out = Fp8Rows.empty(len(x), weight, x, in_groups=in_groups)
    return out, _BY_GROUP if in_groups else _BY_ROW


def quantise(x: Tensor, weight: Fp8Weight) -> Fp8Rows:
    """`quantise_activations`: contiguous x [rows, inputs] for the product with `weight`."""
    return _launch(x, weight, x.shape[1], is_gated=False)


def silu_and_mul_quantised(gate_up: Tensor, weight: Fp8Weight) -> Fp8Rows:
    """`quantise` of `ops.silu_and_mul` of gate_up, contiguous [rows, 2 * inputs]."""
    return _launch(gate_up, weight, gate_up.shape[1] // 2, is_gated=True)


def _launch(x: Tensor, weight: Fp8Weight, dim: int, *, is_gated: bool) -> Fp8Rows:
    out, way = empty_quantised(x, weight)
    columns = max(BLOCK, next_power_of_2(dim))
    if way == _BY_GROUP:
        columns = min(columns, _COLUMNS)
    _quantise[(len(x), cdiv(dim, columns))](
        x,
        out.data,
        out.scale,
        dim,
        out.room,
        IS_GATED=is_gated,
        WAY=way,
        COLS=columns,
        num_warps=min(16, max(4, columns // 1024)),
        **launch_options(x.device),
    )
    return out


@triton.jit
def store_quantised(
    value, out, scale, row, first, dim, room, WAY: tl.constexpr, COLS: tl.constexpr
):
    """Quantise and store value [COLS] float32: the columns of a row from `first` on, zeros beyond
    `dim`. If WAY is _BY_ROW, they are the whole row."""
    cols = first + tl.arange(0, COLS)
    at = out + row.to(tl.int64) * dim + cols
    if WAY == 1:
        largest = tl.maximum(tl.max(tl.abs(value), axis=0), _LEAST)
        one = largest / _LARGEST
        tl.store(scale + row, one)
        tl.store(at, (value * (1.0 / one)).to(out.dtype.element_ty), mask=cols < dim)
    else:
        NUM_GROUPS: tl.constexpr = COLS // _GROUP
        grouped, each = quantised_groups(tl.reshape(value, (NUM_GROUPS, _GROUP)))
        groups = first // _GROUP + tl.arange(0, NUM_GROUPS)
        is_group = groups * _GROUP < dim
        tl.store(scale + groups * room + row, each, mask=is_group)
        tl.store(at, tl.reshape(grouped, (COLS,)).to(out.dtype.element_ty), mask=cols < dim)


@launched
@triton.jit(do_not_specialize=["room"])
def _quantise(
    x,
    out,
    scale,
    dim,
    room,
    IS_GATED: tl.constexpr,
    WAY: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_in(PDL)
    wait_for_previous(PDL)
    row, first = tl.program_id(0), tl.program_id(1) * COLS
    cols = first + tl.arange(0, COLS)
    mask = cols < dim
    if IS_GATED:  # as ops_triton._silu_and_mul
        at = x + row.to(tl.int64) * 2 * dim + cols
        gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(at + dim, mask=mask, other=0.0)
        gated = (gate / (1.0 + tl.exp(-gate))).to(up.dtype).to(tl.float32)
        value = (gated * up.to(tl.float32)).to(up.dtype).to(tl.float32)
    else:
        value = tl.load(x + row.to(tl.int64) * dim + cols, mask=mask, other=0.0).to(tl.float32)
    store_quantised(value, out, scale, row, first, dim, room, WAY, COLS)
