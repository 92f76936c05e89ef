"""The experts of a few tokens: each pair separately, without ordering and without tensor cores.

    x ─► gate, up ─ SiLU * up ─► [pairs, inner] ─► down, times the pairs' weights, summed ─► out

Bound by reading the weights of the chosen experts: hundreds of programs that issue all their loads
at once keep enough loads in flight, those of `down` before its inputs are computed. Two tokens with
the same expert read it twice, the second time perhaps from the L2 cache. Weights in FP8 become
floats in registers, activations are not quantised. Sums are in float32, in an order that does not
depend on other tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..launched import cdiv, launched, next_power_of_2
from ..products.weights import BLOCK
from .experts import ExpertWeights, Mixture
from .routing_triton import Choice
from .tiles import Few

_STEP_OF_THREAD = 32  # weights of `down` per thread and step
_BYTES_AHEAD = 256  # of weights, loaded early, in registers per thread
_BLOCK = tl.constexpr(BLOCK)


def experts_of_few(x: Tensor, mixture: Mixture, choice: Choice, plan: Few) -> Tensor:
    """x [tokens, hidden] -> the weighted sum of each token's experts on this rank, like x."""
    num_tokens, hidden = x.shape
    k, inner = mixture.num_chosen, mixture.inner
    padded = next_power_of_2(k)
    gated = torch.empty((num_tokens * k, inner), dtype=x.dtype, device=x.device)
    options = {"num_warps": plan.warps, **launch_options(x.device)}
    local = (mixture.first, mixture.num_local)
    gate_up, down = mixture.gate_up, mixture.down
    assert isinstance(gate_up, ExpertWeights) and isinstance(down, ExpertWeights)
    least = BLOCK if gate_up.scaling else 16
    _gated[(num_tokens * k, cdiv(inner, plan.gated))](
        x,
        gate_up.values,
        gate_up.values if gate_up.scale is None else gate_up.scale,
        choice.chosen,
        gated,
        *local,
        HIDDEN=hidden,
        INNER=inner,
        K=k,
        OUTPUTS=plan.gated,
        COLS=max(least, min(plan.inputs, next_power_of_2(hidden))),
        SCALING=gate_up.scaling,
        **options,
    )
    out = torch.empty_like(x)
    cols = 32 * plan.warps * _STEP_OF_THREAD // (padded * plan.down)
    cols = max(least, min(cols, next_power_of_2(inner)))
    ahead = _BYTES_AHEAD // (_STEP_OF_THREAD * down.values.element_size())
    _down[(num_tokens, cdiv(hidden, plan.down))](
        gated,
        down.values,
        down.values if down.scale is None else down.scale,
        choice.chosen,
        choice.weights,
        out,
        *local,
        HIDDEN=hidden,
        INNER=inner,
        K=k,
        K_PADDED=padded,
        OUTPUTS=plan.down,
        COLS=cols,
        AHEAD=min(ahead, cdiv(inner, cols)),  # steps
        SCALING=down.scaling,
        **options,
    )
    return out


