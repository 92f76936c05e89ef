"""Rows of many experts times their weights: each tile of rows belongs to one expert.

    x [tokens, hidden] ─ rows by pair ─► gate, up ─ SiLU * up ─► [pairs by expert, inner]
                                         down ─ times the pair's weight ─► [pairs, hidden]
    sum over a token's pairs, in their order ─► [tokens, hidden]

Sums are in float32 and no program adds to what another one wrote: the same step gives the same
bits again. A row's result depends on the tiles' sizes, which follow from the number of tokens, and
not on what the other rows hold.

Programs that follow each other have the same expert: up to `group` tiles of its rows with the same
outputs, then the next outputs, so that weights come from memory once and then from the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from .experts import ExpertWeights
from .routing_triton import Choice, Order
from .tiles import Cut

_SUM_BLOCK = 1024


def gated_products(
    x: Tensor, weights: ExpertWeights, order: Order, num_chosen: int, rows: int, cut: Cut
) -> Tensor:
    """silu(gate) * up of each pair: x [tokens, hidden] -> [pairs by expert, inner].

    `order` was cut into tiles of `rows`.
    """
    inner = weights.num_outputs // 2
    out = torch.empty((len(order.pairs), inner), dtype=x.dtype, device=x.device)
    _launch(x, weights, order, None, out, num_chosen, inner, rows, cut)
    return out


def down_products(
    gated: Tensor, weights: ExpertWeights, order: Order, choice: Choice, rows: int, cut: Cut
) -> Tensor:
    """Each pair's output times its weight: [pairs by expert, inner] -> [pairs, hidden]."""
    hidden = weights.num_outputs
    out = torch.empty((len(order.pairs), hidden), dtype=gated.dtype, device=gated.device)
    _launch(gated, weights, order, choice.weights, out, 1, hidden, rows, cut)
    return out


def sum_pairs(products: Tensor, choice: Choice, first: int, num_local: int) -> Tensor:
    """[tokens * k, hidden] -> [tokens, hidden]: of each token's pairs with this rank's experts, in
    the order of its choices."""
    num_tokens, k = choice.chosen.shape
    hidden = products.shape[1]
    out = torch.empty((num_tokens, hidden), dtype=products.dtype, device=products.device)
    block = min(_SUM_BLOCK, triton.next_power_of_2(hidden))
    _sum_pairs[(num_tokens, triton.cdiv(hidden, block))](
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
    x: Tensor,
    weights: ExpertWeights,
    order: Order,
    shares: Tensor | None,
    out: Tensor,
    num_chosen: int,
    num_outputs: int,
    rows: int,
    cut: Cut,
) -> None:
    num_tiles = order.tiles.shape[1]
    num_inputs = weights.num_inputs
    _grouped_product[(num_tiles * triton.cdiv(num_outputs, cut.outputs),)](
        x,
        weights.values,
        order.pairs,
        order.tiles,
        order.pairs if shares is None else shares,
        out,
        num_tiles,
        weights.num_experts,
        num_chosen,
        num_outputs,
        num_inputs,
        cut.group,
        IS_GATED=shares is None,
        ROWS=rows,
        OUTPUTS=cut.outputs,
        INPUTS=cut.inputs,
        IS_TURNED=cut.is_turned,
        IS_WHOLE=num_outputs % cut.outputs == 0 and num_inputs % cut.inputs == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=cut.warps,
        num_stages=cut.stages,
        **launch_options(x.device),
    )


@triton.jit(do_not_specialize=["num_tiles", "num_experts", "num_chosen", "group"])
def _grouped_product(
    x,
    weights,
    pairs,
    tiles,
    shares,
    out,
    num_tiles,
    num_experts,
    num_chosen,
    num_outputs,
    num_inputs,
    group,
    IS_GATED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_TURNED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    per_group = tl.cdiv(num_outputs, OUTPUTS) * group
    first_tile = program // per_group * group
    group_size = tl.minimum(num_tiles - first_tile, group)
    tile = first_tile + program % per_group % group_size
    outputs = program % per_group // group_size * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < num_outputs
    let_next_in(PDL)
    wait_for_previous(PDL)
    expert = tl.load(tiles + tile)
    if expert >= num_experts:
        return
    rows = tl.load(tiles + num_tiles + tile) + tl.arange(0, ROWS)
    is_row = rows < tl.load(tiles + 2 * num_tiles + tile)
    pair = tl.load(pairs + rows, mask=is_row, other=0)
    # A row that is none gets the values of one that is there, and is not stored.
    sources = pair // num_chosen if IS_GATED else tl.where(is_row, rows, 0)
    cols = tl.arange(0, INPUTS)
    vectors = x + sources.to(tl.int64)[:, None] * num_inputs + cols[None, :]
    num_rows = num_outputs * 2 if IS_GATED else num_outputs  # of an expert's matrix
    matrix = weights + expert.to(tl.int64) * num_rows * num_inputs
    matrix += outputs.to(tl.int64)[:, None] * num_inputs + cols[None, :]
    up_at = num_outputs.to(tl.int64) * num_inputs
    if IS_TURNED:
        sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
        up_sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    else:
        sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
        up_sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(0, num_inputs, INPUTS):
        if IS_WHOLE:
            values = tl.load(vectors + first)
            some = tl.load(matrix + first)
        else:
            is_col = (cols < num_inputs - first)[None, :]
            values = tl.load(vectors + first, mask=is_col, other=0.0)
            some = tl.load(matrix + first, mask=is_output[:, None] & is_col, other=0.0)
        sums = _add_product(sums, values, some, IS_TURNED, PRECISION)
        if IS_GATED:
            if IS_WHOLE:
                some = tl.load(matrix + up_at + first)
            else:
                is_col = (cols < num_inputs - first)[None, :]
                mask = is_output[:, None] & is_col
                some = tl.load(matrix + up_at + first, mask=mask, other=0.0)
            up_sums = _add_product(up_sums, values, some, IS_TURNED, PRECISION)
    if IS_GATED:
        sums = sums / (1.0 + tl.exp(-sums)) * up_sums
        to = rows
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
def _add_product(sums, values, some, IS_TURNED: tl.constexpr, PRECISION: tl.constexpr):
    """sums + values [rows, inputs] times some [outputs, inputs], or the product turned."""
    if IS_TURNED:
        sums = tl.dot(some, values.T, sums, input_precision=PRECISION)
    else:
        sums = tl.dot(values, some.T, sums, input_precision=PRECISION)
    return sums


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
