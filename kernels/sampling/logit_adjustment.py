"""Adjusts a request's logits before a token is drawn: bias, penalties and masks before the
temperature is applied; min-p, top-k and top-p after it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ...core.request.sampling_params import SamplingParams
from ..upload import upload, upload_numbers
from .sample_spec import SampleSpec

_NO_IDS = np.empty(0, np.int64)

Int64s = NDArray[np.int64]


def adjust_logits(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Change logits [rows, vocab] float32 in place, with one spec per row; returns them.

    Adjustments are made in the order below and are sparse: the cost depends on the tokens that are
    named, and on the vocabulary only for rows with a mask of allowed tokens. The formulas are those
    of vLLM and transformers; the repetition penalty is from Keskar et al. 2019 (CTRL, section 4.1):

        logit += bias
        logit  = logit / repetition if logit > 0 else logit * repetition   seen in prompt or output
        logit -= frequency * count + presence * (count > 0)                count: in the output
        logit  = -inf                                                      forbidden, not allowed
    """
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
    found = [mask for mask in masks if mask is not None]
    words = np.zeros((len(rows), max(-(-logits.shape[-1] // 32), *map(len, found))), "<i4")
    for place, mask in zip(words, found, strict=True):
        place[: len(mask)] = mask
    # Unpacked as bytes, a bit takes one byte, not four.
    packed = upload(words.view(np.uint8), logits.device)
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    is_allowed = (packed[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[-1]].bool()
    index = upload(np.array(rows, np.int64), logits.device)
    logits[index] = logits.index_select(0, index).masked_fill_(~is_allowed, -math.inf)


def filter_scaled(scaled: Tensor, params: Sequence[SamplingParams]) -> None:
    """Set the tokens that each row's min-p, and then top-k and top-p, exclude to -inf, in logits
    [rows, vocab] that have been divided by their temperatures."""
    device, vocab_size = scaled.device, scaled.shape[-1]
    limited = [i for i, row in enumerate(params) if row.min_p > 0]
    if limited:
        index = upload_numbers(limited, device)
        min_p = upload_numbers([params[i].min_p for i in limited], device)
        scaled.index_copy_(0, index, drop_unlikely(scaled.index_select(0, index), min_p))
    top_ks = [vocab_size if row.top_k is None else min(row.top_k, vocab_size) for row in params]
    filtered = [i for i, row in enumerate(params) if top_ks[i] < vocab_size or row.top_p < 1]
    if filtered:
        index = upload_numbers(filtered, device)
        top_k = upload_numbers([top_ks[i] for i in filtered], device)
        top_p = upload_numbers([params[i].top_p for i in filtered], device)
        kept = filter_logits(scaled.index_select(0, index), top_k, top_p)
        scaled.index_copy_(0, index, kept)


def drop_unlikely(logits: Tensor, min_p: Tensor) -> Tensor:
    """Set tokens that are less likely than min_p [rows] times the likeliest one to -inf. logits
    [rows, vocab].

    Min-p of Nguyen et al. 2024, "Turning Up the Heat", section 3.
    """
    least = logits.amax(-1) + min_p.log()
    return logits.masked_fill(logits < least[:, None], -math.inf)


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set tokens that the filters drop to -inf. logits [rows, vocab], top_k and top_p [rows].

    Top-k keeps the k largest logits and those equal to the k-th; top-p then keeps, in descending
    order, each token whose predecessors have less than p of the remaining probability. One token is
    always kept.
    """
    ordered, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    kth = ordered.gather(-1, top_k[:, None] - 1)
    ordered = ordered.masked_fill(ordered < kth, -math.inf)
    probs = ordered.softmax(-1)
    is_dropped = probs.cumsum(-1) - probs >= top_p[:, None]
    # A p of 1 must drop nothing, but a rounded sum may reach 1 before the last token.
    is_dropped &= top_p[:, None] < 1
    is_dropped[:, 0] = False
    ordered = ordered.masked_fill_(is_dropped, -math.inf)
    return torch.empty_like(logits).scatter_(-1, ids, ordered)
