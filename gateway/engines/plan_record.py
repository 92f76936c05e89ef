"""Where requests went and why, and, of the last seconds, what their plans and the next best were
estimated to take: for people who look. Decides nothing."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ...core.errors import Unavailable
from ...core.ports import Clock
from ..request.engine_link import Avoid, MustWait, Route
from .routing import REQUEST_S, EngineState, Plan, choose_plan

SPAN_S = 10
_ESTIMATE_EVERY_S = 0.05  # the next best is chosen as the best is, which takes as long
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
    _estimated_s: float = -1.0

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
        if is_retry:
            self.decisions["retry"] += 1
        elif route.is_local:
            self.decisions["local"] += 1
        elif route.cached_tokens[0]:
            self.decisions["cached_prefix"] += 1
        else:
            self.decisions["least_loaded"] += 1
        now_s, kind = self.clock.monotonic_s(), ALONE if route.is_local else PAIR
        sums = self._sums(now_s)
        sums[kind, "plans"] += 1
        if prefix_from:
            sums[kind, "prefixes_from", prefix_from] += 1
        if now_s >= self._estimated_s + _ESTIMATE_EVERY_S:
            self._estimated_s = now_s
            pair = route.prefill.incarnation, route.decode.incarnation
            chosen_s, next_s = estimates(engines, num_tokens, *pair)
            for what, seconds in (("chosen_s", chosen_s), ("next_s", next_s)):
                if seconds is not None:
                    sums[kind, what] += seconds
                    sums[kind, what, "number"] += 1

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

        def mean(kind: str, what: str) -> float | None:
            number = total.get((kind, what, "number"))
            return total[kind, what] / number if number else None

        def per_s(kind: str, what: str) -> dict[str, float]:
            return {key[2]: num / span_s for key, num in total.items() if key[:2] == (kind, what)}

        return [
            {
                "plan": kind,
                "per_s": total.get((kind, "plans"), 0.0) / span_s,
                "chosen_s": mean(kind, "chosen_s"),
                "next_s": mean(kind, "next_s"),
                "prefixes_from": per_s(kind, "prefixes_from"),
                "moves": per_s(kind, "moves"),
            }
            for kind in (PAIR, ALONE, MOVE)
        ]

    def _forget(self, now_s: float) -> None:
        while self._seconds and self._seconds[0][0] <= now_s - SPAN_S - 1:
            self._seconds.popleft()


def estimates(
    engines: Sequence[EngineState], num_tokens: int, prefill: str, decode: str
) -> tuple[float, float | None]:
    """Seconds of the plan that was chosen, and of what would have been without it; None: nothing
    could."""
    by_name, chosen = {engine.incarnation: engine for engine in engines}, Plan(prefill, decode)

    def seconds(plan: Plan) -> float:
        source, puller = by_name[plan.prefill], by_name[plan.decode]
        if source is puller:
            return source.prompt_seconds(num_tokens) + source.num_requests * REQUEST_S
        return source.prompt_seconds(num_tokens) + puller.decode_seconds(num_tokens)

    try:
        other = choose_plan(engines, num_tokens, avoid=Avoid(pairs=frozenset({chosen})))
    except (Unavailable, MustWait):
        return seconds(chosen), None
    return seconds(chosen), seconds(other)
