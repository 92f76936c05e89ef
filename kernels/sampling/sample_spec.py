"""How to sample one token: a request's parameters and the state of its sequence.

Created for each step and read by the samplers of CPU and GPU. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.request.sampling_params import SAMPLING, SamplingParams

_FILTERS = {name: one.default for name, one in SAMPLING.items() if one.is_filter}
_filters_of = attrgetter(*_FILTERS)
_NO_FILTERS = (*_FILTERS.values(),)


def has_penalties(params: SamplingParams) -> bool:
    """Whether a token's logits depend on which tokens came before it."""
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return penalties != (1.0, 0.0, 0.0)


def needs_more_than_noise(params: SamplingParams) -> bool:
    """Whether drawing a token always needs more than temperature and noise."""
    has_filters = _filters_of(params) != _NO_FILTERS
    return bool(params.logit_bias) or (has_filters and params.temperature > 0)


class Counts(NamedTuple):
    """The tokens that penalties apply to, as parallel arrays: each distinct token id of prompt and
    output, and its number of occurrences in the output, which may be 0."""

    token_ids: NDArray[np.int64]
    counts: NDArray[np.int64]


class SampleSpec(NamedTuple):
    """How to sample the next token after a slice's last position. A tuple, since a step creates
    hundreds of specs.

    `forbidden_ids` must not be chosen (min_tokens). `counts` is given if the parameters have a
    penalty, and valid until `launch` returns. Each of `fork_keys` requests one more sample from the
    same logits. `allowed` [words]: bit i % 32 of word i // 32 is set if token i may be chosen;
    tokens past its end may not; None: all may. `num_candidates`: how many of the likeliest tokens a
    beam needs.
    """

    params: SamplingParams
    key: int  # request.token_key of the sampled position; 0 if nothing is drawn
    forbidden_ids: Sequence[int] = ()
    counts: Counts | None = None
    fork_keys: tuple[int, ...] = ()
    allowed: NDArray[np.int32] | None = None
    num_candidates: int = 0

    @property
    def changes_logits(self) -> bool:
        """Whether logits are adjusted before the temperature is applied."""
        params, _, forbidden_ids, counts, _, allowed, _ = self
        has_sparse = bool(forbidden_ids or params.logit_bias)
        return has_sparse or counts is not None or allowed is not None

    @property
    def needs_more_than_noise(self) -> bool:
        """Whether sampling does more than apply temperature and noise."""
        return self.changes_logits or needs_more_than_noise(self.params)
