"""RMSNorm with the residual sum in the same kernel, in Triton. The reference is norm.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import launch_options, let_next_in, wait_for_previous


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`norm.rms_norm` of contiguous x [tokens, dim]."""
    out = torch.empty_like(x)
    _launch(x, x, weight, out, eps, has_residual=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to `residual` in place and return the norm of the sum; both [tokens, dim]."""
    out = torch.empty_like(x)
    _launch(x, residual, weight, out, eps, has_residual=True)
    return out


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
