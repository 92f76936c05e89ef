"""Which calls met the gateway's SLO. Of many calls a random sample is kept, so that memory is
bounded and targets can be chosen when it is read."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import TypeAlias

MAX_JUDGED = 200  # calls kept of a period

# Whether it finished, its worst TTFT (inf without a token) and its longest gap, in seconds.
JudgedCall: TypeAlias = tuple[bool, float, float]


@dataclass(frozen=True, slots=True)
class SloTargets:
    """The longest TTFT, and the longest gap between two tokens, of a good call."""

    ttft_slo_s: float
    tbt_slo_s: float

    def are_met(self, call: JudgedCall) -> bool:
        """Whether the call finished with every sample's TTFT and gaps within the targets."""
        is_finished, ttft_s, gap_s = call
        return is_finished and ttft_s <= self.ttft_slo_s and gap_s <= self.tbt_slo_s


@dataclass(slots=True)
class Judged:
    """`number` calls have ended; `calls` are all of them or a random sample."""

    number: int = 0
    calls: list[JudgedCall] = field(default_factory=list)
    _good: tuple[SloTargets, int] | None = field(default=None, compare=False)

    def add(self, call: JudgedCall) -> None:
        """Add a call to a sample that has all calls."""
        self.number += 1
        self.calls.append(call)
        self._good = None

    @property
    def weight(self) -> float:
        """How many calls each of `calls` stands for."""
        return self.number / len(self.calls) if self.calls else 1.0

    def joined(self, other: Judged, most: int = MAX_JUDGED) -> Judged:
        """A sample of both, of at most `most` calls that all stand for equally many. Deterministic:
        the same two give the same sample."""
        number = self.number + other.number
        weight = max(self.weight, other.weight, number / most)
        # One number rounds both shares, one up as often as the other down: even a part that is
        # smaller than the weight has its share of the sample, in the long run.
        chance = random.Random(number)
        up = chance.random()
        added = _sample(other.calls, math.floor(other.number / weight + up), chance)
        kept = min(math.floor(self.number / weight + 1 - up), most - len(added))
        return Judged(number, _sample(self.calls, kept, chance) + added)

    def num_good(self, targets: SloTargets) -> int:
        """Calls within the targets; an estimate if `calls` is a sample. Cached, since a page reads
        it every second."""
        if self._good is None or self._good[0] != targets:
            good = round(sum(map(targets.are_met, self.calls)) * self.weight)
            self._good = (targets, good)
        return self._good[1]


def _sample(calls: list[JudgedCall], most: int, chance: random.Random) -> list[JudgedCall]:
    return calls if most >= len(calls) else chance.sample(calls, most)
