"""Log-probabilities as they travel: of one token, with the likeliest others beside it.

They are of the model's own distribution: temperature 1, before bias, penalties, masks and filters.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """`logprob` is the token's own; `top` are (token id, logprob), likeliest first, equals by id.

    `top` is as long as was requested, and holds the token itself only if it is among these.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
