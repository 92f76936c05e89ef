"""Log-probabilities of tokens under unfiltered logits, and the likeliest tokens of each row."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_32 = 0xFFFF_FFFF


def token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """logits [rows, vocab], token_ids [rows] int64 -> [rows] float32."""
    logits = logits.float()
    return logits.gather(-1, token_ids[:, None])[:, 0] - logits.logsumexp(-1)


def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest ids [rows, k] int64 and their log-probabilities [rows, k] float32.

    Falling; equal logits by rising id, which `topk` alone leaves open: it sorts by unique keys, the
    logit's bits above the id's.
    """
    logits = logits.float() + 0.0  # -0.0 is 0.0
    vocab_size = logits.shape[-1]
    bits = logits.view(torch.int32).long()
    rising = torch.where(bits < 0, bits ^ 0x7FFF_FFFF, bits)
    ids = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = ((rising << 32) | ids).topk(min(k, vocab_size)).values
    top_ids = vocab_size - 1 - (keys & _LOW_32)
    return top_ids, logits.gather(-1, top_ids) - logits.logsumexp(-1, keepdim=True)
