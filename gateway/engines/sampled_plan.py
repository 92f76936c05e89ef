"""What the plan of a request and the next best one were estimated to take: of a plan now and then,
and not before somebody looks, since it takes about as long as to choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.membership import Role
from .routing import REQUEST_S, EngineState, Plan


@dataclass(slots=True)
class SampledPlan:
    """One that was chosen at `at_s` for so many tokens, by these engines' states; of its `kind`."""

    at_s: float
    kind: str
    engines: Sequence[EngineState]
    num_tokens: int
    plan: Plan
    _seconds: tuple[float, float | None] | None = None  # once somebody has looked

    @property
    def seconds(self) -> tuple[float, float | None]:
        """Of the plan, and of the best other one; None: there was none."""
        if self._seconds is None:
            self._seconds = estimates(self.engines, self.num_tokens, *self.plan)
            self.engines = ()
        return self._seconds


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