@launched
@triton.jit(do_not_specialize=["first_local", "num_local"])
def _gated(
    x,
    weights,
    scale,
    chosen,
    out,
    first_local,
    num_local,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    K: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLS: tl.constexpr,
    SCALING: tl.constexpr,
    PDL: tl.constexpr,
):
    pair = tl.program_id(0)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    cols = tl.arange(0, COLS)
    is_output = outputs < INNER
    wait_for_previous(PDL)
    let_next_in(PDL)  # `_down` may read the choice
    expert = (tl.load(chosen + pair) - first_local).to(tl.int64)
    if (expert < 0) | (expert >= num_local):
        return
    vector = x + (pair // K).to(tl.int64) * HIDDEN + cols
    gate = weights + (expert * 2 * INNER + outputs)[:, None] * HIDDEN + cols[None, :]
    up = gate + INNER * HIDDEN
    sums = tl.zeros((OUTPUTS, COLS), tl.float32)
    up_sums = tl.zeros((OUTPUTS, COLS), tl.float32)
    if SCALING == 1:
        of_outputs = scale + expert * 2 * INNER + outputs
        gate_scale = tl.load(of_outputs, mask=is_output, other=0.0)
        up_scale = tl.load(of_outputs + INNER, mask=is_output, other=0.0)
    if SCALING == 2:  # all outputs of a program are in one row of blocks
        num_blocks: tl.constexpr = (HIDDEN + _BLOCK - 1) // _BLOCK
        row = expert * (2 * INNER // _BLOCK) + tl.program_id(1) * OUTPUTS // _BLOCK
        of_gate = scale + (row + tl.arange(0, 1)) * num_blocks
        of_up = of_gate + INNER // _BLOCK * num_blocks
    for first in tl.static_range(0, HIDDEN, COLS):
        is_col = cols < HIDDEN - first
        mask = is_output[:, None] & is_col[None, :]
        some = tl.load(gate + first, mask=mask, other=0.0).to(tl.float32)
        more = tl.load(up + first, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(vector + first, mask=is_col, other=0.0).to(tl.float32)[None, :]
        if SCALING == 2:
            sums += some * _scaled(values, of_gate, first, HIDDEN, 1, COLS)
            up_sums += more * _scaled(values, of_up, first, HIDDEN, 1, COLS)
        else:
            sums += some * values
            up_sums += more * values
    total, up_total = tl.sum(sums, axis=1), tl.sum(up_sums, axis=1)
    if SCALING == 1:
        total *= gate_scale
        up_total *= up_scale
    gated = total / (1.0 + tl.exp(-total)) * up_total
    at = out + pair.to(tl.int64) * INNER + outputs
    tl.store(at, gated.to(out.dtype.element_ty), mask=is_output)


@launched
@triton.jit(do_not_specialize=["first_local", "num_local"])
def _down(
    gated,
    weights,
    scale,
    chosen,
    shares,
    out,
    first_local,
    num_local,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLS: tl.constexpr,
    AHEAD: tl.constexpr,
    SCALING: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.minimum(outputs, HIDDEN - 1)  # clamped to existing ones
    places, cols = tl.arange(0, K_PADDED), tl.arange(0, COLS)
    let_next_in(PDL)
    # `_gated` starts this kernel after its own wait: the choice is complete, its results are not.
    pairs = token * K + places
    expert = (tl.load(chosen + pairs, mask=places < K, other=-1) - first_local).to(tl.int64)
    is_local = (places < K) & (expert >= 0) & (expert < num_local)
    share = tl.load(shares + pairs, mask=is_local, other=0.0)
    of_rows = (expert * HIDDEN)[:, None] + rows[None, :]
    matrix = weights + of_rows[:, :, None] * INNER + cols[None, None, :]
    if SCALING == 1:
        factor = share[:, None] * tl.load(scale + of_rows, mask=is_local[:, None], other=0.0)
    else:
        factor = share[:, None]
    row = expert * tl.cdiv(HIDDEN, _BLOCK) + tl.program_id(1) * OUTPUTS // _BLOCK
    of_blocks = scale + tl.where(is_local, row, 0) * tl.cdiv(INNER, _BLOCK)
    read = ()
    for index in tl.static_range(AHEAD):
        mask = is_local[:, None] & (cols < INNER - index * COLS)[None, :]
        some = tl.load(matrix + index * COLS, mask=mask[:, None, :], other=0.0)
        read = read + (some,)  # type: ignore[assignment]  # noqa: RUF005 - it knows no star
    wait_for_previous(PDL)
    vectors = gated + pairs[:, None] * INNER + cols[None, :]
    sums = tl.zeros((K_PADDED, OUTPUTS, COLS), tl.float32)
    for index in tl.static_range(AHEAD):
        mask = is_local[:, None] & (cols < INNER - index * COLS)[None, :]
        values = tl.load(vectors + index * COLS, mask=mask, other=0.0).to(tl.float32)
        if SCALING == 2:
            values = _scaled(values, of_blocks, index * COLS, INNER, K_PADDED, COLS)
        sums += read[index].to(tl.float32) * values[:, None, :]
    for first in range(AHEAD * COLS, INNER, COLS):
        mask = is_local[:, None] & (cols < INNER - first)[None, :]
        values = tl.load(vectors + first, mask=mask, other=0.0).to(tl.float32)
        if SCALING == 2:
            values = _scaled(values, of_blocks, first, INNER, K_PADDED, COLS)
        some = tl.load(matrix + first, mask=mask[:, None, :], other=0.0)
        sums += some.to(tl.float32) * values[:, None, :]
    total = tl.sum(tl.sum(sums, axis=2) * factor, axis=0)
    at = out + token * HIDDEN + outputs
    tl.store(at, total.to(out.dtype.element_ty), mask=outputs < HIDDEN)


@triton.jit
def _scaled(values, scales, first, num_inputs, ROWS: tl.constexpr, COLS: tl.constexpr):
    """values [ROWS, COLS], inputs from `first` on, each times the scale of its block. `scales`
    [ROWS]: pointers to each row's first block scale."""
    BLOCKS: tl.constexpr = COLS // _BLOCK
    blocks = first // _BLOCK + tl.arange(0, BLOCKS)
    is_block = (blocks < tl.cdiv(num_inputs, _BLOCK))[None, :]
    each = tl.load(scales[:, None] + blocks[None, :], mask=is_block, other=0.0)
    scaled = tl.reshape(values, (ROWS, BLOCKS, _BLOCK)) * each[:, :, None]
    return tl.reshape(scaled, (ROWS, COLS))
