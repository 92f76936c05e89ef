"""Other ways to choose engines, by name, to compare routing.py with: `--routing-policy`.

    auto               the least cost of computing, copying, fetching and waiting (routing.py)
    least_loaded       the same, ignoring cached prefixes
    round_robin        engines in turn
    random             any engine
    session_affinity   each caller's requests to the same engine, as long as it can take them

All of them leave out engines that cannot serve the request, as `choose_plan` does.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from ...core.errors import Unavailable
from ...core.membership import Role
from ..request.engine_link import Avoid, MustWait
from .engine_state import EngineState
from .routing import Plan, Policy, choose_plan

Order = Callable[[Sequence[EngineState], int], Iterator[EngineState]]


class InOrder(Policy):
    """Takes the first pair, or engine alone, that can serve the request, in the given order."""

    def __init__(self, order: Order) -> None:
        super().__init__(is_blind=True)
        self._order = order

    def choose(
        self,
        engines: Sequence[EngineState],
        num_tokens: int,
        caller_id: int,
        *,
        avoid: Avoid,
        fingerprint: str | None,
    ) -> Plan:
        ordered = [*self._order(engines, caller_id)]
        decode = [engine for engine in ordered if engine.role is Role.DECODE]
        for engine in ordered:
            if engine.role is not Role.PREFILL and not engine.takes_whole:
                continue
            pairs = [[engine, other] for other in decode if other is not engine]
            for plan in [[engine]] * engine.takes_whole + pairs * (engine.role is Role.PREFILL):
                try:
                    return choose_plan(plan, num_tokens, avoid=avoid, fingerprint=fingerprint)
                except (Unavailable, MustWait):
                    continue
        # No plan: raise the reason.
        return choose_plan(engines, num_tokens, avoid=avoid, fingerprint=fingerprint)


def _in_turn() -> Order:
    count = itertools.count()

    def order(engines: Sequence[EngineState], _: int) -> Iterator[EngineState]:
        first = next(count)
        for role in Role:  # each role has its own turns
            of_role = sorted((e for e in engines if e.role is role), key=attrgetter("incarnation"))
            yield from (of_role[(first + i) % len(of_role)] for i in range(len(of_role)))

    return order


def _drawn(chance: random.Random) -> Order:
    def order(engines: Sequence[EngineState], _: int) -> Iterator[EngineState]:
        return iter(chance.sample(engines, len(engines)))

    return order


def _by_caller(engines: Sequence[EngineState], caller_id: int) -> Iterator[EngineState]:
    """Rendezvous hashing: an engine that comes or goes moves only its own callers."""

    def weight(engine: EngineState) -> bytes:
        return hashlib.blake2b(f"{caller_id} {engine.incarnation}".encode()).digest()

    return iter(sorted(engines, key=weight))


def make_policy(name: str, chance: random.Random | None = None) -> Policy:
    """The policy of this name. `chance`: without it plans that are alike are taken in order, and
    `random` draws the same each time."""
    match name:
        case "auto" | "least_loaded":
            return Policy(chance, is_blind=name == "least_loaded")
        case "round_robin":
            return InOrder(_in_turn())
        case "random":
            return InOrder(_drawn(chance or random.Random(0)))
        case "session_affinity":
            return InOrder(_by_caller)
        case _:
            raise ValueError(f"no such policy: {name}")
