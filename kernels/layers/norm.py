"""RMSNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019).

    The mean is taken in float32 whatever the type of `x`.
    """
    return F.rms_norm(x, weight.shape, weight, eps)


def norm_heads(qkv: Tensor, weights: tuple[Tensor, Tensor], kv_heads: int, eps: float) -> Tensor:
    """Norm each head of q by the first weight [dim], each of k by the second; v stays.

    qkv [tokens, heads + 2 kv_heads, dim] -> the same, contiguous.
    """
    q, k, v = qkv.tensor_split((-2 * kv_heads, -kv_heads), dim=1)

    def normed(heads: Tensor, weight: Tensor) -> Tensor:
        # Over rows that lie behind each other, as everywhere: the order of sums may depend on it.
        return rms_norm(heads.reshape(-1, heads.shape[-1]), weight, eps).view(heads.shape)

    return torch.cat((normed(q, weights[0]), normed(k, weights[1]), v), dim=1)
