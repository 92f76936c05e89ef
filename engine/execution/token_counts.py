"""Which tokens a sequence has seen, and how often it has put each out: what penalties look at.

Grows with the sequence, so that a decode step costs one update and no pass over the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


class TokenCounts:
    """Parallel arrays: every token id that occurred once, and its count in the output."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        ids = np.unique(np.asarray(prompt_token_ids, np.int64))
        self._ids = np.resize(ids, 2 * len(ids) + 16)
        self._counts = np.zeros(len(self._ids), np.int64)
        self._places = {token_id: place for place, token_id in enumerate(ids.tolist())}
        self._num_taken = len(prompt_token_ids)

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Count the outputs of the whole sequence's `token_ids` that are new."""
        for token_id in token_ids[self._num_taken :]:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._ids):
                self._ids = np.resize(self._ids, 2 * place)
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
            self._counts[place] += 1
        self._num_taken = len(token_ids)

    @property
    def token_ids(self) -> Int64s:
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> Int64s:
        return self._counts[: len(self._places)]
