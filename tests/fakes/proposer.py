"""A proposer that knows the fake runner's tokens and is wrong at a given rate."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from baton.engine.speculation.proposer import Context

Oracle = Callable[[Context], Sequence[int]]  # the next tokens, at least `max_drafts`


class FakeProposer:
    """Proposes between none and all drafts per context, each right with probability `rate`."""

    takes_steps = False

    def __init__(self, oracle: Oracle, *, rate: float = 0.7, max_drafts: int = 4, seed: int = 0):
        self.max_drafts = max_drafts
        self.num_asked = 0
        self._oracle, self._rate = oracle, rate
        self._random = random.Random(seed)

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        self.num_asked += 1
        return [self._drafts(context) for context in contexts]

    def _drafts(self, context: Context) -> list[int]:
        count = self._random.randint(0, context.max_drafts)
        drafts = [*self._oracle(context)][:count]
        return [one if self._random.random() < self._rate else one + 1 for one in drafts]
