"""Samples tokens from logits: temperature, and noise from a key. Penalties, masks and filters are
in logit_adjustment.py.

    noise[id] = gumbel(mix64(key + (id + 1) * GOLDEN))        splitmix64's stream seeded by key
    token     = argmax(filtered(adjusted(logits) / temperature) + noise)

This draws from the softmax of the filtered logits (Gumbel-max). There is no generator state: a
token depends only on its logits and key, not on the batch. Integer arithmetic is the same on every
device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..upload import upload_numbers
from .logit_adjustment import adjust_logits, filter_scaled
from .sample_spec import SampleSpec, needs_more_than_noise

_GOLDEN = 0x9E3779B97F4A7C15
_MIN_TEMPERATURE = 1e-5  # below it is greedy in float32, and division would overflow
_LARGEST_BELOW_ONE = 1 - 2.0**-24


def sample(logits: Tensor, specs: Sequence[SampleSpec]) -> tuple[Tensor, Tensor]:
    """logits [rows, vocab] -> token ids [rows] int64 and their log-probabilities [rows] float32.

    Temperature 0 is greedy: it ignores filters and key, and the lowest id wins a tie. The
    log-probability is always of the unadjusted, unfiltered distribution at temperature 1. It is NaN
    if the logits contain NaN or +inf; the token is then invalid.
    """
    logits = logits.float()
    scores = adjusted(logits, specs)
    drawn = [i for i, spec in enumerate(specs) if spec.params.temperature > 0]
    if drawn:
        index = upload_numbers(drawn, logits.device)
        noisy = _noisy(scores.index_select(0, index), [specs[i] for i in drawn])
        scores = scores.index_copy(0, index, noisy)
    token_ids = scores.argmax(-1)
    return token_ids, token_logprobs(logits, token_ids)


def adjusted(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """logits [rows, vocab] float32 adjusted by their specs; the same tensor if no row changes."""
    changing = [i for i, spec in enumerate(specs) if spec.changes_logits]
    if not changing:
        return logits
    index = upload_numbers(changing, logits.device)
    changed = adjust_logits(logits.index_select(0, index), [specs[i] for i in changing])
    return logits.index_copy(0, index, changed)


def token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """logits [rows, vocab], token_ids [rows] int64 -> log-probabilities [rows] float32."""
    logits = logits.float()
    return logits.gather(-1, token_ids[:, None])[:, 0] - logits.logsumexp(-1)


def _noisy(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """The rows' scaled, filtered logits plus their noise."""
    device, vocab_size = logits.device, logits.shape[-1]
    rows = [spec.params for spec in specs]
    temperatures = upload_numbers([max(row.temperature, _MIN_TEMPERATURE) for row in rows], device)
    scaled = logits / temperatures[:, None]
    if any(map(needs_more_than_noise, rows)):
        filter_scaled(scaled, rows)
    keys = upload_numbers([as_signed(spec.key) for spec in specs], device)
    return scaled.add_(gumbel_noise(keys, vocab_size))


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [rows, vocab] float32 for keys [rows], int64 bit patterns.

    From a uniform v in (0, 1): -log(-log(1 - v)). Small v give large noise, which decides the
    maximum, and float32 is finest near 0, so the tail is exact down to v = 2**-64.
    """
    ids = torch.arange(1, vocab_size + 1, device=keys.device)
    bits = mix64(keys[:, None] + ids * as_signed(_GOLDEN))
    v = _shift_right(bits, 1).float().mul_(2.0**-63).add_(2.0**-64)
    return v.clamp_(max=_LARGEST_BELOW_ONE).neg_().log1p_().neg_().log_().neg_()


def mix64(value: Tensor) -> Tensor:
    """core.request.request.mix64 on int64 bit patterns; products wrap."""
    value = (value ^ _shift_right(value, 30)) * as_signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift_right(value, 27)) * as_signed(0x94D049BB133111EB)
    return value ^ _shift_right(value, 31)


def as_signed(value: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit integer."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(value: Tensor, count: int) -> Tensor:
    """Logical shift: `>>` alone copies the sign bit."""
    return (value >> count) & ((1 << (64 - count)) - 1)
