"""The rates of the plans chosen in the last seconds, and the estimated times of these and of the
next best plans, as the page shows them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from ....core.ports import Clock
from ...engines.plan_record import ALONE, MOVE, PAIR, PlanRecord, SampledPlan

SPAN_S = 10


class PlanRates:
    """The rates of one gateway's plans, from one `look` per second."""

    def __init__(self, record: PlanRecord, clock: Clock) -> None:
        self._record, self._clock = record, clock
        # The time of each look, and the counts of plans up to then.
        self._looks: deque[tuple[float, Counter[tuple[str, ...]]]] = deque(maxlen=SPAN_S + 1)
        self._samples: deque[tuple[float, SampledPlan]] = deque(maxlen=SPAN_S)

    def look(self) -> None:
        """Read the record; the last plan since the previous look, if any, becomes a sample."""
        now_s = self._clock.monotonic_s()
        self._looks.append((now_s, self._record.by_kind()))
        sample, self._record.last = self._record.last, None
        if sample is not None:
            self._samples.append((now_s, sample))

    def rows(self) -> list[dict[str, object]]:
        """One row for JSON per kind of plan: plans per second, mean estimates in seconds, and plans
        per second by the engine that they fetched a prefix from. For moves: moves per second by
        the engine that they went to, or by the reason of failure."""
        now_s = self._clock.monotonic_s()
        total, span_s = Counter[tuple[str, ...]](), float(SPAN_S)
        if self._looks:
            (first_s, before), (last_s, now) = self._looks[0], self._looks[-1]
            total, span_s = now - before, max(span_s, last_s - first_s)
        estimates: dict[str, list[tuple[float, float | None]]] = {PAIR: [], ALONE: [], MOVE: []}
        for looked_s, sample in self._samples:
            if looked_s > now_s - SPAN_S:
                estimates[sample.kind].append(sample.seconds)

        def per_s(kind: str, what: str) -> dict[str, float]:
            return {key[2]: num / span_s for key, num in total.items() if key[:2] == (kind, what)}

        return [
            {
                "plan": kind,
                "per_s": total[kind, "plans"] / span_s,
                "chosen_s": _mean(chosen_s for chosen_s, _ in seconds),
                "next_s": _mean(next_s for _, next_s in seconds),
                "prefixes_from": per_s(kind, "prefixes_from"),
                "moves": per_s(kind, "moves"),
            }
            for kind, seconds in estimates.items()
        ]


def _mean(numbers: Iterable[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return sum(known) / len(known) if known else None
