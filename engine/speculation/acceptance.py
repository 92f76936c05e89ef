"""Estimates the acceptance probability of drafts from recent ones. Knows no request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_WINDOW = 64.0  # trials of a position in its decaying mean
_OWN_WINDOW = 24.0  # the same for one sequence
_PRIOR, _PRIOR_WEIGHT = 0.7, 2.0  # before any trials: high enough that drafts are tried
_OWN_PRIOR_WEIGHT = 6.0  # of the rate of all sequences, in the estimate for one
_LAST_SHARE = 0.1  # weight of the last value in a mean
_FADING = 0.995  # of a sequence's own trials, per step


@dataclass(slots=True)
class AcceptanceRate:
    """Trials and successes; older ones count less."""

    tried: float = 0.0
    accepted: float = 0.0

    def observe(self, num_tried: int, num_accepted: int, window: float) -> None:
        kept = max(0.0, 1.0 - num_tried / window)
        self.tried = self.tried * kept + num_tried
        self.accepted = self.accepted * kept + num_accepted

    def rate(self, prior: float, weight: float) -> float:
        return (self.accepted + prior * weight) / (self.tried + weight)

    def fade(self) -> None:
        """Forget slowly, so that a sequence without drafts is tried again later."""
        self.tried *= _FADING
        self.accepted *= _FADING


class Mean:
    """A mean of recent values, without the first, which includes loading or compiling."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value
        self._num_values = 0

    def observe(self, value: float) -> None:
        if self._num_values:
            self.value += max(_LAST_SHARE, 1 / self._num_values) * (value - self.value)
        self._num_values += 1


class Acceptance:
    """The acceptance rates of one engine, for up to `most` drafts per sequence."""

    def __init__(self, most: int) -> None:
        self._positions = [AcceptanceRate() for _ in range(most)]

    def observe(self, own: AcceptanceRate, num_drafts: int, num_accepted: int) -> None:
        """Record that the first `num_accepted` drafts of a sequence were accepted; drafts after the
        first rejected one are no trials."""
        num_tried = min(num_drafts, num_accepted + 1)
        own.observe(num_tried, num_accepted, _OWN_WINDOW)
        for position in range(num_tried):
            self._positions[position].observe(1, int(position < num_accepted), _WINDOW)

    def chances(
        self, owns: Sequence[AcceptanceRate], num_drafts: Sequence[int]
    ) -> NDArray[np.float64]:
        """[sequences, most]: the probability that a draft and all before it are accepted; 0 where
        there is no draft."""
        rates, prior = [], _PRIOR
        for tally in self._positions:
            prior = tally.rate(prior, _PRIOR_WEIGHT)
            rates.append(prior)
        odds = _odds(np.array(rates))
        # A sequence's own rate shifts the odds of all positions by one factor.
        mean = sum(rates) / len(rates)
        own = np.array([tally.rate(mean, _OWN_PRIOR_WEIGHT) for tally in owns])
        moved = odds * (_odds(own) / _odds(np.array(mean)))[:, None]
        chances = np.cumprod(moved / (1 + moved), axis=1)
        chances[np.arange(len(rates)) >= np.asarray(num_drafts)[:, None]] = 0.0
        return np.asarray(chances, np.float64)


def _odds(rates: NDArray[np.float64]) -> NDArray[np.float64]:
    kept = np.clip(rates, 1e-9, 1 - 1e-9)
    return np.asarray(kept / (1 - kept), np.float64)
