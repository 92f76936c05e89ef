"""The experts of a few tokens: each pair by itself, without order and without matrix units.

    x ─► gate, up ─ SiLU * up ─► [pairs, inner] ─► down, times the pairs' weights, summed ─► out

Bound by reading the weights of the experts that were chosen: thousands of small programs keep
enough loads in flight. Two tokens with the same expert read it twice, the second time perhaps from
the L2 cache. Sums are in float32, in an order that no other token changes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from .experts import Mixture
from .routing_triton import Choice
from .tiles import Few

_PAIR_COLS = 8192  # inputs of all of a token's pairs, that a program has in registers


def experts_of_few(x: Tensor, mixture: Mixture, choice: Choice, plan: Few) -> Tensor:
    """x [tokens, hidden] -> the weighted sum of each token's experts on this rank, like x."""
    num_tokens, hidden = x.shape
    k, inner = mixture.num_chosen, mixture.inner
    padded = triton.next_power_of_2(k)
    gated = torch.empty((num_tokens * k, inner), dtype=x.dtype, device=x.device)
    options = {"num_warps": plan.warps, **launch_options(x.device)}
    local = (mixture.first, mixture.num_local)
    _gated[(num_tokens * k, triton.cdiv(inner, plan.gated))](
        x,
        mixture.gate_up.values,
        choice.chosen,
        gated,
        hidden,
        inner,
        *local,
        K=k,
        OUTPUTS=plan.gated,
        COLS=min(plan.inputs, triton.next_power_of_2(hidden)),
        **options,
    )
    out = torch.empty_like(x)
    _down[(num_tokens, triton.cdiv(hidden, plan.down))](
        gated,
        mixture.down.values,
        choice.chosen,
        choice.weights,
        out,
        hidden,
        inner,
        *local,
        K=k,
        K_PADDED=padded,
        OUTPUTS=plan.down,
        COLS=max(16, min(plan.inputs, triton.next_power_of_2(inner), _PAIR_COLS // padded)),
        **options,
    )
    return out


@triton.jit(do_not_specialize=["first_local", "num_local"])
def _gated(
    x,
    weights,
    chosen,
    out,
    hidden,
    inner,
    first_local,
    num_local,
    K: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLS: tl.constexpr,
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
    for first in range(0, hidden, COLS):
        is_col = cols < hidden - first
        mask = is_output & is_col[None, :]
        some = tl.load(gate + first, mask=mask, other=0.0).to(tl.float32)
        more = tl.load(up + first, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(vector + first, mask=is_col, other=0.0).to(tl.float32)[None, :]
        sums += some * values
        up_sums += more * values
    total = tl.sum(sums, axis=1)
    gated = total / (1.0 + tl.exp(-total)) * tl.sum(up_sums, axis=1)
    at = out + pair.to(tl.int64) * inner + outputs
    tl.store(at, gated.to(out.dtype.element_ty), mask=outputs < inner)


@triton.jit(do_not_specialize=["first_local", "num_local"])
def _down(
    gated,
    weights,
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
    for index in tl.static_range(OUTPUTS):
        output = first_output + index
        row = tl.minimum(output, hidden - 1)  # one that is there
        matrix = weights + (expert.to(tl.int64) * hidden + row)[:, None] * inner + cols[None, :]
        sums = tl.zeros((K_PADDED, COLS), tl.float32)
        for first in range(0, inner, COLS):
            mask = is_local[:, None] & (cols < inner - first)[None, :]
            values = tl.load(vectors + first, mask=mask, other=0.0).to(tl.float32)
            sums += tl.load(matrix + first, mask=mask, other=0.0).to(tl.float32) * values
        total = tl.sum(tl.sum(sums, axis=1) * share, axis=0)
        tl.store(
            out + token * hidden + output, total.to(out.dtype.element_ty), mask=output < hidden
        )
