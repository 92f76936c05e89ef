"""Which plans one gateway chose, why, and what they were estimated to take: for metrics and the
live page. Decides nothing.

The router adds to `chosen` and replaces `last`; reasons, kinds and estimates are computed when they
are read, since an estimate takes about as long as a choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ...core.errors import Unavailable
from ..request.engine_link import MustWait
from .engine_state import REQUEST_S, EngineState
from .routing import Plan, choose_plan

PAIR, ALONE, MOVE = "pair", "alone", "move"
_MOVED = "moved"


class ChosenPlan(NamedTuple):
    """What is counted of a plan. `is_cached`: its prefill engine has a part of the prompt;
    `prefix_from`: the name of the engine from which it fetches a part, or empty."""

    is_alone: bool
    is_cached: bool
    is_retry: bool
    prefix_from: str = ""

    @property
    def kind(self) -> str:
        return ALONE if self.is_alone else PAIR

    @property
    def reason(self) -> str:
        if self.is_retry:
            return "retry"
        if self.is_alone:
            return "local"
        return "cached_prefix" if self.is_cached else "least_loaded"


@dataclass
class SampledPlan:
    """A plan for a request of `num_tokens`, with the states of the engines that it was chosen
    from."""

    engines: Sequence[EngineState]
    num_tokens: int
    plan: Plan

    @property
    def kind(self) -> str:
        return ALONE if self.plan.prefill == self.plan.decode else PAIR

    @cached_property
    def seconds(self) -> tuple[float, float | None]:
        """The estimates of this plan and of the best other one, if any."""
        engines, self.engines = self.engines, ()
        return estimates(engines, self.num_tokens, self.plan)


@dataclass(eq=False)
class PlanRecord:
    """All plans since the gateway's start. `num_unavailable`: how often no engines were there for a
    request; `moves`: of running requests, by their outcome; `moved_to`: the same, by the target's
    name where they succeeded. `last`: the last plan, until it is taken."""

    chosen: Counter[ChosenPlan] = field(default_factory=Counter)
    num_unavailable: int = 0
    moves: Counter[str] = field(default_factory=Counter)
    moved_to: Counter[str] = field(default_factory=Counter)
    last: SampledPlan | None = None

    def note_move(self, target: str, outcome: str) -> None:
        """The move of a running request to the engine of that name ended: see request/move.py."""
        self.moves[outcome] += 1
        self.moved_to[target if outcome == _MOVED else outcome] += 1

    def decisions(self) -> Counter[str]:
        """Requests by the reason of their plan."""
        counts = Counter(unavailable=self.num_unavailable)
        for plan, count in self.chosen.items():
            counts[plan.reason] += count
        return +counts

    def by_kind(self) -> Counter[tuple[str, ...]]:
        """Plans by kind: (kind, "plans"), (kind, "prefixes_from", engine), (MOVE, "moves", target
        or outcome)."""
        counts = Counter[tuple[str, ...]]({(MOVE, "plans"): self.moves[_MOVED]})
        for plan, count in self.chosen.items():
            counts[plan.kind, "plans"] += count
            if plan.prefix_from:
                counts[plan.kind, "prefixes_from", plan.prefix_from] += count
        for target, count in self.moved_to.items():
            counts[MOVE, "moves", target] += count
        return counts


def estimates(
    engines: Sequence[EngineState], num_tokens: int, plan: Plan
) -> tuple[float, float | None]:
    """The cost of the chosen plan in seconds, and of the best other one; None: there is none."""
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
