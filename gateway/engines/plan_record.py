"""Where requests went and why, and, of the last seconds, what their plans and the next best were
estimated to take: for people who look. Decides nothing."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ...core.membership import Role
from ...core.ports import Clock
from ..request.engine_link import Route
from .routing import REQUEST_S, EngineState

SPAN_S = 10
_ESTIMATE_EVERY_S = 0.05  # to estimate the next best takes about as long as to choose
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
    """Seconds of the plan that was chosen, and of the best other one that could have been; None:
    there is none."""
    plans: dict[tuple[str, str], float] = {}
    sources: list[tuple[float, EngineState]] = []
    pullers: list[tuple[float, EngineState]] = []
    for engine in engines:
        is_chosen = engine.incarnation in (prefill, decode)
        if engine.is_draining and not is_chosen:
            continue
        prompt_s = engine.prompt_seconds(num_tokens)
        if engine.role is Role.PREFILL and (engine.takes_prompt or is_chosen):
            sources.append((prompt_s, engine))
        if engine.role is Role.DECODE and (engine.has_place or is_chosen):
            pullers.append((engine.decode_seconds(num_tokens), engine))
        may_both = engine.keeps_promise and engine.takes_prompt and engine.has_place
        if may_both or prefill == decode == engine.incarnation:
            alone_s = prompt_s + engine.num_requests * REQUEST_S
            plans[engine.incarnation, engine.incarnation] = alone_s
    for source_s, source in _best(sources, prefill):
        for puller_s, puller in _best(pullers, decode):
            if source.incarnation in puller.links:
                plans[source.incarnation, puller.incarnation] = source_s + puller_s
    chosen_s = plans.pop((prefill, decode), 0.0)
    return chosen_s, min(plans.values(), default=None)


def _best(parts: list[tuple[float, EngineState]], chosen: str) -> list[tuple[float, EngineState]]:
    """The two best, and the one that was chosen: the next best plan has one of them on each
    side, wherever the links are all there."""
    ordered = sorted(parts, key=lambda part: part[0])
    return ordered[:2] + [part for part in ordered[2:] if part[1].incarnation == chosen]
