"""What was when, in rows of equal length over a bounded span, and the sum of all of them.

    add ──┬─► Row, in which it was ──┐ one that leaves the span
          └─► total of the span ◄────┘ is subtracted from the total
Reading never walks the past. Memory is bounded by the number of rows, not by the load: percentiles
come from histograms, which add up, and SLOs from a sample of the calls. Knows no clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import dataclass, field

from ..calls.call_record import JudgedCall, SloTargets
from ..metrics.tally import Tally

_STILL_GROWING = 5  # rows: by then other gateways' shares have come
MAX_JUDGED = 200  # that a row keeps for SLOs


@dataclass(frozen=True, slots=True)
class Judged:
    """`calls` are those that ended, or of `number` that did a random sample."""

    number: int = 0
    calls: tuple[JudgedCall, ...] = ()

    @property
    def weight(self) -> float:
        """How many each of `calls` stands for."""
        return self.number / len(self.calls) if self.calls else 1.0

    def joined(self, other: Judged, most: int) -> Judged:
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
        """Within the targets; an estimate where `calls` is a sample."""
        return round(sum(map(targets.are_met, self.calls)) * self.weight)


@dataclass(slots=True)
class Row:
    """One stretch of time."""

    tally: Tally = field(default_factory=Tally)
    judged: Judged = Judged()
    _good: tuple[SloTargets, Judged, int] | None = None

    def add(self, tally: Tally, judged: Judged, metrics: Collection[str]) -> None:
        """Counts and histograms of these metrics, by name."""
        self.tally.add(tally, metrics)
        if judged.number:
            self.judged = self.judged.joined(judged, MAX_JUDGED)

    def pack(self) -> None:
        """Take little memory: nothing more is expected."""
        for histogram in self.tally.histograms.values():
            histogram.pack()

    def num_good(self, targets: SloTargets) -> int:
        """Remembered, since a page reads it every second."""
        good = self._good
        if good is None or good[0] != targets or good[1] is not self.judged:
            good = (targets, self.judged, self.judged.num_good(targets))
            self._good = good
        return good[2]


class Rows:
    """`rows` by number, without those in which nothing was: row n is [n, n + 1) * `row_s`."""

    def __init__(self, row_s: int, span_s: int, metrics: Collection[str]) -> None:
        self.row_s = row_s
        self.span_s = span_s
        self.rows: dict[int, Row] = {}
        self.total = Tally()  # to be read only
        self._metrics = metrics
        self._oldest: int | None = None  # which the span still has
        self._growing: set[int] = set()  # rows that are not packed

    def add(self, second: int, tally: Tally, judged: Judged) -> None:
        """What was counted within a row that begins at this second, or has it in it."""
        number = second // self.row_s
        if self._oldest is not None and number < self._oldest:
            return
        self.rows.setdefault(number, Row()).add(tally, judged, self._metrics)
        self.total.add(tally, self._metrics)
        self._growing.add(number)

    def expire(self, second: int) -> None:
        """Drop what is older than the span, as of this second."""
        oldest = (second - self.span_s) // self.row_s
        if oldest == self._oldest:
            return
        self._oldest = oldest
        for number in [number for number in self.rows if number < oldest]:
            self.total.subtract(self.rows.pop(number).tally)
        whole = second // self.row_s - _STILL_GROWING
        for number in [number for number in self._growing if number <= whole]:
            self._growing.discard(number)
            if number in self.rows:
                self.rows[number].pack()


def _sample(
    calls: tuple[JudgedCall, ...], most: int, chance: random.Random
) -> tuple[JudgedCall, ...]:
    """Draws those that stay or those that go, whichever are fewer: mostly some of 200 go."""
    if most >= len(calls):
        return calls
    left, num_drawn = list(calls), min(most, len(calls) - most)
    for index in range(num_drawn):
        drawn = index + int(chance.random() * (len(left) - index))
        left[index], left[drawn] = left[drawn], left[index]
    return tuple(left[:most] if num_drawn == most else left[num_drawn:])
