"""A matrix times one vector or a few, in Triton: what the products of small decodes are.

Bound by reading the matrix once. cuBLAS reaches less of the memory's speed on a single row, and on
up to 16 for as many outputs as an LM head has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import launch_options, let_next_in, wait_for_previous

MAX_FEW_ROWS = 16  # a tile of the matrix units
_MANY_OUTPUTS = 8192
_TILE_OUTPUTS, _TILE_INPUTS = 32, 128


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [1, inputs] @ weight [outputs, inputs]^T + bias -> [1, outputs]; sums in float32."""
    num_outputs, num_inputs = weight.shape
    out = torch.empty((1, num_outputs), dtype=x.dtype, device=x.device)
    _gemv[(num_outputs,)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        num_inputs,
        HAS_BIAS=bias is not None,
        COLS=min(1024, triton.next_power_of_2(num_inputs)),
        num_warps=2 if num_outputs > _MANY_OUTPUTS else 4,
        **launch_options(x.device),
    )
    return out


@triton.jit
def _gemv(
    x,
    weight,
    bias,
    out,
    num_inputs,
    HAS_BIAS: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
):
    # One row to a program: thousands of small programs keep more loads in flight than few large.
    row = tl.program_id(0)
    cols = tl.arange(0, COLS)
    matrix = weight + row.to(tl.int64) * num_inputs + cols
    # The matrix is constant: its first part is on the way before x is known.
    let_next_in(PDL)
    begin = tl.load(matrix, mask=cols < num_inputs, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    sums = begin * tl.load(x + cols, mask=cols < num_inputs, other=0.0).to(tl.float32)
    for first in range(COLS, num_inputs, COLS):
        mask = cols < num_inputs - first
        values = tl.load(x + first + cols, mask=mask, other=0.0).to(tl.float32)
        sums += tl.load(matrix + first, mask=mask, other=0.0).to(tl.float32) * values
    total = tl.sum(sums, axis=0)
    if HAS_BIAS:
        total += tl.load(bias + row).to(tl.float32)
    tl.store(out + row, total.to(out.dtype.element_ty))


def few_rows_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows <= MAX_FEW_ROWS, inputs] @ weight [outputs, inputs]^T -> [rows, outputs].

    A sum does not depend on the other rows.
    """
    (num_rows, num_inputs), num_outputs = x.shape, len(weight)
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    _few_rows_product[(triton.cdiv(num_outputs, _TILE_OUTPUTS),)](
        x,
        weight,
        out,
        num_rows,
        num_outputs,
        num_inputs,
        ROWS=MAX_FEW_ROWS,
        TILE_OUTPUTS=_TILE_OUTPUTS,
        TILE_INPUTS=_TILE_INPUTS,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=2,
        num_stages=4,
        **launch_options(x.device),
    )
    return out


@triton.jit
def _few_rows_product(
    x,
    weight,
    out,
    num_rows,
    num_outputs,
    num_inputs,
    ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_in(PDL)
    wait_for_previous(PDL)
    rows = tl.arange(0, ROWS)[:, None]
    outputs = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    cols = tl.arange(0, TILE_INPUTS)[None, :]
    matrix = weight + outputs.to(tl.int64)[:, None] * num_inputs + cols
    vectors = x + rows * num_inputs + cols
    sums = tl.zeros((ROWS, TILE_OUTPUTS), tl.float32)
    for first in range(0, num_inputs, TILE_INPUTS):
        is_col = cols < num_inputs - first
        values = tl.load(vectors + first, mask=(rows < num_rows) & is_col, other=0.0)
        tile = tl.load(matrix + first, mask=(outputs < num_outputs)[:, None] & is_col, other=0.0)
        sums = tl.dot(values, tile.T, sums, input_precision=PRECISION)
    at = out + rows * num_outputs + outputs[None, :]
    mask = (rows < num_rows) & (outputs < num_outputs)[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=mask)
