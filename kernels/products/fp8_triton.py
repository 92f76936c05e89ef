"""Products with weights in FP8, in Triton: of one row of floats, and of few rows in FP8.

Bound by reading the weight. The matrix units add up 128 inputs at a time, with fewer bits than
float32 has; their sums are added up in float32, where scales of blocks are multiplied in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from .gemv_triton import _ALIGNED, _prefetch
from .weights import BLOCK, BlockScaled, Fp8Rows, Fp8Weight

_AHEAD_BYTES = 2 << 20  # of a weight, fetched into the L2 cache early
_GROUP = tl.constexpr(BLOCK)


@dataclass(frozen=True, slots=True)
class GemvTiling:
    """How fp8_gemv is cut up: a program's outputs (of a gated one twice as many) and warps."""

    outputs: int
    columns: int
    warps: int


@dataclass(frozen=True, slots=True)
class Fp8Tiling:
    """How fp8_few_rows is cut up: a program's outputs, steps of 128 inputs in flight, warps."""

    outputs: int
    stages: int
    warps: int = 4


@dataclass(frozen=True, slots=True)
class Fp8Stages:
    """How fp8_streamed_product is cut up: a program's outputs, and what it has in flight."""

    outputs: int
    chunks: int  # of 128 inputs, of a stage
    count: int
    early: int  # so many stages before the kernel in front has ended


def fp8_gemv(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None,
    tiling: GemvTiling,
    *,
    is_gated: bool = False,
) -> Tensor:
    """x [1, inputs] @ weight [outputs, inputs]^T + bias -> [1, outputs]; x stays as it is.

    `is_gated`: `ops.silu_and_mul` of the same, half as many outputs.
    """
    num_outputs, num_inputs = weight.shape
    num_outputs //= 2 if is_gated else 1
    out = torch.empty((1, num_outputs), dtype=x.dtype, device=x.device)
    _fp8_gemv[(triton.cdiv(num_outputs, tiling.outputs),)](
        x,
        weight.data,
        weight.scale,
        weight.scale if bias is None else bias,
        out,
        num_outputs,
        num_inputs,
        HAS_BIAS=bias is not None,
        IS_GATED=is_gated,
        IS_BLOCKED=isinstance(weight, BlockScaled),
        OUTPUTS=tiling.outputs,
        COLS=min(tiling.columns, max(BLOCK, triton.next_power_of_2(num_inputs))),
        num_warps=tiling.warps,
        **launch_options(x.device),
    )
    return out


@triton.jit
def _fp8_gemv(
    x,
    weight,
    scale,
    bias,
    out,
    num_outputs,
    num_inputs,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_BLOCKED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
):
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < num_outputs
    cols = tl.arange(0, COLS)
    rows = weight + outputs.to(tl.int64)[:, None] * num_inputs + cols[None, :]
    up_rows = rows + num_outputs.to(tl.int64) * num_inputs
    # The weight is constant: its first part is on the way before x is known.
    let_next_in(PDL)
    mask = is_output[:, None] & (cols < num_inputs)[None, :]
    tile = tl.load(rows, mask=mask, other=0.0)
    up_tile = tile
    if IS_GATED:
        up_tile = tl.load(up_rows, mask=mask, other=0.0)
    wait_for_previous(PDL)
    sums = tl.zeros((OUTPUTS, COLS), tl.float32)
    up_sums = tl.zeros((OUTPUTS, COLS), tl.float32)
    num_groups = tl.cdiv(num_inputs, _GROUP)
    # All outputs of a program are of one row of blocks.
    of_blocks = scale + tl.program_id(0) * OUTPUTS // _GROUP * num_groups
    of_up_blocks = of_blocks + num_outputs // _GROUP * num_groups
    for first in range(0, num_inputs, COLS):
        if first > 0:
            mask = is_output[:, None] & (cols < num_inputs - first)[None, :]
            tile = tl.load(rows + first, mask=mask, other=0.0)
            if IS_GATED:
                up_tile = tl.load(up_rows + first, mask=mask, other=0.0)
        values = tl.load(x + first + cols, mask=cols < num_inputs - first, other=0.0)
        values = values.to(tl.float32)
        if IS_BLOCKED:
            sums += (
                tile.to(tl.float32) * _scaled(values, of_blocks, first, num_groups, COLS)[None, :]
            )
            if IS_GATED:
                scaled = _scaled(values, of_up_blocks, first, num_groups, COLS)
                up_sums += up_tile.to(tl.float32) * scaled[None, :]
        else:
            sums += tile.to(tl.float32) * values[None, :]
            if IS_GATED:
                up_sums += up_tile.to(tl.float32) * values[None, :]
    total, up_total = tl.sum(sums, axis=1), tl.sum(up_sums, axis=1)
    if not IS_BLOCKED:
        total *= tl.load(scale + outputs, mask=is_output, other=0.0)
        if IS_GATED:
            up_total *= tl.load(scale + num_outputs + outputs, mask=is_output, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)
        if IS_GATED:
            up_bias = tl.load(bias + num_outputs + outputs, mask=is_output, other=0.0)
            up_total += up_bias.to(tl.float32)
    type: tl.constexpr = out.dtype.element_ty
    if IS_GATED:  # the products rounded as if they had been stored
        gate = total.to(type).to(tl.float32)
        gated = (gate / (1.0 + tl.exp(-gate))).to(type).to(tl.float32)
        total = gated * up_total.to(type).to(tl.float32)
    tl.store(out + outputs, total.to(type), mask=is_output)


