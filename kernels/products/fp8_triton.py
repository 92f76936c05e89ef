"""Products of few rows with weights in FP8, in Triton.

Bound by reading the weight. The tensor cores add up 128 inputs at a time, with fewer bits than
float32 has; these sums are multiplied by block scales and added up in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..launched import cdiv, launched, next_power_of_2
from .gemv_triton import _ALIGNED, _prefetch
from .weights import BLOCK, FP8_MAX, LEAST_MAXIMUM, BlockScaled, Fp8Rows, Fp8Weight

_AHEAD_BYTES = 2 << 20  # of a weight, prefetched into the L2 cache
_GROUP = tl.constexpr(BLOCK)
_LARGEST, _LEAST = tl.constexpr(FP8_MAX), tl.constexpr(LEAST_MAXIMUM)


@dataclass(frozen=True, slots=True)
class Fp8Tiling:
    """Tiling of fp8_few_rows: outputs of a program, steps of 128 inputs in flight, warps."""

    outputs: int
    stages: int
    warps: int = 4


@dataclass(frozen=True, slots=True)
class Fp8Stages:
    """Tiling of fp8_streamed_product: outputs of a program, and its pipeline stages."""

    outputs: int
    chunks: int  # of 128 inputs, per stage
    count: int  # of stages
    early: int  # stages whose weights are loaded before the preceding kernel has ended
    is_turned: bool = False  # transposed: outputs are the rows of wgmma, vectors its columns
    shares: int = 1  # split-K: shares of the inputs, a program each
    warps: int = 4  # that multiply; four for each 64 outputs


def fp8_few_rows(x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, tiling: Fp8Tiling) -> Tensor:
    """x [rows, inputs] @ weight [outputs, inputs]^T + bias -> [rows, outputs].

    Tuned for up to 64 rows, correct for any number. A row's sums do not depend on other rows.
    """
    num_rows, num_inputs = x.data.shape
    num_outputs = len(weight)
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.data.device)
    ahead = min(_AHEAD_BYTES // num_outputs, num_inputs) // _ALIGNED * _ALIGNED
    rows = min(64, max(16, next_power_of_2(num_rows)))
    is_whole = num_outputs % tiling.outputs == 0 and num_inputs % BLOCK == 0
    _fp8_few_rows[(cdiv(num_outputs, tiling.outputs), cdiv(num_rows, rows))](
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


@launched
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
    if PDL and IS_WHOLE and num_ahead > 0:
        _prefetch(matrix, num_ahead)
    wait_for_previous(PDL)
    let_next_in(PDL)
    matrix += cols[None, :]
    vectors = x + rows.to(tl.int64)[:, None] * num_inputs + cols[None, :]
    num_groups = tl.cdiv(num_inputs, _GROUP)
    of_blocks = scale + outputs // _GROUP * num_groups
    # The weight is the first operand, of which the tensor cores take 64 rows at once.
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


@triton.jit
def quantised_groups(value):
    """value [groups, 128] in float32 -> value divided by its scales, and the scales [groups]."""
    each = tl.maximum(tl.max(tl.abs(value), axis=1), _LEAST) / _LARGEST
    return value * (1.0 / each)[:, None], each
