"""Which running requests should go on elsewhere: a pure function of what engines have published.

An engine's promise is broken where a step of its decodes alone takes longer, by its own measured
cost: then no prompt can be cut to keep it. Contexts that grow do that, and several gateways that
took the same places. Those with the longest contexts move, since each gains the most; each to an
engine whose steps stay well within its promise with it. A gateway moves its share of what is too
much: others move theirs.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...core.step_cost import StepCost, StepShape
from ..engines.routing import ALIKE

BROKEN = 1.05  # of the promise: what is measured is no more exact
KEPT = 0.9  # of the new engine's, so that nothing moves to and fro
_MOST_AT_ONCE = 4  # of one engine; each is copied while its steps go on
_MOST_LEAVING = 16  # where all move


class Running(NamedTuple):
    """One of this gateway's requests that may move. `num_tokens`: its context."""

    request_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class EngineSteps:
    """An engine by its last heartbeat. `promise_s`: of steps with decodes.

    `takes_more`: it may be given others' requests. `num_places`, `room_tokens`: for how many, and
    for how many tokens of theirs. `ours`: this gateway's that may leave it. `is_withdrawn`: it
    promises nothing to what comes.
    """

    incarnation: str
    fingerprint: str
    cost: StepCost
    promise_s: float
    decodes: StepShape
    takes_more: bool = False
    num_places: int = 0
    room_tokens: int = 0
    ours: Sequence[Running] = ()
    is_withdrawn: bool = False

    @property
    def load(self) -> float:
        """A step of all that decodes, in parts of the promise."""
        return self.cost.seconds(self.decodes) / self.promise_s

    @property
    def is_left(self) -> bool:
        return self.is_withdrawn or self.load > BROKEN

    def with_one(self, num_tokens: int) -> EngineSteps:
        """With one more request of so many tokens."""
        return replace(
            self,
            decodes=_changed(self.decodes, 1, num_tokens),
            num_places=self.num_places - 1,
            room_tokens=self.room_tokens - num_tokens,
        )

    def without(self, num_tokens: int) -> EngineSteps:
        """Without one of them."""
        return replace(self, decodes=_changed(self.decodes, -1, -num_tokens))

    def keeps_promise_with(self, num_tokens: int) -> bool:
        has_room = self.num_places > 0 and self.room_tokens >= num_tokens
        return self.takes_more and has_room and self.with_one(num_tokens).load <= KEPT


def _changed(shape: StepShape, num_decodes: int, keys: int) -> StepShape:
    num_decodes = max(0, shape.num_decodes + num_decodes)
    return StepShape(num_decodes=num_decodes, keys=max(0, shape.keys + keys))


class PlannedMove(NamedTuple):
    request_id: str
    source: str
    target: str


def choose_moves(engines: Iterable[EngineSteps], chance: random.Random) -> list[PlannedMove]:
    """What to move now; empty nearly always. Targets that are alike are drawn from."""
    known = {engine.incarnation: engine for engine in engines}
    sources = sorted((e for e in known.values() if e.is_left), key=lambda e: -e.load)
    found: list[PlannedMove] = []
    for source in sources:
        share = len(source.ours) / max(1, source.decodes.num_decodes)
        enough = 0.0 if source.is_withdrawn else source.load - share * (source.load - 1)
        most = _MOST_LEAVING if source.is_withdrawn else _MOST_AT_ONCE
        longest = sorted(source.ours, key=lambda one: -one.num_tokens)
        for request_id, num_tokens in longest[:most]:
            if source.load <= enough:
                break
            target = _target(known.values(), source, num_tokens, chance)
            if target is not None:
                found.append(PlannedMove(request_id, source.incarnation, target.incarnation))
                known[target.incarnation] = target.with_one(num_tokens)
                source = source.without(num_tokens)
    return found


def _target(
    engines: Iterable[EngineSteps], source: EngineSteps, num_tokens: int, chance: random.Random
) -> EngineSteps | None:
    others = [
        engine
        for engine in engines
        if engine.incarnation != source.incarnation
        and engine.fingerprint == source.fingerprint
        and engine.keeps_promise_with(num_tokens)
    ]
    if not others:
        return None
    least = min(engine.load for engine in others)
    return chance.choice([engine for engine in others if engine.load <= least * ALIKE])
