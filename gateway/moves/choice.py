"""Chooses which running requests to move to which engine: a pure function of heartbeats.

An engine's TBT promise is broken if a step of its decodes alone takes longer than promised, by its
measured step cost: cutting prompt chunks cannot keep it then. Growing contexts cause this, or
several gateways that took the same places. The requests with the longest contexts move, since each
shortens the step the most; each to an engine whose steps stay well within its promise. A gateway
moves only its share of the excess; the other gateways move theirs.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...core.step_cost import StepCost
from ...core.step_shape import StepShape
from ..engines.routing import ALIKE

BROKEN = 1.05  # times the promise: measured costs are no more exact
KEPT = 0.9  # of the target's promise at most, so that requests do not move back and forth
_MOST_AT_ONCE = 4  # requests from one engine: their KV is copied while its steps continue
_MOST_LEAVING = 16  # the same, if the promise is withdrawn and all requests move


class Running(NamedTuple):
    """A request of this gateway that may move. `num_tokens`: the length of its context."""

    request_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class EngineSteps:
    """An engine by its last heartbeat. `promise_s`: promised duration of steps with decodes.

    `takes_more`: whether requests may move to it. `num_places`, `room_tokens`: free places for
    requests, and tokens for which there are free blocks. `ours`: this gateway's requests that may
    move away. `is_withdrawn`: it promises nothing to new requests.
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
        """The duration of a step of all its decodes, divided by the promise."""
        return self.cost.seconds(self.decodes) / self.promise_s

    @property
    def is_left(self) -> bool:
        return self.is_withdrawn or self.load > BROKEN

    def changed(self, num_requests: int, num_tokens: int) -> EngineSteps:
        """The engine with one request more (1) or fewer (-1), whose contexts have `num_tokens` more
        or fewer together."""
        num_decodes = max(0, self.decodes.num_decodes + num_requests)
        keys = max(0, self.decodes.keys + num_tokens)
        return replace(
            self,
            decodes=StepShape(num_decodes=num_decodes, keys=keys),
            num_places=self.num_places - num_requests,
            room_tokens=self.room_tokens - num_tokens,
        )

    def keeps_promise_with(self, num_tokens: int) -> bool:
        has_room = self.num_places > 0 and self.room_tokens >= num_tokens
        return self.takes_more and has_room and self.changed(1, num_tokens).load <= KEPT


class PlannedMove(NamedTuple):
    request_id: str
    source: str
    target: str


def choose_moves(engines: Iterable[EngineSteps], chance: random.Random) -> list[PlannedMove]:
    """The moves to begin now, nearly always none. Chooses at random among similar targets."""
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
                known[target.incarnation] = target.changed(1, num_tokens)
                source = source.changed(-1, -num_tokens)
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
