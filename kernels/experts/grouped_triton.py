"""Grouped products of a mixture of experts: each tile of rows belongs to one expert.

    x [tokens, hidden] ─ rows by pair ─► gate, up ─ SiLU * up ─► [pairs by expert, inner]
                                         down ─ times the pair's weight ─► [pairs, hidden]
    sum over a token's pairs, in their order ─► [tokens, hidden]

Sums are in float32 and without atomics, so repeating a step gives the same bits. A row's result
depends on the tiles' sizes, which follow from the number of tokens, but not on other rows' values.

For weights in int4 see int4_experts_triton.py.

Weights in FP8 are multiplied with rows in floats, after conversion, or with rows in FP8 that have a
scale for each 128 inputs: rows of x are quantised by the router's product, which reads them too,
and gated rows by the program that has 128 of their outputs. The tensor cores add FP8 products with
14 bits, too few for hundreds of inputs: they add up at most 128 inputs, and these sums are scaled
and added up in float32 (two-level accumulation, DeepSeek-V3, section 3.3.2).

Consecutive programs have the same expert: up to `group` tiles of its rows with the same outputs,
then the next outputs, so that weights are read from memory once and then from the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..launched import cdiv, launched, next_power_of_2
from ..products.weights import BLOCK, FP8_MAX, LEAST_MAXIMUM
from .experts import BY_ROW, ExpertInputs, Fp8Groups, Int4Experts, StackedWeights
from .int4_experts_triton import int4_products
from .routing_triton import Choice, Order, tile_and_output
from .tiles import Cut

_SUM_BLOCK = 1024
_BLOCK = tl.constexpr(BLOCK)
_LARGEST, _LEAST = tl.constexpr(FP8_MAX), tl.constexpr(LEAST_MAXIMUM)


def gated_products(
    x: ExpertInputs, weights: StackedWeights, order: Order, num_chosen: int, rows: int, cut: Cut
) -> ExpertInputs:
    """silu(gate) * up of each pair: x [tokens, hidden] -> [pairs by expert, inner], like x.

    `order` has tiles of `rows` rows.
    """
    inner, num_pairs = weights.num_outputs // 2, len(order.pairs)
    if isinstance(x, Fp8Groups):
        assert cut.outputs == BLOCK, "a program quantises what has one scale"
        quantised = Fp8Groups.empty(num_pairs, inner, x.data.device)
        _launch(x, weights, order, None, quantised.data, quantised.scale, num_chosen, rows, cut)
        return quantised
    out = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    _launch(x, weights, order, None, out, None, num_chosen, rows, cut)
    return out


def down_products(
    gated: ExpertInputs,
    weights: StackedWeights,
    order: Order,
    choice: Choice,
    rows: int,
    cut: Cut,
    dtype: torch.dtype,
) -> Tensor:
    """Each pair's output times its weight: [pairs by expert, inner] -> [pairs, hidden], `dtype`."""
    num_pairs, hidden = len(order.pairs), weights.num_outputs
    out = torch.empty((num_pairs, hidden), dtype=dtype, device=order.pairs.device)
    _launch(gated, weights, order, choice.weights, out, None, 1, rows, cut)
    return out


def sum_pairs(products: Tensor, choice: Choice, first: int, num_local: int) -> Tensor:
    """[tokens * k, hidden] -> [tokens, hidden]: the sum of each token's pairs with this rank's
    experts, in the order of its choices."""
    num_tokens, k = choice.chosen.shape
    hidden = products.shape[1]
    out = torch.empty((num_tokens, hidden), dtype=products.dtype, device=products.device)
    block = min(_SUM_BLOCK, next_power_of_2(hidden))
    _sum_pairs[(num_tokens, cdiv(hidden, block))](
        products,
        choice.chosen,
        out,
        hidden,
        first,
        num_local,
        K=k,
        BLOCK=block,
        num_warps=4,
        **launch_options(products.device),
    )
    return out


