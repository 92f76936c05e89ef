"""A router's logits: x, router ─► [parts, tokens, experts] float32, to be summed over parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..launched import cdiv, launched, next_power_of_2
from ..products.weights import BLOCK, FP8_MAX, LEAST_MAXIMUM
from .experts import Fp8Groups

_MAX_GEMV_TOKENS = 16
_GEMV_EXPERTS = 4
# Maximum of tokens; tokens and experts of a program; split-K parts of the inputs: few tiles need
# more programs with fewer steps each.
_CUTS = ((32, 16, 16, 4), (1024, 64, 64, 8), (4096, 64, 64, 1), (1 << 30, 64, 128, 1))
_LARGEST, _LEAST = tl.constexpr(FP8_MAX), tl.constexpr(LEAST_MAXIMUM)


def router_logits(x: Tensor, router: Tensor, quantised: Fp8Groups | None = None) -> Tensor:
    """x [tokens, hidden] @ router [experts, hidden]^T -> float32, whatever the type of `x`: as
    summands [parts, tokens, experts], each over a part of the inputs.

    `quantised`: is filled with x quantised, since x is read here anyway.
    """
    num_tokens, hidden = x.shape
    num_experts = len(router)
    if num_tokens <= _MAX_GEMV_TOKENS and quantised is None:
        out = torch.empty((1, num_tokens, num_experts), dtype=torch.float32, device=x.device)
        _logits_of_few[(num_tokens, cdiv(num_experts, _GEMV_EXPERTS))](
            x,
            router,
            out,
            num_experts,
            hidden,
            EXPERTS=_GEMV_EXPERTS,
            COLS=min(2048, next_power_of_2(hidden)),
            num_warps=4,
            **launch_options(x.device),
        )
        return out
    tile_tokens, tile_experts, num_parts = next(cut for most, *cut in _CUTS if num_tokens <= most)
    tile_experts = min(tile_experts, max(16, next_power_of_2(num_experts)))
    columns = cdiv(hidden, num_parts * BLOCK) * BLOCK
    num_parts = cdiv(hidden, columns)
    sizes = (num_parts, num_tokens, num_experts)
    out = torch.empty(sizes, dtype=torch.float32, device=x.device)
    grid = (cdiv(num_tokens, tile_tokens), cdiv(num_experts, tile_experts), num_parts)
    _logits[grid](
        x,
        router,
        out,
        out if quantised is None else quantised.data,
        out if quantised is None else quantised.scale,
        num_tokens,
        num_experts,
        hidden,
        columns,
        TOKENS=tile_tokens,
        EXPERTS=tile_experts,
        COLS=BLOCK if x.itemsize == 2 or quantised is not None else 32,
        QUANTISES=quantised is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=4 if x.itemsize == 2 else 2,
        **launch_options(x.device),
    )
    return out


@launched
@triton.jit
def _logits_of_few(
    x,
    router,
    out,
    num_experts,
    hidden,
    EXPERTS: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0)
    experts = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    cols = tl.arange(0, COLS)
    is_expert = experts < num_experts
    vector = x + token.to(tl.int64) * hidden + cols
    matrix = router + experts[:, None] * hidden + cols[None, :]
    let_next_in(PDL)
    # The router is constant: its first part is loaded before x is complete.
    mask = is_expert[:, None] & (cols < hidden)[None, :]
    begin = tl.load(matrix, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    sums = begin * tl.load(vector, mask=cols < hidden, other=0.0).to(tl.float32)[None, :]
    for first in range(COLS, hidden, COLS):
        is_col = cols < hidden - first
        values = tl.load(vector + first, mask=is_col, other=0.0).to(tl.float32)
        mask = is_expert[:, None] & is_col[None, :]
        sums += tl.load(matrix + first, mask=mask, other=0.0).to(tl.float32) * values[None, :]
    tl.store(out + token * num_experts + experts, tl.sum(sums, axis=1), mask=is_expert)


@launched
@triton.jit(do_not_specialize=["num_tokens"])
def _logits(
    x,
    router,
    out,
    quantised,
    scale,
    num_tokens,
    num_experts,
    hidden,
    columns,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    COLS: tl.constexpr,
    QUANTISES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    experts = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    cols = tl.arange(0, COLS)[None, :]
    is_token, is_expert = (tokens < num_tokens)[:, None], experts < num_experts
    let_next_in(PDL)
    wait_for_previous(PDL)
    vectors = x + tokens.to(tl.int64)[:, None] * hidden + cols
    matrix = router + experts[:, None] * hidden + cols
    sums = tl.zeros((TOKENS, EXPERTS), tl.float32)
    part = tl.program_id(2)
    for first in range(part * columns, tl.minimum((part + 1) * columns, hidden), COLS):
        is_col = cols < hidden - first
        values = tl.load(vectors + first, mask=is_token & is_col, other=0.0)
        tile = tl.load(matrix + first, mask=is_expert[:, None] & is_col, other=0.0)
        sums = tl.dot(values, tile.T, sums, input_precision=PRECISION)
        if QUANTISES:
            # Programs of other experts compute the same values, and do not store them.
            is_mine = (tokens < tl.where(tl.program_id(1) == 0, num_tokens, 0))[:, None]
            wide = values.to(tl.float32)
            largest = tl.maximum(tl.max(tl.abs(wide), axis=1, keep_dims=True), _LEAST)
            of_group = scale + tokens[:, None] * tl.cdiv(hidden, COLS) + first // COLS
            tl.store(of_group, largest / _LARGEST, mask=is_mine)
            to = quantised + tokens.to(tl.int64)[:, None] * hidden + first + cols
            scaled = (wide * (_LARGEST / largest)).to(quantised.dtype.element_ty)
            tl.store(to, scaled, mask=is_mine & is_col)
    at = out + (part * num_tokens + tokens)[:, None] * num_experts + experts[None, :]
    tl.store(at, sums, mask=is_token & is_expert[None, :])
