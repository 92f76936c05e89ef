"""Each policy by its name: which engine it chooses, that unsuitable engines are never chosen, and
the cached tokens.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from baton.core.errors import Unavailable
from baton.core.membership import Role
from baton.gateway.engines.engine_state import EngineState
from baton.gateway.engines.reported_load import PromptSpeed
from baton.gateway.engines.routing import Plan, Policy
from baton.gateway.engines.routing_policies import make_policy
from baton.gateway.request.engine_link import Avoid, MustWait
from baton.prefix_index.prefix_sources import Fetch

SOURCES, PULLERS = ("p0", "p1", "p2"), ("d0", "d1")
NAMES = ("auto", "least_loaded", "round_robin", "random", "session_affinity")


def cluster(**of_p1: object) -> list[EngineState]:
    speed = PromptSpeed(0.005, 1e-4)
    prefill = [
        EngineState(name, Role.PREFILL, "fp", 16, 100, credit_blocks=100, speed=speed)
        for name in SOURCES
    ]
    prefill[1] = prefill[1]._replace(**of_p1)  # type: ignore[arg-type]
    links = frozenset(SOURCES)
    return [*prefill, *(EngineState(n, Role.DECODE, "fp", 16, 100, links=links) for n in PULLERS)]


def chosen(policy: Policy, engines: list[EngineState], caller_id: int = 1, **more: Avoid) -> Plan:
    avoid = more.get("avoid", Avoid())
    return policy.choose(engines, 500, caller_id, avoid=avoid, fingerprint=None)


@pytest.mark.parametrize("name", NAMES)
def test_nobody_is_taken_who_cannot_serve_it(name: str) -> None:
    policy = make_policy(name, random.Random(1))
    engines = cluster(is_draining=True)
    engines[0] = engines[0]._replace(takes_prompt=False)
    for caller_id in range(20):
        avoid = Avoid({"d0"})
        assert chosen(policy, engines, caller_id, avoid=avoid) == Plan("p2", "d1")
    engines[2] = engines[2]._replace(takes_prompt=False)
    with pytest.raises(MustWait):
        chosen(policy, engines)
    with pytest.raises(Unavailable, match="no decode node"):
        chosen(policy, engines[:3])


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_that_does_both_is_a_plan(name: str) -> None:
    engine = EngineState("d", Role.DECODE, "fp", 16, 100, takes_whole=True)
    assert chosen(make_policy(name), [engine]) == Plan("d", "d")


def test_what_is_cached_or_can_be_fetched_is_chosen() -> None:
    fetch = Fetch("d0", 496, 0.001)
    for more in ({"cached_tokens": 400}, {"fetch": fetch}):
        engines = cluster(waiting_tokens=50, **more)
        assert chosen(make_policy("auto"), engines).prefill == "p1"


def test_turns_and_draws_are_even_and_callers_stay() -> None:
    engines = cluster(waiting_tokens=5000)
    turns = Counter(
        chosen(policy, engines).prefill
        for policy in [make_policy("round_robin")]
        for _ in range(30)
    )
    assert turns == dict.fromkeys(SOURCES, 10)
    policy = make_policy("random", random.Random(1))
    draws = Counter(chosen(policy, engines) for _ in range(600))
    assert len(draws) == 6 and min(draws.values()) > 60
    affine = make_policy("session_affinity")
    homes = {caller: chosen(affine, engines, caller) for caller in range(300)}
    assert all(chosen(affine, engines, caller) == home for caller, home in homes.items())
    fewer = [engine for engine in engines if engine.incarnation != "p0"]
    moved = [c for c, home in homes.items() if chosen(affine, fewer, c).prefill != home.prefill]
    assert {homes[caller].prefill for caller in moved} == {"p0"}
    assert 60 < len(moved) < 140


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="no such policy"):
        make_policy("fastest")
