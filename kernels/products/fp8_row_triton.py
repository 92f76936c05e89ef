"""A weight in FP8 times one row, in Triton: experts/few_tokens_triton.py's way.

    weight ─► registers │ the kernel in front has ended │ x ─► its largest number ─► e4m3 ─► sums

Bound by reading the weight: hundreds of programs ask for all of their outputs' weights at once,
before x is there. Floats are quantised by each program for itself, as quantise_triton.py does it:
that takes less than a kernel of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from .weights import BLOCK, FP8_MAX, LEAST_MAXIMUM, Activations, BlockScaled, Fp8Rows, Fp8Weight

_BYTES_AHEAD = 256  # of a thread, in registers
_GROUP = tl.constexpr(BLOCK)
_LARGEST = tl.constexpr(FP8_MAX)
_LEAST = tl.constexpr(LEAST_MAXIMUM)


@dataclass(frozen=True, slots=True)
class Fp8Row:
    """Outputs of a program, and inputs of a step of its loop."""

    outputs: int
    inputs: int
    warps: int


def fp8_row_product(
    x: Activations, weight: Fp8Weight, bias: Tensor | None, way: Fp8Row, *, is_gated: bool = False
) -> Tensor:
    """x [1, inputs] @ weight [outputs, inputs]^T + bias -> [1, outputs], of x's type.

    `is_gated`: `ops.silu_and_mul` of the same, half as many outputs. Inputs are a multiple of 128;
    so are outputs if it is gated and scaled by blocks.
    """
    num_outputs, num_inputs = weight.shape
    width = num_outputs // 2 if is_gated else num_outputs
    data, scale = (x.data, x.scale) if isinstance(x, Fp8Rows) else (x, weight.scale)
    rows = 2 * way.outputs if is_gated else way.outputs
    cols = max(BLOCK, min(way.inputs, triton.next_power_of_2(num_inputs)))
    ahead = _BYTES_AHEAD * 32 * way.warps // (rows * cols)
    out = torch.empty((1, width), dtype=x.dtype, device=data.device)
    _fp8_row[(triton.cdiv(width, way.outputs),)](
        data,
        scale,
        weight.data,
        weight.scale,
        weight.scale if bias is None else bias,
        out,
        width,
        scale.stride(1) if isinstance(x, Fp8Rows) else 0,
        HAS_BIAS=bias is not None,
        IS_QUANTISED=isinstance(x, Fp8Rows),
        IS_BLOCKED=isinstance(weight, BlockScaled),
        IS_GATED=is_gated,
        INPUTS=num_inputs,
        OUTPUTS=way.outputs,
        COLS=cols,
        AHEAD=min(ahead, triton.cdiv(num_inputs, cols)),  # steps
        num_warps=way.warps,
        **launch_options(data.device),
    )
    return out


@triton.jit(do_not_specialize=["stride"])
def _fp8_row(
    x,
    x_scale,
    weight,
    scale,
    bias,
    out,
    width,
    stride,
    HAS_BIAS: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
    IS_BLOCKED: tl.constexpr,
    IS_GATED: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLS: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    # Of a gated product a program has gates, and behind them what they multiply.
    ROWS: tl.constexpr = 2 * OUTPUTS if IS_GATED else OUTPUTS
    places, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    outputs = tl.program_id(0) * OUTPUTS + places % OUTPUTS
    rows = tl.minimum(outputs, width - 1) + places // OUTPUTS * width
    matrix = weight + rows.to(tl.int64)[:, None] * INPUTS + cols[None, :]
    read = ()
    for index in tl.static_range(AHEAD):
        mask = (cols < INPUTS - index * COLS)[None, :]
        some = tl.load(matrix + index * COLS, mask=mask, other=0.0)
        read = read + (some,)  # type: ignore[assignment]  # noqa: RUF005 - it knows no star
    of_rows = scale + (rows // _GROUP * (INPUTS // _GROUP) if IS_BLOCKED else rows)
    wait_for_previous(PDL)
    let_next_in(PDL)
    one = tl.full((), 1.0, tl.float32)  # the scale of x
    if IS_QUANTISED and not IS_BLOCKED:
        one = tl.load(x_scale)
    elif not IS_BLOCKED:
        largest = tl.zeros((COLS,), tl.float32)
        for first in tl.static_range(0, INPUTS, COLS):
            value = tl.load(x + first + cols, mask=cols < INPUTS - first, other=0.0)
            largest = tl.maximum(largest, tl.abs(value.to(tl.float32)))
        one = tl.maximum(tl.max(largest, axis=0), _LEAST) / _LARGEST
    sums = tl.zeros((ROWS, COLS), tl.float32)
    for index in tl.static_range(AHEAD):
        first = index * COLS
        values = _quantised(x, x_scale, one, first, stride, IS_QUANTISED, IS_BLOCKED, INPUTS, COLS)
        sums += _products(read[index], values, of_rows, first, IS_BLOCKED, INPUTS, ROWS, COLS)
    for first in range(AHEAD * COLS, INPUTS, COLS):
        some = tl.load(matrix + first, mask=(cols < INPUTS - first)[None, :], other=0.0)
        values = _quantised(x, x_scale, one, first, stride, IS_QUANTISED, IS_BLOCKED, INPUTS, COLS)
        sums += _products(some, values, of_rows, first, IS_BLOCKED, INPUTS, ROWS, COLS)
    total = tl.sum(sums, axis=1)
    if not IS_BLOCKED:
        total *= one * tl.load(of_rows)
    if HAS_BIAS:
        total += tl.load(bias + rows).to(tl.float32)
    if IS_GATED:  # the products rounded as if they had been stored
        both = tl.trans(tl.reshape(total.to(out.dtype.element_ty), (2, OUTPUTS)))
        gate, up = tl.split(both)
        gate = gate.to(tl.float32)
        gated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
        total = gated * up.to(tl.float32)
    stored = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tl.store(out + stored, total.to(out.dtype.element_ty), mask=stored < width)


@triton.jit
def _quantised(
    x,
    x_scale,
    one,
    first,
    stride,
    IS_QUANTISED: tl.constexpr,
    IS_BLOCKED: tl.constexpr,
    INPUTS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Some of x in e4m3, as floats [COLS]; scaled by groups if the weight is by blocks."""
    GROUPS: tl.constexpr = COLS // _GROUP
    cols = first + tl.arange(0, COLS)
    value = tl.load(x + cols, mask=cols < INPUTS, other=0.0).to(tl.float32)
    if IS_BLOCKED:
        grouped = tl.reshape(value, (GROUPS, _GROUP))
        if IS_QUANTISED:
            groups = first // _GROUP + tl.arange(0, GROUPS)
            each = tl.load(x_scale + groups * stride, mask=groups < INPUTS // _GROUP, other=0.0)
        else:
            each = tl.maximum(tl.max(tl.abs(grouped), axis=1), _LEAST) / _LARGEST
            grouped = (grouped * (1.0 / each)[:, None]).to(tl.float8e4nv).to(tl.float32)
        value = tl.reshape(grouped * each[:, None], (COLS,))
    elif not IS_QUANTISED:
        value = (value * (1.0 / one)).to(tl.float8e4nv).to(tl.float32)
    return value


@triton.jit
def _products(
    weights,
    values,
    of_rows,
    first,
    IS_BLOCKED: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """[ROWS, COLS] in e4m3 times values [COLS]."""
    products = weights.to(tl.float32) * values[None, :]
    if IS_BLOCKED:
        GROUPS: tl.constexpr = COLS // _GROUP
        groups = first // _GROUP + tl.arange(0, GROUPS)
        is_group = (groups < INPUTS // _GROUP)[None, :]
        each = tl.load(of_rows[:, None] + groups[None, :], mask=is_group, other=0.0)
        grouped = tl.reshape(products, (ROWS, GROUPS, _GROUP)) * each[:, :, None]
        products = tl.reshape(grouped, (ROWS, COLS))
    return products
