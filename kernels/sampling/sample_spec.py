"""How one token is to be sampled: a request's parameters, and what its sequence adds to them.

Made by the scheduler, read by the samplers of both devices. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...core.request.sampling_params import SamplingParams


def has_penalties(params: SamplingParams) -> bool:
    """Whether a token's logits depend on which tokens came before it."""
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return penalties != (1.0, 0.0, 0.0)


def needs_more_than_noise(params: SamplingParams) -> bool:
    """Whether temperature and noise are not enough to draw a token, whatever came before it."""
    has_filters = params.top_k is not None or params.top_p < 1 or params.min_p > 0
    return bool(params.logit_bias) or (has_filters and params.temperature > 0)


class Counts(Protocol):
    """What penalties look at, as parallel arrays: every token id that occurred, once, and how often
    in the output, perhaps 0."""

    @property
    def token_ids(self) -> NDArray[np.int64]: ...

    @property
    def counts(self) -> NDArray[np.int64]: ...


class SampleSpec(NamedTuple):
    """How to sample the token behind a slice's last position. A tuple: a step makes hundreds.

    `forbidden_ids` must not be chosen (min_tokens). `counts` is there if the parameters have any
    penalty, and valid until `launch` returns. Each of `fork_keys` asks for one more sample from the
    same logits. `allowed` [words]: bit i % 32 of word i // 32 says whether token i may be chosen,
    and none of words that are not there may; None: each may. `num_candidates`: of a beam, how many
    of its likeliest tokens are wanted.
    """

    params: SamplingParams
    key: int  # request.token_key of the position that is sampled; 0 where none is drawn
    forbidden_ids: Sequence[int] = ()
    counts: Counts | None = None
    fork_keys: tuple[int, ...] = ()
    allowed: NDArray[np.int32] | None = None
    num_candidates: int = 0

    @property
    def changes_logits(self) -> bool:
        """Whether anything is to be added to, or taken from, the logits."""
        params, _, forbidden_ids, counts, _, allowed, _ = self
        has_sparse = bool(forbidden_ids or params.logit_bias)
        return has_sparse or counts is not None or allowed is not None

    @property
    def needs_more_than_noise(self) -> bool:
        """Whether temperature and noise are not all there is to the token."""
        return self.changes_logits or needs_more_than_noise(self.params)
