"""What changes a row's logits: bias, penalties, tokens that are forbidden or not allowed.

In this order, and sparse: the cost is that of the tokens named, and of the vocabulary only for rows
that say of each token whether it is allowed. The formulas are those of
vLLM and transformers; repetition is of Keskar et al. 2019 (CTRL, section 4.1):

    logit += bias
    logit  = logit / repetition if logit > 0 else logit * repetition      seen in prompt or output
    logit -= frequency * count + presence * (count > 0)                   count: in the output
    logit  = -inf                                                         forbidden, not allowed
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ..upload import upload

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Penalties:
    """`token_ids` are those that occurred, each once; `counts` how often in the output, perhaps 0.

    A repetition of 1 and a presence and frequency of 0 change nothing.
    """

    token_ids: Int64s
    counts: Int64s
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


@dataclass(frozen=True, slots=True)
class LogitAdjustment:
    """Of one row. No id may be biased twice.

    `allowed` [words] int32: bit i % 32 of word i // 32 says whether token i is; None: all are.
    """

    bias: Sequence[tuple[int, float]] = ()
    penalties: Penalties | None = None
    forbidden_ids: Sequence[int] = ()
    allowed: NDArray[np.int32] | None = None


def adjust_logits(logits: Tensor, adjustments: Sequence[LogitAdjustment]) -> Tensor:
    """Change logits [rows, vocab] float32 in place, one adjustment a row; returns them."""
    device = logits.device

    def gathered(arrays: list[ArrayLike], dtype: type[np.generic]) -> Tensor:
        return upload(np.concatenate(arrays, dtype=dtype, casting="same_kind"), device)

    def places(ids_of_rows: list[Sequence[int] | Int64s]) -> tuple[Tensor, Tensor] | None:
        lengths = [len(ids) for ids in ids_of_rows]
        if not any(lengths):
            return None
        rows = np.repeat(np.arange(len(lengths)), lengths)
        ids = [np.asarray(ids, np.int64) for ids in ids_of_rows]
        return upload(rows, device), gathered([*ids], np.int64)

    if at := places([[token_id for token_id, _ in one.bias] for one in adjustments]):
        biases = [np.array([bias for _, bias in one.bias], np.float32) for one in adjustments]
        logits[at] += gathered([*biases], np.float32)
    penalties = [one.penalties or _NONE for one in adjustments]
    if at := places([one.token_ids for one in penalties]):

        def spread(value: Callable[[Penalties], Any]) -> Tensor:
            values = [np.full(len(one.counts), value(one), np.float32) for one in penalties]
            return gathered([*values], np.float32)

        repetition = spread(lambda one: one.repetition)
        counts = gathered([one.counts for one in penalties], np.int64)
        old = logits[at]
        new = torch.where(old > 0, old / repetition, old * repetition)
        new -= spread(lambda one: one.frequency) * counts
        logits[at] = new - spread(lambda one: one.presence) * (counts > 0)
    if at := places([one.forbidden_ids for one in adjustments]):
        logits[at] = -math.inf
    _drop_not_allowed(logits, [one.allowed for one in adjustments])
    return logits


def _drop_not_allowed(logits: Tensor, masks: Sequence[NDArray[np.int32] | None]) -> None:
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    if not rows:
        return
    words = np.stack([mask for mask in masks if mask is not None])
    # As bytes: spread out, a bit takes the place of one, not of four.
    packed = upload(words.astype("<i4", copy=False).view(np.uint8), logits.device)
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    is_allowed = (packed[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[-1]].bool()
    index = upload(np.array(rows, np.int64), logits.device)
    logits[index] = logits.index_select(0, index).masked_fill_(~is_allowed, -math.inf)


_NONE = Penalties(np.empty(0, np.int64), np.empty(0, np.int64))
