"""Which plans were chosen in the last seconds, and what they and the next best were estimated to
take, as the page shows them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from ...engines.plan_record import ALONE, MOVE, PAIR, PlanRecord

SPAN_S = 10


class PlanRates:
    """Of one gateway's plans, by `look`s, of which there is one a second."""

    def __init__(self, record: PlanRecord) -> None:
        self._record = record
        # When there was a look, and what came since the one before.
        self._looks: deque[tuple[float, Counter[tuple[str, ...]]]] = deque(maxlen=SPAN_S + 1)

    def look(self) -> None:
        """Take what came since the last one."""
        lately, self._record.lately = self._record.lately, Counter()
        self._looks.append((self._record.clock.monotonic_s(), lately))

    def rows(self) -> list[dict[str, object]]:
        """For JSON, one a kind: how many a second, means of the estimates in seconds, and how many
        a second got their prefix from which engine. Of moves: how many a second went to which
        engine, or failed for what."""
        now_s = self._record.clock.monotonic_s()
        looks = list(self._looks)
        total = sum((lately for _, lately in looks[1:]), Counter[tuple[str, ...]]())
        span_s = max(SPAN_S, looks[-1][0] - looks[0][0] if looks else 0.0)
        estimates: dict[str, list[tuple[float, float | None]]] = {PAIR: [], ALONE: [], MOVE: []}
        for sample in self._record.samples:
            if sample.at_s > now_s - SPAN_S:
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
