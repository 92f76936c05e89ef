"""The definitions of the metrics, once, for gateway, dashboard, demo and benchmarks.

TTFT         request sent to first non-empty token received, on the observer's clock
TBT (= ITL)  one gap between consecutive tokens: many samples a request
TPOT         (E2E - TTFT) / (n_out - 1): one sample a request
hand-off gap first to second token: the gap that contains the KV transfer and decode admission
goodput      requests/s that keep to every target of an SLO
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """When a request was sent and when each of its tokens arrived, on one monotonic clock."""

    sent_s: float
    token_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float | None:
        return self.token_s[0] - self.sent_s if self.token_s else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """All TBT samples, the hand-off gap first."""
        return tuple(b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False))

    @property
    def handoff_gap_s(self) -> float | None:
        return self.token_s[1] - self.token_s[0] if len(self.token_s) > 1 else None

    @property
    def tpot_s(self) -> float | None:
        if len(self.token_s) < 2:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1)

    @property
    def e2e_s(self) -> float | None:
        return self.token_s[-1] - self.sent_s if self.token_s else None


@dataclass(frozen=True, slots=True)
class Slo:
    """A request's targets in seconds; None: no target. The TBT target holds for every gap."""

    ttft_s: float | None = None
    tbt_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def is_met_by(self, times: TokenTimes) -> bool:
        """Whether all targets are met; a request without a token meets none."""
        found = (
            (times.ttft_s, self.ttft_s),
            (max(times.gaps_s, default=0.0), self.tbt_s),
            (times.tpot_s, self.tpot_s),
            (times.e2e_s, self.e2e_s),
        )
        return bool(times.token_s) and all(
            value is None or target is None or value <= target for value, target in found
        )


def percentile(samples: Sequence[float], q: float) -> float | None:
    """The nearest-rank percentile, 0 < q <= 100: a value that occurred, never an interpolation."""
    if not samples:
        return None
    ordered = sorted(samples)
    rank = math.ceil(round(q * len(ordered) / 100, 9))  # 99.9 * 1000 is a little more than 99900
    return ordered[max(0, rank - 1)]
