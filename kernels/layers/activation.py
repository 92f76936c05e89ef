"""The gated activation of the MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU (Shazeer 2020): silu(gate) * up. [tokens, 2 * dim], gate first -> [tokens, dim]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
