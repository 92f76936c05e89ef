"""A histogram of durations in logarithmic buckets: bounded memory, percentiles within 1 %.

Bucket i covers (G^i, G^(i+1)] with G = 1.02, and answers with its geometric middle, so an answer is
off by at most sqrt(G) - 1 = 0.995 %. Knows no time: the window adds and subtracts whole histograms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

_GROWTH = 1.02
_PER_LOG = 1 / math.log(_GROWTH)
SHORTEST_S = 1e-6  # what is shorter counts as this
LONGEST_S = 86_400.0  # what is longer counts as this
MAX_ERROR = math.sqrt(_GROWTH) - 1


def bucket_of(seconds: float) -> int:
    """The bucket of a duration."""
    clamped = min(max(seconds, SHORTEST_S), LONGEST_S)
    return math.floor(math.log(clamped) * _PER_LOG)


def middle_s(bucket: int) -> float:
    """What a bucket's samples are told as, in seconds."""
    return math.exp((bucket + 0.5) / _PER_LOG)


@dataclass(slots=True)
class Histogram:
    """`counts` by bucket, without empty ones; `sum_s` is of the samples as they were."""

    counts: dict[int, int] = field(default_factory=dict)
    num_samples: int = 0
    sum_s: float = 0.0

    def add(self, seconds: float, bucket: int) -> None:
        """One sample; `bucket` is `bucket_of(seconds)`, worked out once for several histograms."""
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        self.num_samples += 1
        self.sum_s += seconds

    def add_all(self, counts: Mapping[int, int], sum_s: float) -> None:
        """Many samples: how many in which bucket, and their sum."""
        for bucket, count in counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count
            self.num_samples += count
        self.sum_s += sum_s

    def subtract(self, other: Histogram) -> None:
        """Take back samples that were added to both."""
        for bucket, count in other.counts.items():
            left = self.counts[bucket] - count
            if left:
                self.counts[bucket] = left
            else:
                del self.counts[bucket]
        self.num_samples -= other.num_samples
        self.sum_s = self.sum_s - other.sum_s if self.num_samples else 0.0  # rounding ends here

    def percentiles_s(self, *qs: float) -> list[float | None]:
        """Nearest-rank percentiles, `qs` ascending in (0, 100]; None each without samples."""
        if not self.num_samples:
            return [None] * len(qs)
        ranks = [max(1, math.ceil(q / 100 * self.num_samples)) for q in qs]
        found: list[float | None] = []
        seen = 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            while len(found) < len(ranks) and ranks[len(found)] <= seen:
                found.append(middle_s(bucket))
        return found

    @property
    def mean_s(self) -> float | None:
        return self.sum_s / self.num_samples if self.num_samples else None
