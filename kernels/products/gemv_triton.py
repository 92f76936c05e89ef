"""A matrix times one vector, and an LM head times a few vectors, in Triton.

Bound by reading the matrix once, so enough loads must be in flight on every multiprocessor. cuBLAS
reaches less of the memory bandwidth for a single row, and for as many outputs as an LM head has
(`python -m baton.bench.kernels.products`). A matrix is constant: its first part is loaded before
the preceding kernel has ended.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..launched import cdiv, launched, next_power_of_2

MAX_FEW_ROWS = 64
_MANY_OUTPUTS = 8192
_HEAD_OUTPUTS = 32_768  # the least that counts as an LM head
_AHEAD_BYTES = 2 << 20  # of a matrix, prefetched into the L2 cache; more makes products slower
_ALIGNED = 16  # bytes, of a prefetch


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiling of few_rows_product: outputs of a program, and its loop's steps in flight."""

    outputs: int
    inputs: int  # per step
    stages: int
    warps: int = 4


def few_rows_tiling(x: Tensor, weight: Tensor) -> Tiling | None:
    """The fastest tiling on an H200; None where another kernel is used."""
    num_rows = len(x)
    if x.itemsize != 2 or num_rows > MAX_FEW_ROWS or len(weight) < _HEAD_OUTPUTS:
        return None
    if not _fits(x.device):
        return None
    return Tiling(64 if num_rows <= 16 else 128, 128, 3 if 16 < num_rows <= 32 else 4)


@functools.cache
def _fits(device: torch.device) -> bool:
    """Whether the tilings fit into shared memory (192 KiB); the interpreter has no limit."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


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
        COLS=min(1024, next_power_of_2(num_inputs)),
        num_warps=2 if num_outputs > _MANY_OUTPUTS else 4,
        **launch_options(x.device),
    )
    return out


@launched
@triton.jit
def _gemv(
    x, weight, bias, out, num_inputs, HAS_BIAS: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr
):
    # One output per program: many small programs keep more loads in flight than few large ones.
    row = tl.program_id(0)
    cols = tl.arange(0, COLS)
    matrix = weight + row.to(tl.int64) * num_inputs + cols
    # The matrix is constant: its first part is loaded before x is complete.
    begin = tl.load(matrix, mask=cols < num_inputs, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    let_next_in(PDL)
    sums = begin * tl.load(x + cols, mask=cols < num_inputs, other=0.0).to(tl.float32)
    for first in range(COLS, num_inputs, COLS):
        mask = cols < num_inputs - first
        values = tl.load(x + first + cols, mask=mask, other=0.0).to(tl.float32)
        sums += tl.load(matrix + first, mask=mask, other=0.0).to(tl.float32) * values
    total = tl.sum(sums, axis=0)
    if HAS_BIAS:
        total += tl.load(bias + row).to(tl.float32)
    tl.store(out + row, total.to(out.dtype.element_ty))


def few_rows_product(x: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling) -> Tensor:
    """x [rows <= MAX_FEW_ROWS, inputs] @ weight [outputs, inputs]^T + bias -> [rows, outputs].

    Sums in float32; a row's sums do not depend on other rows.
    """
    num_rows, num_inputs = x.shape
    num_outputs = len(weight)
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    row_bytes = num_inputs * x.itemsize
    ahead = min(_AHEAD_BYTES // len(weight), row_bytes) // _ALIGNED * _ALIGNED
    _few_rows_product[(cdiv(num_outputs, tiling.outputs),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        num_rows,
        num_outputs,
        num_inputs,
        ahead if row_bytes % _ALIGNED == 0 else 0,
        HAS_BIAS=bias is not None,
        IS_WHOLE=num_outputs % tiling.outputs == 0 and num_inputs % tiling.inputs == 0,
        ROWS=max(16, next_power_of_2(num_rows)),  # 16: a tile of the tensor cores
        TILE_OUTPUTS=tiling.outputs,
        TILE_INPUTS=tiling.inputs,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **launch_options(x.device),
    )
    return out


@launched
@triton.jit(do_not_specialize=["num_rows", "num_ahead"])
def _few_rows_product(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_outputs,
    num_inputs,
    num_ahead,
    HAS_BIAS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.arange(0, ROWS)[:, None]
    outputs = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    cols = tl.arange(0, TILE_INPUTS)[None, :]
    is_row, is_output = rows < num_rows, outputs < num_outputs
    matrix = weight + outputs.to(tl.int64)[:, None] * num_inputs
    if PDL and IS_WHOLE and num_ahead > 0:
        _prefetch(matrix, num_ahead)
    wait_for_previous(PDL)
    let_next_in(PDL)
    vectors = x + rows * num_inputs + cols
    matrix += cols
    sums = tl.zeros((ROWS, TILE_OUTPUTS), tl.float32)
    for first in range(0, num_inputs, TILE_INPUTS):
        if IS_WHOLE:
            values = tl.load(vectors + first, mask=is_row, other=0.0)
            tile = tl.load(matrix + first)
        else:
            is_col = cols < num_inputs - first
            values = tl.load(vectors + first, mask=is_row & is_col, other=0.0)
            tile = tl.load(matrix + first, mask=is_output[:, None] & is_col, other=0.0)
        sums = tl.dot(values, tile.T, sums, input_precision=PRECISION)
    if HAS_BIAS:
        sums += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    at = out + rows * num_outputs + outputs[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=is_row & is_output[None, :])


@triton.jit
def _prefetch(rows, num_bytes):
    """Prefetch the first bytes of each of `rows` into the L2 cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [rows, tl.zeros(rows.shape, tl.int32) + num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
