"""The chosen plan against an exhaustive search, and the distribution over equivalent plans."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import Unavailable
from baton.core.membership import Role
from baton.gateway.engines.engine_state import PULL_TOKEN_S, REQUEST_S, EngineState
from baton.gateway.engines.reported_load import PromptSpeed
from baton.gateway.engines.routing import ALIKE, Plan, choose_plan
from baton.gateway.request.engine_link import MustWait
from baton.prefix_index.prefix_sources import Fetch

SOURCES = [f"p{index}" for index in range(4)]
PULLERS = [f"d{index}" for index in range(4)]
NUM_TOKENS = 1000
IDLE = PromptSpeed(0.005, 20e-6, 1e-9)

fetches = st.builds(Fetch, st.just("x"), st.sampled_from([512, 992]), st.floats(0, 0.1))
speeds = st.builds(PromptSpeed, st.floats(0, 0.02), st.floats(1e-6, 1e-4), st.floats(0, 1e-8))


def engines_of(names: Sequence[str], role: Role) -> st.SearchStrategy[list[EngineState]]:
    """A subset of these engines, in any state."""
    states = [
        st.builds(
            EngineState,
            incarnation=st.just(name),
            role=st.just(role),
            fingerprint=st.just("f"),
            block_size=st.just(16),
            num_requests=st.integers(0, 200),
            waiting_tokens=st.integers(0, 20_000),
            free_blocks=st.sampled_from([10, 1000]),
            credit_blocks=st.sampled_from([10, 1000]),
            is_draining=st.just(False),
            links=st.frozensets(st.sampled_from(SOURCES)) if role is Role.DECODE else st.just(
                frozenset()
            ),
            link_gbytes_per_s=st.dictionaries(st.sampled_from(SOURCES), st.sampled_from([10, 300])),
            cached_tokens=st.sampled_from([0, 512, 1000]),
            speed=st.none() | speeds,
            takes_whole=st.booleans(),
            takes_prompt=st.sampled_from([True, True, False]),
            has_place=st.sampled_from([True, True, False]),
            fetch=st.none() | fetches,
            host_tokens=st.sampled_from([0, 0, 256]),
            host_s=st.floats(0, 0.1),
            in_flight_tokens=st.sampled_from([0, 0, 512]),
            adapter_s=st.sampled_from([0.0, 0.1]),
        )
        for name in names
    ]  # fmt: skip
    return st.tuples(*states).map(list)


clusters = st.tuples(engines_of(SOURCES, Role.PREFILL), engines_of(PULLERS, Role.DECODE)).map(
    lambda both: both[0] + both[1]
)


def all_plans(engines: Sequence[EngineState]) -> Iterator[tuple[Plan, bool, bool, float]]:
    """Every plan, whether it lacks credit, whether it lacks blocks, and its estimate in seconds."""
    num_blocks = -(-NUM_TOKENS // 16)
    for one in engines:
        if not one.takes_prompt:
            continue
        prompt_s = one.prompt_cost(NUM_TOKENS)
        if one.takes_whole and one.has_place:
            seconds = prompt_s + one.num_requests * REQUEST_S
            name = one.incarnation
            yield Plan(name, name), False, one.free_blocks < num_blocks, seconds
        for other in engines:
            if one.incarnation in other.links and other.has_place:
                yield (
                    Plan(one.incarnation, other.incarnation),
                    one.credit_blocks < num_blocks,
                    other.free_blocks < num_blocks,
                    prompt_s + other.decode_seconds(NUM_TOKENS),
                )


def best_of(plans: Sequence[tuple[Plan, bool, bool, float]]) -> tuple[bool, float]:
    """(lacks blocks, seconds) of the best plan; among pairs, those with credit come first."""
    pairs = [plan[1:] for plan in plans if plan[0].prefill != plan[0].decode]
    alone = [plan[1:] for plan in plans if plan[0].prefill == plan[0].decode]
    return min(min(group)[1:] for group in (pairs, alone) if group)


@given(clusters, st.integers(0, 99))
def test_no_plan_is_better_than_the_chosen_one(engines: list[EngineState], seed: int) -> None:
    plans = list(all_plans(engines))
    try:
        chosen = choose_plan(engines, NUM_TOKENS)
        drawn = choose_plan(engines, NUM_TOKENS, chance=random.Random(seed))
    except (MustWait, Unavailable):
        assert not plans
        return
    lacks_blocks, seconds = best_of(plans)
    found = {plan[0]: plan[2:] for plan in plans}
    assert found[chosen][0] == found[drawn][0] == lacks_blocks
    assert found[chosen][1] <= seconds * 1.0001
    assert found[drawn][1] <= seconds * ALIKE * 1.0001


def idle(name: str, role: Role, num_requests: int = 0) -> EngineState:
    links = frozenset(SOURCES) if role is Role.DECODE else frozenset[str]()
    blocks = {"free_blocks": 1000, "credit_blocks": 1000}
    return EngineState(
        name, role, "f", 16, **blocks, num_requests=num_requests, links=links, speed=IDLE
    )


def drawn_plans(engines: Sequence[EngineState], count: int) -> Counter[Plan]:
    chance = random.Random(3)
    return Counter(choose_plan(engines, NUM_TOKENS, chance=chance) for _ in range(count))


def test_what_is_cached_beyond_the_request_is_worth_no_more() -> None:
    """A stale index may list more cached tokens than the prompt has: the estimate stays at zero or
    above, or no plan would count as equivalent to the best."""
    engines = [idle(SOURCES[0], Role.PREFILL), idle(PULLERS[0], Role.DECODE)]
    engines = [engine._replace(cached_tokens=10 * NUM_TOKENS) for engine in engines]
    assert drawn_plans(engines, 3) == {Plan(SOURCES[0], PULLERS[0]): 3}


def test_plans_that_are_alike_are_drawn_evenly() -> None:
    """Equivalent plans are drawn evenly, so that gateways with equal state do not all choose one
    engine."""
    engines = [idle(name, Role.PREFILL) for name in SOURCES]
    engines += [idle(name, Role.DECODE) for name in PULLERS]
    counts = drawn_plans(engines, 1600)
    assert len(counts) == 16
    assert min(counts.values()) > 60 and max(counts.values()) < 140
    assert drawn_plans(engines, 1600) == counts


def test_an_engine_that_is_worse_is_not_drawn() -> None:
    engines = [idle("p0", Role.PREFILL), idle("p1", Role.PREFILL)._replace(waiting_tokens=300)]
    engines += [idle(name, Role.DECODE, 2 * index) for index, name in enumerate(PULLERS)]
    assert set(drawn_plans(engines, 50)) == {("p0", "d0")}


def test_many_requests_are_not_made_up_for_by_a_long_prompt() -> None:
    """Tolerance does not grow with the prompt: a twentieth of a long prompt's time equals many
    decodes, which have a TBT target."""
    engines = [
        idle("d0", Role.DECODE, 10)._replace(takes_whole=True, waiting_tokens=100_000),
        idle("d1", Role.DECODE, 30)._replace(takes_whole=True, waiting_tokens=100_000),
    ]
    assert set(drawn_plans(engines, 50)) == {("d0", "d0")}


def test_a_pair_is_not_like_an_engine_alone_by_the_sum() -> None:
    """Both plans wait for the same prompt; its decode goes where fewer other decodes run."""
    source = idle("p0", Role.PREFILL, 3)._replace(takes_whole=True, waiting_tokens=100_000)
    assert set(drawn_plans([source, idle("d0", Role.DECODE, 20)], 50)) == {("p0", "p0")}
    source = source._replace(num_requests=20)
    assert set(drawn_plans([source, idle("d0", Role.DECODE, 3)], 50)) == {("p0", "d0")}


def test_a_slow_link_is_not_drawn_beside_a_fast_one() -> None:
    fast = idle("d0", Role.DECODE)._replace(link_gbytes_per_s={"p0": 370.0})
    slow = idle("d1", Role.DECODE)._replace(link_gbytes_per_s={"p0": 12.0})
    assert set(drawn_plans([idle("p0", Role.PREFILL), slow, fast], 50)) == {("p0", "d0")}


def test_a_prefix_that_saves_little_time_is_looked_for_all_the_same() -> None:
    """A short cached prefix is still preferred: elsewhere it would be computed and stored again."""
    engines = [idle("p0", Role.PREFILL), idle("p1", Role.PREFILL)._replace(cached_tokens=16)]
    engines += [idle("d0", Role.DECODE), idle("d1", Role.DECODE)._replace(cached_tokens=16)]
    assert set(drawn_plans(engines, 50)) == {("p1", "d1")}
    engines[1] = engines[1]._replace(waiting_tokens=300)
    assert set(drawn_plans(engines, 50)) == {("p0", "d1")}
    whole = [one._replace(takes_whole=True) for one in engines[2:]]
    assert set(drawn_plans(whole, 50)) == {("d1", "d1")}


def test_what_is_in_host_memory_costs_its_copy_or_its_computation() -> None:
    def state(**more: float) -> EngineState:
        return EngineState("p", Role.PREFILL, "f", 16, speed=PromptSpeed(0.0, 1e-4), **more)  # type: ignore[arg-type]

    on_device = state(cached_tokens=800)
    assert math.isclose(on_device.prompt_seconds(1000), 0.02)
    assert on_device.decode_seconds(1000) == 200 * PULL_TOKEN_S
    in_host = state(cached_tokens=800, host_tokens=600, host_s=0.01)
    assert math.isclose(in_host.prompt_seconds(1000), 0.03)
    assert in_host.decode_seconds(1000) == 800 * PULL_TOKEN_S, "a pull is quicker than a copy"
    slow = state(cached_tokens=800, host_tokens=600, host_s=0.1)
    assert math.isclose(slow.prompt_seconds(1000), 0.08), "it computes them again"
    fetch = Fetch("x", 800, 0.005)
    assert in_host._replace(fetch=fetch).worth_fetching(1000) == fetch
