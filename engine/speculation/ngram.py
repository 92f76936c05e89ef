"""Drafts from the sequence itself: the tokens that followed the same n-gram before.

    tokens   ... def area ( self ) : return self . width ...  def side ( self ) :
                          [  n-gram  ] └── drafts ──►                  [  n-gram  ]

The longest n-gram that occurred before, at its last position (Saxena 2023, "Prompt Lookup
Decoding"). Drafts that reach the end of the tokens repeat from their own beginning. Keeps no state:
drafts depend only on the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .proposer import Context


class NgramProposer:
    """A Proposer. Its time grows with the length of a sequence: 10 us for 4k tokens."""

    takes_steps = False

    def __init__(self, max_drafts: int, longest: int, shortest: int) -> None:
        """N-grams of `longest` down to `shortest` tokens, at least one."""
        self.max_drafts = max_drafts
        self._longest, self._shortest = longest, shortest

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        """See Proposer."""
        return [self._drafts(np.asarray(one.token_ids), one.max_drafts) for one in contexts]

    def _drafts(self, tokens: NDArray[np.integer], most: int) -> list[int]:
        distance = self._distance(tokens)
        if distance is None:
            return []
        drafts: list[int] = tokens[len(tokens) - distance :][:most].tolist()
        while len(drafts) < most:
            drafts.append(drafts[len(drafts) - distance])
        return drafts

    def _distance(self, tokens: NDArray[np.integer]) -> int | None:
        """How far before the end the same n-gram last ended; None if it did not occur before."""
        num_tokens = len(tokens)
        if num_tokens <= self._shortest:
            return None
        # Positions that equal the last token, then those that match longer n-grams.
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        found = None
        for length in range(1, self._longest + 1):
            if length > 1:
                ends = ends[ends >= length - 1]
                ends = ends[tokens[ends - (length - 1)] == tokens[num_tokens - length]]
            if not len(ends):
                break
            if length >= self._shortest:
                found = num_tokens - 1 - int(ends[-1])
        return found
