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
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ..upload import upload
from .sample_spec import SampleSpec

Int64s = NDArray[np.int64]


_NO_IDS = np.empty(0, np.int64)


def adjust_logits(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Change logits [rows, vocab] float32 in place, one spec a row; returns them."""
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

    bias_of_rows = [spec.params.logit_bias for spec in specs]
    if at := places([[token_id for token_id, _ in pairs] for pairs in bias_of_rows]):
        biases = [np.array([bias for _, bias in pairs], np.float32) for pairs in bias_of_rows]
        logits[at] += gathered([*biases], np.float32)
    counted = [spec.counts for spec in specs]
    if at := places([_NO_IDS if one is None else one.token_ids for one in counted]):

        def spread(penalty: str) -> Tensor:
            values = [
                np.full(len(one.counts), getattr(spec.params, penalty), np.float32)
                for spec, one in zip(specs, counted, strict=True)
                if one is not None
            ]
            return gathered([*values], np.float32)

        repetition = spread("repetition_penalty")
        counts = gathered([one.counts for one in counted if one is not None], np.int64)
        old = logits[at]
        new = torch.where(old > 0, old / repetition, old * repetition)
        new -= spread("frequency_penalty") * counts
        logits[at] = new - spread("presence_penalty") * (counts > 0)
    if at := places([spec.forbidden_ids for spec in specs]):
        logits[at] = -math.inf
    _drop_not_allowed(logits, [spec.allowed for spec in specs])
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
