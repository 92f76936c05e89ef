"""What is kept of one second, or of many: counts and histograms. Adds nothing up by itself.

chunk, call ──► Tally of this second ──┐ both get every event; when a second leaves the window,
           └──► Tally of the window ◄──┘ it is subtracted, so that reading never walks the past
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .histogram import Histogram

LATENCIES = ("ttft", "tbt", "handoff_gap", "tpot", "e2e")
COUNTS = (
    "began",
    "finished",
    "failed",
    "cancelled",
    "refused",
    "retries",
    "prompt_tokens",
    "finished_prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "coalesced_tokens",
)


@dataclass(slots=True)
class Edge:
    """Hand-offs from one prefill engine to one decode engine."""

    num_transfers: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    puller_cached_tokens: int = 0

    def add(self, other: Edge, sign: int) -> None:
        self.num_transfers += sign * other.num_transfers
        self.num_bytes += sign * other.num_bytes
        self.seconds += sign * other.seconds
        self.puller_cached_tokens += sign * other.puller_cached_tokens


EdgeName = tuple[str, str, str]  # source, puller, transport


@dataclass(slots=True)
class Tally:
    """`counts` by the names in COUNTS; `errors` and `refusals` by error code."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    latencies: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram() for name in LATENCIES}
    )
    stages: dict[str, Histogram] = field(default_factory=dict)
    edges: dict[EdgeName, Edge] = field(default_factory=dict)

    def subtract(self, other: Tally) -> None:
        """Take back what was told to both."""
        for mine, theirs in (
            (self.counts, other.counts),
            (self.errors, other.errors),
            (self.refusals, other.refusals),
        ):
            mine.subtract(theirs)
            for name in [name for name, count in mine.items() if not count]:
                del mine[name]
        for name, histogram in other.latencies.items():
            self.latencies[name].subtract(histogram)
        for name, histogram in other.stages.items():
            self.stages[name].subtract(histogram)
        for edge_name, edge in other.edges.items():
            self.edges[edge_name].add(edge, -1)
            if not self.edges[edge_name].num_transfers:
                del self.edges[edge_name]


@dataclass(slots=True)
class Second:
    """One second of the window. `calls`: (all well, worst TTFT, longest gap) of those that ended.

    At most MAX_CALLS_PER_S of them are kept; the tally counts all.
    """

    number: int  # floor of the monotonic clock
    tally: Tally = field(default_factory=Tally)
    calls: list[tuple[bool, float, float]] = field(default_factory=list)
    _judged: tuple[float, float, int, int] | None = None  # two targets, calls, good ones

    def num_good(self, ttft_slo_s: float, tbt_slo_s: float) -> int:
        """Of `calls`, those within the targets; remembered, since a page asks every second."""
        asked = (ttft_slo_s, tbt_slo_s, len(self.calls))
        if self._judged is None or self._judged[:3] != asked:
            good = sum(
                is_finished and ttft_s <= ttft_slo_s and gap_s <= tbt_slo_s
                for is_finished, ttft_s, gap_s in self.calls
            )
            self._judged = (*asked, good)
        return self._judged[3]
