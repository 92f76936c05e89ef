"""RMSNorm."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019).

    The mean is taken in float32 whatever the type of `x`.
    """
    return F.rms_norm(x, weight.shape, weight, eps)
