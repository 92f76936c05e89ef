"""What the plan of a request and the next best one were estimated to cost: of a plan now and then,
and not before somebody looks, since it takes about as long as to choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.errors import Unavailable
from ..request.engine_link import MustWait
from .routing import REQUEST_S, EngineState, Plan, choose_plan


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
            self._seconds = estimates(self.engines, self.num_tokens, self.plan)
            self.engines = ()
        return self._seconds


def estimates(
    engines: Sequence[EngineState], num_tokens: int, plan: Plan
) -> tuple[float, float | None]:
    """What the plan that was chosen weighs, in seconds, and the best other one that could have
    been; None: there is none."""
    known = {engine.incarnation: engine for engine in engines}

    def seconds(plan: Plan) -> float:
        prefill, decode = known[plan.prefill], known[plan.decode]
        is_alone = prefill is decode
        rest_s = decode.num_requests * REQUEST_S if is_alone else decode.decode_seconds(num_tokens)
        return prefill.prompt_cost(num_tokens) + rest_s

    try:
        other = choose_plan(engines, num_tokens, avoid=frozenset({plan}))
    except (Unavailable, MustWait):
        return seconds(plan), None
    return seconds(plan), seconds(other)