def _launch(
    x: ExpertInputs,
    weights: StackedWeights,
    order: Order,
    shares: Tensor | None,
    out: Tensor,
    out_scale: Tensor | None,
    num_chosen: int,
    rows: int,
    cut: Cut,
) -> None:
    """The gated product if `shares` is None, else the down product."""
    if isinstance(weights, Int4Experts):
        assert isinstance(x, Tensor), "activations stay as they are"
        int4_products(x, weights, order, shares, out, num_chosen, rows, cut)
        return
    is_gated, num_inputs = shares is None, weights.num_inputs
    num_outputs = weights.num_outputs // (2 if is_gated else 1)
    num_tiles = order.tiles.shape[1]
    if weights.scaling:
        assert BLOCK % cut.inputs == 0, "a step of the loop has one scale"
        assert weights.scaling == BY_ROW or BLOCK % cut.outputs == 0, "and so has a program"
    data, scale = (x.data, x.scale) if isinstance(x, Fp8Groups) else (x, x)
    matrices: Tensor | TensorDescriptor = weights.values
    has_descriptor = cut.has_descriptor and num_inputs * weights.values.itemsize % 16 == 0
    if has_descriptor:
        rows_of_all = weights.values.view(-1, num_inputs)
        matrices = TensorDescriptor.from_tensor(rows_of_all, [cut.outputs, cut.inputs])
    _grouped_product[(num_tiles * cdiv(num_outputs, cut.outputs),)](
        data,
        scale,
        matrices,
        weights.values if weights.scale is None else weights.scale,
        order.pairs,
        order.tiles,
        order.pairs if shares is None else shares,
        out,
        out if out_scale is None else out_scale,
        num_tiles,
        weights.num_experts,
        num_chosen,
        num_outputs,
        num_inputs,
        cut.group,
        IS_GATED=is_gated,
        SCALING=weights.scaling,
        HAS_FP8_ROWS=isinstance(x, Fp8Groups),
        ROWS=rows,
        OUTPUTS=cut.outputs,
        INPUTS=cut.inputs,
        IS_TURNED=cut.is_turned,
        HAS_DESCRIPTOR=has_descriptor,
        IS_WHOLE=num_outputs % cut.outputs == 0 and num_inputs % cut.inputs == 0,
        PRECISION="ieee" if data.dtype == torch.float32 else "tf32",
        num_warps=cut.warps,
        num_stages=cut.stages,
        **launch_options(data.device),
    )


