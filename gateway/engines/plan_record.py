"""Where requests went and why, and how many in the last seconds: for people who look. Decides
nothing."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ...core.ports import Clock
from ..request.engine_link import Route
from .routing import EngineState, Plan
from .sampled_plan import SampledPlan

SPAN_S = 10
_SAMPLE_EVERY_S = 0.25
PAIR, ALONE, MOVE = "pair", "alone", "move"
_MOVED = "moved"

_Sums: TypeAlias = defaultdict[tuple[str, ...], float]  # by kind of plan, what, and of whom


@dataclass(eq=False)
class PlanRecord:
    """One gateway's. `decisions`: why requests went where they went; `moves`: of running requests,
    by how they ended."""

    clock: Clock
    decisions: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    _seconds: deque[tuple[int, _Sums]] = field(default_factory=deque)
    _samples: deque[SampledPlan] = field(default_factory=deque)

    def note(
        self,
        engines: Sequence[EngineState],
        num_tokens: int,
        route: Route,
        prefix_from: str = "",
        *,
        is_retry: bool = False,
    ) -> None:
        """A request of so many tokens goes there, by these engines' states, after it got a prefix
        from the engine of that name, if any."""
        is_alone = route.prefill is route.decode
        if is_retry:
            self.decisions["retry"] += 1
        elif is_alone:
            self.decisions["local"] += 1
        elif route.cached_tokens[0]:
            self.decisions["cached_prefix"] += 1
        else:
            self.decisions["least_loaded"] += 1
        now_s, kind = self.clock.monotonic_s(), ALONE if is_alone else PAIR
        sums = self._sums(now_s)
        sums[kind, "plans"] += 1
        if prefix_from:
            sums[kind, "prefixes_from", prefix_from] += 1
        if not self._samples or now_s >= self._samples[-1].at_s + _SAMPLE_EVERY_S:
            plan = Plan(route.prefill.incarnation, route.decode.incarnation)
            self._samples.append(SampledPlan(now_s, kind, engines, num_tokens, plan))

    def note_move(self, to: str, how: str) -> None:
        """A running request's move to the engine of that name ended: see request/move.py."""
        self.moves[how] += 1
        sums = self._sums(self.clock.monotonic_s())
        sums[MOVE, "plans"] += how == _MOVED
        sums[MOVE, "moves", to if how == _MOVED else how] += 1

    def _sums(self, now_s: float) -> _Sums:
        """Of this second."""
        if not self._seconds or self._seconds[-1][0] != int(now_s):
            self._seconds.append((int(now_s), defaultdict(float)))
            self._forget(now_s)
        return self._seconds[-1][1]

    def rows(self) -> list[dict[str, object]]:
        """For JSON, one a kind: how many a second, means of the estimates in seconds, and how many
        a second got their prefix from which engine. Of moves: how many a second went to which
        engine, or failed for what."""
        now_s = self.clock.monotonic_s()
        self._forget(now_s)
        span_s = max(SPAN_S, now_s - self._seconds[0][0] if self._seconds else 0.0)
        total: _Sums = defaultdict(float)
        for _, sums in self._seconds:
            for key, value in sums.items():
                total[key] += value

        estimates = {
            kind: [sample.seconds for sample in self._samples if sample.kind == kind]
            for kind in (PAIR, ALONE, MOVE)
        }

        def per_s(kind: str, what: str) -> dict[str, float]:
            return {key[2]: num / span_s for key, num in total.items() if key[:2] == (kind, what)}

        return [
            {
                "plan": kind,
                "per_s": total.get((kind, "plans"), 0.0) / span_s,
                "chosen_s": _mean(chosen_s for chosen_s, _ in seconds),
                "next_s": _mean(next_s for _, next_s in seconds),
                "prefixes_from": per_s(kind, "prefixes_from"),
                "moves": per_s(kind, "moves"),
            }
            for kind, seconds in estimates.items()
        ]

    def _forget(self, now_s: float) -> None:
        while self._seconds and self._seconds[0][0] <= now_s - SPAN_S - 1:
            self._seconds.popleft()
        while self._samples and self._samples[0].at_s <= now_s - SPAN_S:
            self._samples.popleft()


def _mean(numbers: Iterable[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return sum(known) / len(known) if known else None
