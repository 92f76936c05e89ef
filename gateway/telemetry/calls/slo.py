"""Which calls kept to the gateway's SLO: of many a sample is judged, so that memory is bounded and
targets may be named when it is read."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import TypeAlias

MAX_JUDGED = 200  # calls of a stretch of time that are kept

# Has finished; its worst TTFT (endless without a token) and longest gap, in seconds.
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
    """`calls` are those that ended, or of `number` that did a random sample."""

    number: int = 0
    calls: list[JudgedCall] = field(default_factory=list)
    _good: tuple[SloTargets, int] | None = field(default=None, compare=False)

    def add(self, call: JudgedCall) -> None:
        """One of which none is left out."""
        self.number += 1
        self.calls.append(call)
        self._good = None

    @property
    def weight(self) -> float:
        """How many each of `calls` stands for."""
        return self.number / len(self.calls) if self.calls else 1.0

    def joined(self, other: Judged, most: int = MAX_JUDGED) -> Judged:
        """Both, of at most `most` calls, which all stand for equally many. The same two always give
        the same sample."""
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
        """Within the targets; an estimate where `calls` is a sample. Remembered, since a page reads
        it every second."""
        if self._good is None or self._good[0] != targets:
            good = round(sum(map(targets.are_met, self.calls)) * self.weight)
            self._good = (targets, good)
        return self._good[1]


def _sample(calls: list[JudgedCall], most: int, chance: random.Random) -> list[JudgedCall]:
    """Draws those that stay or those that go, whichever are fewer: mostly some of 200 go."""
    if most >= len(calls):
        return calls
    left, num_drawn = list(calls), min(most, len(calls) - most)
    for index in range(num_drawn):
        drawn = index + int(chance.random() * (len(left) - index))
        left[index], left[drawn] = left[drawn], left[index]
    return left[:most] if num_drawn == most else left[num_drawn:]
