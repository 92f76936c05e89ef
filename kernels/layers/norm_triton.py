"""RMSNorm in Triton: with the residual sum in the same kernel, and head by head in place.

The reference is norm.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..row_room import empty_rows

_TILE_HEADS = 8


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`norm.rms_norm` of contiguous x [tokens, dim]."""
    out = empty_rows(x.shape, x)
    _launch(x, x, weight, out, eps, has_residual=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to `residual` in place and return the norm of the sum; both [tokens, dim]."""
    out = empty_rows(x.shape, x)
    _launch(x, residual, weight, out, eps, has_residual=True)
    return out


def norm_heads(qkv: Tensor, weights: tuple[Tensor, Tensor], kv_heads: int, eps: float) -> Tensor:
    """`norm.norm_heads` where the heads lie; qkv contiguous."""
    num_tokens, all_heads, dim = qkv.shape
    normed_heads = all_heads - kv_heads
    _norm_heads[(num_tokens, triton.cdiv(normed_heads, _TILE_HEADS))](
        qkv,
        *weights,
        all_heads,
        normed_heads,
        normed_heads - kv_heads,
        eps,
        DIM=dim,
        DIM_PADDED=triton.next_power_of_2(dim),
        TILE_HEADS=_TILE_HEADS,
        num_warps=2,
        **launch_options(qkv.device),
    )
    return qkv


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, *, has_residual: bool
) -> None:
    num_tokens, dim = x.shape
    block = triton.next_power_of_2(dim)
    _add_rms_norm[(num_tokens,)](
        x,
        residual,
        weight,
        out,
        dim,
        eps,
        HAS_RESIDUAL=has_residual,
        BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
        **launch_options(x.device),
    )


@triton.jit
def _add_rms_norm(
    x,
    residual,
    weight,
    out,
    dim,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * dim
    cols = tl.arange(0, BLOCK)
    mask = cols < dim
    scales = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    let_next_in(PDL)
    wait_for_previous(PDL)
    value = tl.load(x + row + cols, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        earlier = tl.load(residual + row + cols, mask=mask, other=0.0)
        value = (value.to(tl.float32) + earlier.to(tl.float32)).to(value.dtype)
        tl.store(residual + row + cols, value, mask=mask)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / dim + eps)
    normed = wide * scale * scales
    tl.store(out + row + cols, normed.to(value.dtype), mask=mask)


@triton.jit
def _norm_heads(
    qkv,
    q_weight,
    k_weight,
    all_heads,
    normed_heads,
    q_heads,
    eps,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)[:, None]
    dims = tl.arange(0, DIM_PADDED)[None, :]
    mask = (heads < normed_heads) & (dims < DIM)
    of_q = tl.load(q_weight + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    of_k = tl.load(k_weight + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    let_next_in(PDL)
    wait_for_previous(PDL)
    at = qkv + (tl.program_id(0).to(tl.int64) * all_heads + heads) * DIM + dims
    value = tl.load(at, mask=mask, other=0.0)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / DIM + eps)[:, None]
    normed = wide * scale * tl.where(heads < q_heads, of_q, of_k)
    tl.store(at, normed.to(value.dtype), mask=mask)
