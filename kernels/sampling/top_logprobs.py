"""The likeliest tokens of a row, for top log-probabilities and for beam search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .sample_spec import SampleSpec
from .sampling import adjusted

_LOW_32 = 0xFFFF_FFFF


class Candidate(NamedTuple):
    """A token that a beam may continue with. `score` is its log-probability after bias, penalties
    and masks, `logprob` that under the model's own distribution."""

    token_id: int
    score: float
    logprob: float


def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest ids [rows, k] int64 and their log-probabilities [rows, k] float32.

    In descending order, equal logits by ascending id. `topk` does not define the order of equal
    values, so it is applied to unique keys: the logit's bits above the id's.
    """
    logits = logits.float() + 0.0  # -0.0 is 0.0
    vocab_size = logits.shape[-1]
    bits = logits.view(torch.int32).long()
    rising = torch.where(bits < 0, bits ^ 0x7FFF_FFFF, bits)
    ids = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = ((rising << 32) | ids).topk(min(k, vocab_size)).values
    top_ids = vocab_size - 1 - (keys & _LOW_32)
    return top_ids, logits.gather(-1, top_ids) - logits.logsumexp(-1, keepdim=True)


def candidates(logits: Tensor, specs: Sequence[SampleSpec], k: int) -> tuple[Tensor, ...]:
    """The k likeliest tokens of each row by its adjusted logits: ids [rows, k] int64, scores [rows,
    k] float32, and their log-probabilities [rows, k] float32 under the unadjusted distribution.

    Scores are log-probabilities of the adjusted distribution at temperature 1; order as in
    top_logprobs.
    """
    logits = logits.float()
    ids, scores = top_logprobs(adjusted(logits, specs), k)
    return ids, scores, logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)
