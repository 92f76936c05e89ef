"""Tallies by time, in rows of equal length over a bounded span, and their sum.

    add ──┬─► its row ─────────────┐ a row that leaves the span
          └─► total of the span ◄──┘ is subtracted from the total
A read never iterates over all rows. Memory is bounded by the number of rows, not by the load:
percentiles come from histograms, which can be added, and SLOs from a sample. Knows no clock.
"""

from __future__ import annotations

from collections.abc import Collection

from ..metrics.tally import Tally


class Rows:
    """`rows`: by number, without empty ones; row n is [n, n + 1) * `row_s`. `total`: read only."""

    def __init__(self, row_s: int, span_s: int, metrics: Collection[str]) -> None:
        self.row_s = row_s
        self.span_s = span_s
        self.rows: dict[int, Tally] = {}
        self.total = Tally()
        self._metrics = metrics
        self._oldest: int | None = None  # row number of the span

    def add(self, second: int, tally: Tally) -> None:
        """Add a tally to the row that contains this second."""
        number = second // self.row_s
        if self._oldest is not None and number < self._oldest:
            return
        self.rows.setdefault(number, Tally()).join(tally, self._metrics)
        self.total.add(tally, self._metrics)

    def expire(self, second: int) -> None:
        """Drop the rows that are older than the span, as of this second."""
        oldest = (second - self.span_s) // self.row_s
        if oldest == self._oldest:
            return
        self._oldest = oldest
        for number in [number for number in self.rows if number < oldest]:
            self.total.subtract(self.rows.pop(number))
