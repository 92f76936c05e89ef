"""The experts of a few tokens: each pair by itself, without order and without matrix units.

    x ─► gate, up ─ SiLU * up ─► [pairs, inner] ─► down, times the pairs' weights, summed ─► out

Bound by reading the weights of the experts that were chosen: thousands of small programs keep
enough loads in flight. Two tokens with the same expert read it twice, the second time perhaps from
the L2 cache. Weights in FP8 become floats in registers, activations stay as they are. Sums are in
float32, in an order that no other token changes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..products.weights import BLOCK
from .experts import ExpertWeights, Mixture
from .routing_triton import Choice
from .tiles import Few

_PAIR_COLS = 8192  # inputs of all of a token's pairs, that a program has in registers
_BLOCK = tl.constexpr(BLOCK)


def experts_of_few(x: Tensor, mixture: Mixture, choice: Choice, plan: Few) -> Tensor:
    """x [tokens, hidden] -> the weighted sum of each token's experts on this rank, like x."""
    num_tokens, hidden = x.shape
    k, inner = mixture.num_chosen, mixture.inner
    padded = triton.next_power_of_2(k)
    gated = torch.empty((num_tokens * k, inner), dtype=x.dtype, device=x.device)
    options = {"num_warps": plan.warps, **launch_options(x.device)}
    local = (mixture.first, mixture.num_local)
    gate_up, down = mixture.gate_up, mixture.down
    assert isinstance(gate_up, ExpertWeights) and isinstance(down, ExpertWeights)
    least = BLOCK if gate_up.scaling else 16
    _gated[(num_tokens * k, triton.cdiv(inner, plan.gated))](
        x,
        gate_up.values,
        gate_up.values if gate_up.scale is None else gate_up.scale,
        choice.chosen,
        gated,
        hidden,
        inner,
        *local,
        K=k,
        OUTPUTS=plan.gated,
        COLS=max(least, min(plan.inputs, triton.next_power_of_2(hidden))),
        SCALING=gate_up.scaling,
        **options,
    )
    out = torch.empty_like(x)
    _down[(num_tokens, triton.cdiv(hidden, plan.down))](
        gated,
        down.values,
        down.values if down.scale is None else down.scale,
        choice.chosen,
        choice.weights,
        out,
        hidden,
        inner,
        *local,
        K=k,
        K_PADDED=padded,
        OUTPUTS=plan.down,
        COLS=max(least, min(plan.inputs, triton.next_power_of_2(inner), _PAIR_COLS // padded)),
        SCALING=down.scaling,
        **options,
    )
    return out


@triton.jit(do_not_specialize=["first_local", "num_local"])
def _gated(
    x,
    weights,
    scale,
    chosen,
    out,
    hidden,
    inner,
    first_local,
    num_local,
    K: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLS: tl.constexpr,
    SCALING: tl.constexpr,
    PDL: tl.constexpr,
):
    pair = tl.program_id(0)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    cols = tl.arange(0, COLS)
    is_output = (outputs < inner)[:, None]
    let_next_in(PDL)
    wait_for_previous(PDL)
    expert = tl.load(chosen + pair) - first_local
    if (expert < 0) | (expert >= num_local):
        return
    vector = x + (pair // K).to(tl.int64) * hidden + cols
    gate = weights + (expert.to(tl.int64) * 2 * inner + outputs)[:, None] * hidden + cols[None, :]
    up = gate + inner.to(tl.int64) * hidden
    sums = tl.zeros((OUTPUTS, COLS), tl.float32)
    up_sums = tl.zeros((OUTPUTS, COLS), tl.float32)
    if SCALING == 2:  # all outputs of a program are of one row of blocks
        num_blocks = tl.cdiv(hidden, _BLOCK)
        row = expert * (2 * inner // _BLOCK) + tl.program_id(1) * OUTPUTS // _BLOCK
        of_gate = scale + (row.to(tl.int64) + tl.arange(0, 1)) * num_blocks
        of_up = of_gate + inner // _BLOCK * num_blocks
    for first in range(0, hidden, COLS):
        is_col = cols < hidden - first
        mask = is_output & is_col[None, :]
        some = tl.load(gate + first, mask=mask, other=0.0).to(tl.float32)
        more = tl.load(up + first, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(vector + first, mask=is_col, other=0.0).to(tl.float32)[None, :]
        if SCALING == 2:
            sums += some * _scaled(values, of_gate, first, hidden, 1, COLS)
            up_sums += more * _scaled(values, of_up, first, hidden, 1, COLS)
        else:
            sums += some * values
            up_sums += more * values
    total, up_total = tl.sum(sums, axis=1), tl.sum(up_sums, axis=1)
    if SCALING == 1:
        of_outputs = scale + expert.to(tl.int64) * 2 * inner + outputs
        total *= tl.load(of_outputs, mask=outputs < inner, other=0.0)
        up_total *= tl.load(of_outputs + inner, mask=outputs < inner, other=0.0)
    gated = total / (1.0 + tl.exp(-total)) * up_total
    at = out + pair.to(tl.int64) * inner + outputs
    tl.store(at, gated.to(out.dtype.element_ty), mask=outputs < inner)


@triton.jit(do_not_specialize=["first_local", "num_local"])
def _down(
    gated,
    weights,
    scale,
    chosen,
    shares,
    out,
    hidden,
    inner,
    first_local,
    num_local,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLS: tl.constexpr,
    SCALING: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    first_output = tl.program_id(1) * OUTPUTS
    places, cols = tl.arange(0, K_PADDED), tl.arange(0, COLS)
    let_next_in(PDL)
    wait_for_previous(PDL)
    expert = tl.load(chosen + token * K + places, mask=places < K, other=-1) - first_local
    is_local = (places < K) & (expert >= 0) & (expert < num_local)
    share = tl.load(shares + token * K + places, mask=is_local, other=0.0)
    vectors = gated + (token * K + places)[:, None] * inner + cols[None, :]
    if SCALING == 2:
        num_blocks = tl.cdiv(inner, _BLOCK)
        of_experts = scale + expert.to(tl.int64) * tl.cdiv(hidden, _BLOCK) * num_blocks
    for index in tl.static_range(OUTPUTS):
        output = first_output + index
        row = tl.minimum(output, hidden - 1)  # one that is there
        matrix = weights + (expert.to(tl.int64) * hidden + row)[:, None] * inner + cols[None, :]
        sums = tl.zeros((K_PADDED, COLS), tl.float32)
        for first in range(0, inner, COLS):
            mask = is_local[:, None] & (cols < inner - first)[None, :]
            values = tl.load(vectors + first, mask=mask, other=0.0).to(tl.float32)
            if SCALING == 2:
                of_row = tl.where(is_local, of_experts, scale) + row // _BLOCK * num_blocks
                values = _scaled(values, of_row, first, inner, K_PADDED, COLS)
            sums += tl.load(matrix + first, mask=mask, other=0.0).to(tl.float32) * values
        of_pairs = tl.sum(sums, axis=1) * share
        if SCALING == 1:
            at = scale + expert.to(tl.int64) * hidden + row
            of_pairs *= tl.load(at, mask=is_local, other=0.0)
        total = tl.sum(of_pairs, axis=0)
        tl.store(
            out + token * hidden + output, total.to(out.dtype.element_ty), mask=output < hidden
        )


@triton.jit
def _scaled(values, scales, first, num_inputs, ROWS: tl.constexpr, COLS: tl.constexpr):
    """values [ROWS, COLS], inputs from `first` on, each times the scale of its block: that of the
    first block of a row is at `scales` [ROWS]."""
    BLOCKS: tl.constexpr = COLS // _BLOCK
    blocks = first // _BLOCK + tl.arange(0, BLOCKS)
    is_block = (blocks < tl.cdiv(num_inputs, _BLOCK))[None, :]
    each = tl.load(scales[:, None] + blocks[None, :], mask=is_block, other=0.0)
    scaled = tl.reshape(values, (ROWS, BLOCKS, _BLOCK)) * each[:, :, None]
    return tl.reshape(scaled, (ROWS, COLS))