@launched
@triton.jit(do_not_specialize=["num_tiles", "num_experts", "num_chosen", "group"])
def _grouped_product(
    x,
    x_scale,
    weights,
    scale,
    pairs,
    tiles,
    shares,
    out,
    out_scale,
    num_tiles,
    num_experts,
    num_chosen,
    num_outputs,
    num_inputs,
    group,
    IS_GATED: tl.constexpr,
    SCALING: tl.constexpr,
    HAS_FP8_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_TURNED: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, first_output = tile_and_output(num_tiles, num_outputs, group, OUTPUTS)
    outputs = first_output + tl.arange(0, OUTPUTS)
    is_output = outputs < num_outputs
    let_next_in(PDL)
    wait_for_previous(PDL)
    expert = tl.load(tiles + tile)
    if expert >= num_experts:
        return
    rows = tl.load(tiles + num_tiles + tile) + tl.arange(0, ROWS)
    is_row = rows < tl.load(tiles + 2 * num_tiles + tile)
    pair = tl.load(pairs + rows, mask=is_row, other=0)
    # A padding row reads an existing row, and is not stored.
    sources = (pair // num_chosen if IS_GATED else tl.where(is_row, rows, 0)).to(tl.int64)
    cols = tl.arange(0, INPUTS)
    vectors = x + sources[:, None] * num_inputs + cols[None, :]
    num_groups = tl.cdiv(num_inputs, _BLOCK)
    of_sources = x_scale + sources * num_groups
    num_rows = num_outputs * 2 if IS_GATED else num_outputs  # of an expert's matrix
    first_row = expert * num_rows + first_output
    if not HAS_DESCRIPTOR:
        matrix = weights + first_row.to(tl.int64) * num_inputs
        matrix += tl.arange(0, OUTPUTS).to(tl.int64)[:, None] * num_inputs + cols[None, :]
        up_at = num_outputs.to(tl.int64) * num_inputs
    of_blocks = scale + expert.to(tl.int64) * tl.cdiv(num_rows, _BLOCK) * num_groups
    of_blocks += first_output // _BLOCK * num_groups
    up_blocks_at = num_outputs // _BLOCK * num_groups
    if IS_TURNED:
        sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
        up_sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    else:
        sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
        up_sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    ones = tl.full((ROWS,), 1.0, tl.float32)
    IS_SCALED: tl.constexpr = HAS_FP8_ROWS or SCALING == 2
    for first in range(0, num_inputs, INPUTS):
        is_col = (cols < num_inputs - first)[None, :]
        if IS_WHOLE:
            values = tl.load(vectors + first)
        else:
            values = tl.load(vectors + first, mask=is_col, other=0.0)
        if HAS_DESCRIPTOR:  # rows beyond the last output are loaded, but not stored
            some = weights.load([first_row, first])
        elif IS_WHOLE:
            some = tl.load(matrix + first)
        else:
            some = tl.load(matrix + first, mask=is_output[:, None] & is_col, other=0.0)
        # Loaded before both products, so that the loads overlap with them.
        of_rows = tl.load(of_sources + first // _BLOCK) if HAS_FP8_ROWS else ones
        by, up_by = of_rows, of_rows
        if SCALING == 2:
            by = of_rows * tl.load(of_blocks + first // _BLOCK)
            if IS_GATED:
                up_by = of_rows * tl.load(of_blocks + up_blocks_at + first // _BLOCK)
        sums = _add_product(sums, values, some, by, IS_SCALED, IS_TURNED, PRECISION)
        if IS_GATED:
            if HAS_DESCRIPTOR:
                some = weights.load([first_row + num_outputs, first])
            elif IS_WHOLE:
                some = tl.load(matrix + up_at + first)
            else:
                mask = is_output[:, None] & is_col
                some = tl.load(matrix + up_at + first, mask=mask, other=0.0)
            up_sums = _add_product(up_sums, values, some, up_by, IS_SCALED, IS_TURNED, PRECISION)
    if SCALING == 1:
        of_outputs = scale + expert.to(tl.int64) * num_rows + outputs
        each = tl.load(of_outputs, mask=is_output, other=0.0)
        sums *= each[:, None] if IS_TURNED else each[None, :]
        if IS_GATED:
            each = tl.load(of_outputs + num_outputs, mask=is_output, other=0.0)
            up_sums *= each[:, None] if IS_TURNED else each[None, :]
    if IS_GATED:
        sums = sums / (1.0 + tl.exp(-sums)) * up_sums
        to = rows
        if HAS_FP8_ROWS:
            largest = tl.maximum(tl.max(tl.abs(sums), axis=0 if IS_TURNED else 1), _LEAST)
            at = out_scale + rows * tl.cdiv(num_outputs, _BLOCK) + first_output // _BLOCK
            tl.store(at, largest / _LARGEST, mask=is_row)
            each = _LARGEST / largest
            sums *= each[None, :] if IS_TURNED else each[:, None]
    else:
        to = pair
        share = tl.load(shares + pair, mask=is_row, other=0.0)
        sums *= share[None, :] if IS_TURNED else share[:, None]
    if IS_TURNED:
        at = out + to.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
        mask = is_row[None, :] & is_output[:, None]
    else:
        at = out + to.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
        mask = is_row[:, None] & is_output[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_product(
    sums,
    values,
    some,
    by,
    IS_SCALED: tl.constexpr,
    IS_TURNED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """sums + values [rows, inputs] @ some [outputs, inputs]^T, transposed if IS_TURNED; the product
    times `by` [rows] if IS_SCALED."""
    some = some.to(values.dtype)
    if not IS_SCALED:
        if IS_TURNED:
            sums = tl.dot(some, values.T, sums, input_precision=PRECISION)
        else:
            sums = tl.dot(values, some.T, sums, input_precision=PRECISION)
    elif IS_TURNED:
        sums += tl.dot(some, values.T, input_precision=PRECISION) * by[None, :]
    else:
        sums += tl.dot(values, some.T, input_precision=PRECISION) * by[:, None]
    return sums


@launched
@triton.jit(do_not_specialize=["first", "num_local"])
def _sum_pairs(
    products,
    chosen,
    out,
    hidden,
    first,
    num_local,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < hidden
    let_next_in(PDL)
    wait_for_previous(PDL)
    sums = tl.zeros((BLOCK,), tl.float32)
    for index in tl.static_range(K):
        expert = tl.load(chosen + token * K + index)
        is_local = (expert >= first) & (expert < first + num_local)
        is_there = cols < tl.where(is_local, hidden, 0)
        at = products + (token * K + index) * hidden + cols
        sums += tl.load(at, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + cols, sums.to(out.dtype.element_ty), mask=mask)
