"""Counts and histograms of calls over some period, by metric and labels.

A histogram has logarithmic buckets of 2 %, split at the bounds of all metrics: percentiles are
exact within 1 %, and Prometheus' buckets are sums of these buckets. Knows no time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate
from typing import TypeAlias

from ..calls.ended_call import EndedCall
from ..calls.slo import Judged
from .metric_table import ALL, Metric

Key: TypeAlias = tuple[str, ...]  # a metric's name, and its labels

_GROWTH = 1.02
_SMALLEST = 1e-6  # smaller values count as this
_NUM_STEPS = 1280  # up to 1e5; larger values count as this
MAX_ERROR = math.sqrt(_GROWTH) - 1
# Bucket i has the values in (BOUNDS[i - 1], BOUNDS[i]].
BOUNDS = sorted(
    {_SMALLEST * _GROWTH**step for step in range(_NUM_STEPS)}.union(*(m.buckets for m in ALL))
)
bucket_of: Callable[[float], int] = partial(bisect_left, BOUNDS)


@lru_cache(4096)
def _key(name: str, *labels: str) -> Key:
    """Interns keys: every second of the window has the same ones."""
    return name, *labels


def middle(bucket: int) -> float:
    """The value reported for the samples of a bucket: its geometric middle."""
    if bucket == 0 or bucket == len(BOUNDS):
        return BOUNDS[max(0, bucket - 1)]
    return math.sqrt(BOUNDS[bucket - 1] * BOUNDS[bucket])


@dataclass(slots=True)
class Histogram:
    """`counts`: by bucket; `total`: the exact sum of the samples."""

    counts: Counter[int] = field(default_factory=Counter)
    total: float = 0.0

    @property
    def num_samples(self) -> int:
        return self.counts.total()

    def observe(self, value: float) -> None:
        self.counts[bucket_of(value)] += 1
        self.total += value

    def add(self, counts: Mapping[int, int], total: float) -> None:
        """Add samples: their number by bucket, and their sum."""
        self.counts.update(counts)
        self.total += total

    def subtract(self, other: Histogram) -> None:
        """Remove samples that were added to both."""
        self.counts -= other.counts
        self.total = self.total - other.total if self.counts else 0.0  # rounding ends here

    def percentiles(self, *qs: float) -> list[float | None]:
        """Nearest-rank percentiles, `qs` ascending in (0, 100]; without samples each is None."""
        if not (num_samples := self.num_samples):
            return [None] * len(qs)
        ranks = [max(1, math.ceil(q / 100 * num_samples)) for q in qs]
        found: list[float | None] = []
        seen = 0
        for bucket, count in sorted(self.counts.items()):
            seen += count
            while len(found) < len(ranks) and ranks[len(found)] <= seen:
                found.append(middle(bucket))
        return found

    def cumulative(self, bounds: tuple[float, ...]) -> list[int]:
        """The number of samples up to each of a metric's `bounds`, and of all."""
        counts = [0] * (len(bounds) + 1)
        for bucket, count in self.counts.items():
            bound = BOUNDS[bucket] if bucket < len(BOUNDS) else math.inf
            counts[bisect_left(bounds, bound)] += count
        return list(accumulate(counts))

    @property
    def mean(self) -> float | None:
        return self.total / self.num_samples if self.counts else None


@dataclass(slots=True)
class Tally:
    """`judged`: a sample of ended calls for SLOs; `ended`: calls for the live page's list."""

    counts: Counter[Key] = field(default_factory=Counter)
    histograms: defaultdict[Key, Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    judged: Judged = field(default_factory=Judged)
    ended: list[EndedCall] = field(default_factory=list)

    def count(self, metric: Metric, number: int = 1, *labels: str) -> None:
        self.counts[_key(metric.name, *labels)] += number

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        self.histograms[_key(metric.name, *labels)].observe(value)

    def observe_all(self, metric: Metric, values: list[float]) -> None:
        if values:
            histogram = self.histograms[_key(metric.name)]
            histogram.add(Counter(map(bucket_of, values)), sum(values))

    def add(self, other: Tally, metrics: Collection[str]) -> None:
        """Add the counts and histograms of these metrics, by name."""
        for key, number in other.counts.items():
            if key[0] in metrics:
                self.counts[key] += number
        for key, histogram in other.histograms.items():
            if key[0] in metrics:
                self.histograms[key].add(histogram.counts, histogram.total)

    def join(self, other: Tally, metrics: Collection[str]) -> None:
        """`add`, and join the samples for SLOs."""
        self.add(other, metrics)
        if other.judged.number:
            self.judged = self.judged.joined(other.judged)

    def subtract(self, other: Tally) -> None:
        """Remove counts and histograms that were added to both."""
        self.counts -= other.counts
        for key, histogram in other.histograms.items():
            self.histograms[key].subtract(histogram)
            if not self.histograms[key].counts:
                del self.histograms[key]

    def histogram(self, metric: Metric, *labels: str) -> Histogram:
        """The histogram, to read only; empty if nothing was observed."""
        return self.histograms.get((metric.name, *labels)) or Histogram()

    def labelled(self, metric: Metric) -> Iterable[tuple[Key, int]]:
        """The children of a counter: (labels, count) pairs."""
        return [(key[1:], n) for key, n in self.counts.items() if key[0] == metric.name]
