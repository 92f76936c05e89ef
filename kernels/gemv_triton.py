"""A matrix times one vector, in Triton: what the products of a decode alone are.

Bound by reading the matrix once; cuBLAS reaches less of the memory's speed on a single row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [1, inputs] @ weight [outputs, inputs]^T + bias -> [1, outputs]; sums in float32."""
    num_outputs, num_inputs = weight.shape
    out = torch.empty((1, num_outputs), dtype=x.dtype, device=x.device)
    rows, cols, num_warps = _tile(num_outputs, num_inputs)
    _gemv[(triton.cdiv(num_outputs, rows),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        num_outputs,
        num_inputs,
        HAS_BIAS=bias is not None,
        ROWS=rows,
        COLS=cols,
        num_warps=num_warps,
    )
    return out


def _tile(num_outputs: int, num_inputs: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a program."""
    cols = min(1024, triton.next_power_of_2(num_inputs))
    return (4, cols, 4) if num_outputs <= 8192 else (8, cols, 4)


@triton.jit
def _gemv(
    x: Any,
    weight: Any,
    bias: Any,
    out: Any,
    num_outputs: Any,
    num_inputs: Any,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_outputs
    cols = tl.arange(0, COLS)
    matrix = weight + rows[:, None] * num_inputs + cols[None, :]
    sums = tl.zeros((ROWS, COLS), tl.float32)
    for first in range(0, num_inputs, COLS):
        is_col = cols < num_inputs - first
        values = tl.load(x + first + cols, mask=is_col, other=0.0).to(tl.float32)
        tile = tl.load(matrix + first, mask=is_row[:, None] & is_col[None, :], other=0.0)
        sums += tile.to(tl.float32) * values[None, :]
    total = tl.sum(sums, axis=1)
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + rows, total.to(out.dtype.element_ty), mask=is_row)
