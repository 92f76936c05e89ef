"""Where requests went, and why: for people who look. Decides nothing."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...core.ports import Clock
from ..request.engine_link import Route
from .routing import EngineState, Plan
from .sampled_plan import SampledPlan

PAIR, ALONE, MOVE = "pair", "alone", "move"
_SAMPLE_EVERY_S = 1.0  # to estimate all of them at once, when a page opens, holds up streams
_MAX_SAMPLES = 10
_MOVED = "moved"


@dataclass(eq=False)
class PlanRecord:
    """One gateway's. `decisions`: why requests went where they went; `moves`: of running requests,
    by how they ended.

    `lately`: how many, by kind of plan, what, and of whom, until somebody takes it; `samples`: the
    last plans of which estimates can be made.
    """

    clock: Clock
    decisions: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    lately: Counter[tuple[str, ...]] = field(default_factory=Counter)
    samples: deque[SampledPlan] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))

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
        kind, now_s = ALONE if is_alone else PAIR, self.clock.monotonic_s()
        self.lately[kind, "plans"] += 1
        if prefix_from:
            self.lately[kind, "prefixes_from", prefix_from] += 1
        if not self.samples or now_s >= self.samples[-1].at_s + _SAMPLE_EVERY_S:
            plan = Plan(route.prefill.incarnation, route.decode.incarnation)
            self.samples.append(SampledPlan(now_s, kind, engines, num_tokens, plan))

    def note_move(self, to: str, how: str) -> None:
        """A running request's move to the engine of that name ended: see request/move.py."""
        self.moves[how] += 1
        self.lately[MOVE, "plans"] += how == _MOVED
        self.lately[MOVE, "moves", to if how == _MOVED else how] += 1
