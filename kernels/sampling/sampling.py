"""From logits to tokens: adjustment, temperature, min-p, top-k, top-p, noise from a key.

    noise[id] = gumbel(mix64(key + (id + 1) * GOLDEN))        splitmix64's stream seeded by key
    token     = argmax(filtered(adjusted(logits) / temperature) + noise)

which draws from the softmax of the filtered logits (Gumbel-max). No generator, no state: a token
depends on its own logits and key, never on the batch. The integers are exact on every device.
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

_GOLDEN = 0x9E3779B97F4A7C15
_MIN_TEMPERATURE = 1e-5  # below it is greedy in float32, and division would overflow
_LARGEST_BELOW_ONE = 1 - 2.0**-24
_LOW_32 = 0xFFFF_FFFF
_NO_IDS = np.empty(0, np.int64)

Int64s = NDArray[np.int64]


def sample(logits: Tensor, specs: Sequence[SampleSpec]) -> tuple[Tensor, Tensor]:
    """logits [rows, vocab] -> token ids [rows] int64 and their log-probabilities [rows] float32.

    A temperature of 0 is greedy: it ignores filters and key, and takes the lowest id of equals. The
    log-probability is under the unadjusted, unfiltered distribution at temperature 1, whatever the
    row asks for; it is NaN if the logits are no distribution (NaN or +inf among them), and the
    token then means nothing.
    """
    logits = logits.float()
    scores = logits
    adjusted = [i for i, spec in enumerate(specs) if spec.changes_logits]
    if adjusted:
        index = _on_device(adjusted, logits.device)
        changed = adjust_logits(logits.index_select(0, index), [specs[i] for i in adjusted])
        scores = logits.index_copy(0, index, changed)
    drawn = [i for i, spec in enumerate(specs) if spec.params.temperature > 0]
    if drawn:
        index = _on_device(drawn, logits.device)
        noisy = _noisy(scores.index_select(0, index), [specs[i] for i in drawn])
        scores = scores.index_copy(0, index, noisy)
    token_ids = scores.argmax(-1)
    return token_ids, token_logprobs(logits, token_ids)


def adjust_logits(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Change logits [rows, vocab] float32 in place, one spec a row; returns them.

    In this order, and sparse: the cost is that of the tokens named, and of the vocabulary only for
    rows that have a mask of allowed tokens. The formulas are those of vLLM and transformers;
    repetition is of Keskar et al. 2019 (CTRL, section 4.1):

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
    words = np.stack([mask for mask in masks if mask is not None])
    # As bytes: spread out, a bit takes the place of one, not of four.
    packed = upload(words.astype("<i4", copy=False).view(np.uint8), logits.device)
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    is_allowed = (packed[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[-1]].bool()
    index = upload(np.array(rows, np.int64), logits.device)
    logits[index] = logits.index_select(0, index).masked_fill_(~is_allowed, -math.inf)


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


def candidates(logits: Tensor, specs: Sequence[SampleSpec], k: int) -> tuple[Tensor, ...]:
    """The k likeliest tokens of each row by its adjusted logits: ids [rows, k] int64, scores [rows,
    k] float32, and their log-probabilities [rows, k] float32 under the unadjusted distribution.

    Scores are log-probabilities under the adjusted one, temperature 1; order as of top_logprobs.
    """
    logits = logits.float()
    changed = [i for i, spec in enumerate(specs) if spec.changes_logits]
    if not changed:
        ids, scores = top_logprobs(logits, k)
        return ids, scores, scores
    index = _on_device(changed, logits.device)
    adjusted = adjust_logits(logits.index_select(0, index), [specs[i] for i in changed])
    ids, scores = top_logprobs(logits.index_copy(0, index, adjusted), k)
    return ids, scores, logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)


def _noisy(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """The rows' scaled, filtered logits plus their noise."""
    device, vocab_size = logits.device, logits.shape[-1]
    rows = [spec.params for spec in specs]
    temperatures = _on_device([max(row.temperature, _MIN_TEMPERATURE) for row in rows], device)
    scaled = logits / temperatures[:, None]
    limited = [i for i, row in enumerate(rows) if row.min_p > 0]
    if limited:
        index = _on_device(limited, device)
        min_p = _on_device([rows[i].min_p for i in limited], device)
        scaled.index_copy_(0, index, drop_unlikely(scaled.index_select(0, index), min_p))
    top_ks = [vocab_size if row.top_k is None else min(row.top_k, vocab_size) for row in rows]
    filtered = [i for i, row in enumerate(rows) if top_ks[i] < vocab_size or row.top_p < 1]
    if filtered:
        index = _on_device(filtered, device)
        top_k = _on_device([top_ks[i] for i in filtered], device)
        top_p = _on_device([rows[i].top_p for i in filtered], device)
        kept = filter_logits(scaled.index_select(0, index), top_k, top_p)
        scaled.index_copy_(0, index, kept)
    keys = _on_device([as_signed(spec.key) for spec in specs], device)
    return scaled.add_(gumbel_noise(keys, vocab_size))


def drop_unlikely(logits: Tensor, min_p: Tensor) -> Tensor:
    """Set to -inf what is less likely than min_p [rows] times the likeliest. logits [rows, vocab].

    Min-p of Nguyen et al. 2024, "Turning Up the Heat", section 3.
    """
    least = logits.amax(-1) + min_p.log()
    return logits.masked_fill(logits < least[:, None], -math.inf)


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set what the filters drop to -inf. logits [rows, vocab], top_k and top_p [rows].

    Top-k keeps the k largest and what equals the k-th; top-p then keeps, in falling order, each
    token before which less than p of the remaining probability lies. One token is always kept.
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


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [rows, vocab] float32 for keys [rows], int64 bit patterns.

    From a uniform v in (0, 1): -log(-log(1 - v)). Small v make the large noise that decides, and
    float32 is finest near 0, so the tail is exact down to v = 2**-64.
    """
    ids = torch.arange(1, vocab_size + 1, device=keys.device)
    bits = mix64(keys[:, None] + ids * as_signed(_GOLDEN))
    v = _shift_right(bits, 1).float().mul_(2.0**-63).add_(2.0**-64)
    return v.clamp_(max=_LARGEST_BELOW_ONE).neg_().log1p_().neg_().log_().neg_()


def mix64(value: Tensor) -> Tensor:
    """core.request.request.mix64 on int64 bit patterns; products wrap around."""
    value = (value ^ _shift_right(value, 30)) * as_signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift_right(value, 27)) * as_signed(0x94D049BB133111EB)
    return value ^ _shift_right(value, 31)


def as_signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit integer."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _on_device(values: Sequence[int] | Sequence[float], device: torch.device) -> Tensor:
    """int64, or float32, without waiting for the device."""
    return upload(torch.tensor(values).numpy(), device)


def _shift_right(value: Tensor, count: int) -> Tensor:
    """Logical shift: `>>` alone would drag the sign bit along."""
    return (value >> count) & ((1 << (64 - count)) - 1)
