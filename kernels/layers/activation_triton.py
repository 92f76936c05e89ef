"""The gated activation of the MLP in Triton. The reference is activation.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..row_room import empty_rows

_BLOCK = 1024


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`activation.silu_and_mul`: contiguous [tokens, 2 * dim] -> [tokens, dim]."""
    num_tokens, width = gate_up.shape
    dim = width // 2
    out = empty_rows((num_tokens, dim), gate_up)
    grid = (num_tokens, triton.cdiv(dim, _BLOCK))
    options = launch_options(gate_up.device)
    _silu_and_mul[grid](gate_up, out, dim, BLOCK=_BLOCK, num_warps=4, **options)
    return out


@triton.jit
def _silu_and_mul(gate_up, out, dim, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_in(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < dim
    row = gate_up + token * 2 * dim + cols
    gate = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row + dim, mask=mask, other=0.0)
    gated = (gate / (1.0 + tl.exp(-gate))).to(up.dtype).to(tl.float32)
    tl.store(out + token * dim + cols, (gated * up.to(tl.float32)).to(up.dtype), mask=mask)
