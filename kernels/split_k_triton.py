"""A matrix times a few rows, in Triton: the products of decodes.

    inputs ──►  │ split 0 │ split 1 │ split 2 │
    outputs  │  │  p0,0   │  p0,1   │  p0,2   │ ─► the last program of a tile adds up the splits
             ▼  │  p1,0   │  p1,1   │  p1,2   │ ─►

Bound by reading the matrix once, so that enough loads must be in flight on every multiprocessor: a
projection has too few tiles of outputs for that, and its inputs are split (split-K). What a program
reads of the matrix is constant, and is on its way into the L2 cache before the kernel in front has
ended. Splits are added in their order, whoever does it, and a row's sums do not depend on the
others: the same bits every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import launch_options, let_next_in, wait_for_previous

MAX_ROWS = 64
MAX_TILES = 8192  # of outputs
_PREFETCHED_STEPS = tl.constexpr(2)
_LINE = tl.constexpr(64)  # elements of 2 bytes in what a prefetch brings


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut up: a program's tile, and how many programs share one."""

    outputs: int
    inputs: int  # of one step of its loop
    splits: int
    stages: int
    warps: int


def split_k_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, arrivals: Tensor, tiling: Tiling
) -> Tensor:
    """x [rows <= MAX_ROWS, inputs] @ weight [outputs, inputs]^T + bias -> [rows, outputs].

    arrivals [MAX_TILES] int32 are zero before and after; products that may run at the same time
    need their own. Sums in float32.
    """
    (num_rows, num_inputs), num_outputs = x.shape, len(weight)
    num_tiles = triton.cdiv(num_outputs, tiling.outputs)
    rows = max(16, triton.next_power_of_2(num_rows))  # 16: a tile of the matrix units
    steps = triton.cdiv(num_inputs, tiling.inputs)
    steps_each = triton.cdiv(steps, tiling.splits)
    splits = triton.cdiv(steps, steps_each)
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    partials = out  # nothing to join
    if splits > 1:
        shape = (splits, num_tiles, rows, tiling.outputs)
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    _split_k_product[(num_tiles, splits)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        partials,
        arrivals,
        num_rows,
        num_outputs,
        num_inputs,
        steps_each,
        HAS_BIAS=bias is not None,
        IS_WHOLE=num_outputs % tiling.outputs == 0
        and num_inputs % (steps_each * tiling.inputs) == 0,
        ROWS=rows,
        TILE_OUTPUTS=tiling.outputs,
        TILE_INPUTS=tiling.inputs,
        IS_SPLIT=splits > 1,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **launch_options(x.device),
    )
    return out


@triton.jit(do_not_specialize=["num_steps"])
def _split_k_product(
    x,
    weight,
    bias,
    out,
    partials,
    arrivals,
    num_rows,
    num_outputs,
    num_inputs,
    num_steps,
    HAS_BIAS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    begin = split * num_steps * TILE_INPUTS
    rows = tl.arange(0, ROWS)[:, None]
    outputs = tile * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    cols = tl.arange(0, TILE_INPUTS)[None, :]
    is_row, is_output = rows < num_rows, outputs < num_outputs
    matrix = weight + outputs.to(tl.int64)[:, None] * num_inputs + begin
    let_next_in(PDL)
    if PDL and IS_WHOLE:
        for step in range(tl.minimum(num_steps, _PREFETCHED_STEPS)):
            _prefetch(matrix + step * TILE_INPUTS, TILE_INPUTS)
    wait_for_previous(PDL)
    vectors = x + rows * num_inputs + begin + cols
    matrix += cols
    sums = tl.zeros((ROWS, TILE_OUTPUTS), tl.float32)
    for step in range(num_steps):
        first = step * TILE_INPUTS
        if IS_WHOLE:
            values = tl.load(vectors + first, mask=is_row, other=0.0)
            part = tl.load(matrix + first)
        else:
            is_col = cols < num_inputs - begin - first
            values = tl.load(vectors + first, mask=is_row & is_col, other=0.0)
            part = tl.load(matrix + first, mask=is_output[:, None] & is_col, other=0.0)
        sums = tl.dot(values, part.T, sums, input_precision=PRECISION)

    is_last = True
    if IS_SPLIT:
        places = rows * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)[None, :]
        of_tile = partials + tile.to(tl.int64) * ROWS * TILE_OUTPUTS + places
        stride = tl.num_programs(0).to(tl.int64) * ROWS * TILE_OUTPUTS
        tl.store(of_tile + split * stride, sums, mask=is_row)
        tl.debug_barrier()  # all threads have stored before one of them says so
        is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == tl.num_programs(1) - 1
        if is_last:
            tl.store(arrivals + tile, 0)
            sums = tl.zeros((ROWS, TILE_OUTPUTS), tl.float32)
            for index in range(tl.num_programs(1)):
                sums += tl.load(
                    of_tile + index * stride, mask=is_row, other=0.0, cache_modifier=".cg"
                )
    if is_last:
        if HAS_BIAS:
            sums += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
        at = out + rows * num_outputs + outputs[None, :]
        tl.store(at, sums.to(out.dtype.element_ty), mask=is_row & is_output[None, :])


@triton.jit
def _prefetch(matrix, TILE_INPUTS: tl.constexpr):
    """Bring rows of TILE_INPUTS elements, of which `matrix` [rows, 1] has the first, into L2."""
    lines = matrix + tl.arange(0, TILE_INPUTS // _LINE)[None, :] * _LINE
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [lines],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
