"""A matrix times one vector, in Triton: what the products of a single decode are.

Bound by reading the matrix once. cuBLAS reaches less of the memory's speed on a single row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import launch_options, let_next_in, wait_for_previous

_MANY_OUTPUTS = 8192


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