@triton.jit
def _scaled(values, scales, first, num_groups, COLS: tl.constexpr):
    """values [COLS], inputs from `first` on, each times the scale of its block."""
    NUM_GROUPS: tl.constexpr = COLS // _GROUP
    groups = first // _GROUP + tl.arange(0, NUM_GROUPS)
    each = tl.load(scales + groups, mask=groups < num_groups, other=0.0)
    return tl.reshape(tl.reshape(values, (NUM_GROUPS, _GROUP)) * each[:, None], (COLS,))


def fp8_few_rows(x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, tiling: Fp8Tiling) -> Tensor:
    """x [rows, inputs] @ weight [outputs, inputs]^T + bias -> [rows, outputs].

    Meant for up to 64 rows, and right for any number. A row's sums do not depend on the others.
    """
    num_rows, num_inputs = x.data.shape
    num_outputs = len(weight)
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.data.device)
    ahead = min(_AHEAD_BYTES // num_outputs, num_inputs) // _ALIGNED * _ALIGNED
    rows = min(64, max(16, triton.next_power_of_2(num_rows)))
    is_whole = num_outputs % tiling.outputs == 0 and num_inputs % BLOCK == 0
    _fp8_few_rows[(triton.cdiv(num_outputs, tiling.outputs), triton.cdiv(num_rows, rows))](
        x.data,
        x.scale,
        weight.data,
        weight.scale,
        weight.scale if bias is None else bias,
        out,
        num_rows,
        num_outputs,
        num_inputs,
        x.room,
        ahead if num_inputs % _ALIGNED == 0 else 0,
        HAS_BIAS=bias is not None,
        IS_BLOCKED=isinstance(weight, BlockScaled),
        IS_WHOLE=is_whole,
        ROWS=rows,
        OUTPUTS=tiling.outputs,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **launch_options(x.data.device),
    )
    return out


@triton.jit(do_not_specialize=["num_rows", "room", "num_ahead"])
def _fp8_few_rows(
    x,
    x_scale,
    weight,
    scale,
    bias,
    out,
    num_rows,
    num_outputs,
    num_inputs,
    room,
    num_ahead,
    HAS_BIAS: tl.constexpr,
    IS_BLOCKED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    cols = tl.arange(0, _GROUP)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    matrix = weight + outputs.to(tl.int64)[:, None] * num_inputs
    let_next_in(PDL)
    if PDL and IS_WHOLE and num_ahead > 0:
        _prefetch(matrix, num_ahead)
    wait_for_previous(PDL)
    matrix += cols[None, :]
    vectors = x + rows.to(tl.int64)[:, None] * num_inputs + cols[None, :]
    num_groups = tl.cdiv(num_inputs, _GROUP)
    of_blocks = scale + outputs // _GROUP * num_groups
    # The weight comes first: the matrix units take 64 rows at once of what does.
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for group in range(num_groups):
        first = group * _GROUP
        if IS_WHOLE:
            tile = tl.load(matrix + first)
            values = tl.load(vectors + first, mask=is_row[:, None], other=0.0)
        else:
            is_col = (cols < num_inputs - first)[None, :]
            tile = tl.load(matrix + first, mask=is_output[:, None] & is_col, other=0.0)
            values = tl.load(vectors + first, mask=is_row[:, None] & is_col, other=0.0)
        part = tl.dot(tile, values.T, out_dtype=tl.float32)
        if IS_BLOCKED:
            of_rows = tl.load(x_scale + group * room + rows, mask=is_row, other=0.0)
            of_outputs = tl.load(of_blocks + group, mask=is_output, other=0.0)
            part *= of_outputs[:, None] * of_rows[None, :]
        sums += part
    if not IS_BLOCKED:
        of_rows = tl.load(x_scale + rows, mask=is_row, other=0.0)
        of_outputs = tl.load(scale + outputs, mask=is_output, other=0.0)
        sums *= of_outputs[:, None] * of_rows[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    at = out + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    mask = is_row[:, None] & is_output[None, :]
    tl.store(at, tl.trans(sums).to(out.dtype.element_ty), mask=mask)
