"""The record of plans for people, against estimates of all plans computed one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.core.membership import Role
from baton.gateway.engines.engine_state import REQUEST_S, EngineState
from baton.gateway.engines.plan_record import ChosenPlan, PlanRecord, estimates
from baton.gateway.engines.reported_load import PromptSpeed
from baton.gateway.engines.routing import Plan, choose_plan

NUM_TOKENS = 2000


def engine(name: str, role: Role, waiting: int, requests: int, promises: bool) -> EngineState:
    links = frozenset("pqr") if role is Role.DECODE else frozenset[str]()
    return EngineState(
        *(name, role, "f", 16), num_requests=requests, waiting_tokens=waiting, free_blocks=1 << 20,
        credit_blocks=1 << 20, links=links, takes_whole=promises,
        speed=PromptSpeed(0.004, 20e-6),
    )  # fmt: skip


@st.composite
def clusters(draw: st.DrawFn) -> list[EngineState]:
    number = st.integers(0, 40)
    return [
        engine(name, role, 1000 * draw(number), draw(number), draw(st.booleans()))
        for names, role in (("pqr", Role.PREFILL), ("def", Role.DECODE))
        for name in names[: draw(st.integers(1, 3))]
    ]


def all_plans(engines: list[EngineState]) -> dict[tuple[str, str], float]:
    plans = {}
    for one in engines:
        prompt_s = one.prompt_cost(NUM_TOKENS)
        if one.takes_whole:
            plans[one.incarnation, one.incarnation] = prompt_s + one.num_requests * REQUEST_S
        for other in engines if one.role is Role.PREFILL else ():
            if other.role is Role.DECODE:
                seconds = prompt_s + other.decode_seconds(NUM_TOKENS)
                plans[one.incarnation, other.incarnation] = seconds
    return plans


@given(clusters())
def test_the_chosen_and_the_next_best_of_all_plans(engines: list[EngineState]) -> None:
    plan = choose_plan(engines, NUM_TOKENS)
    plans = all_plans(engines)
    chosen_s, next_s = estimates(engines, NUM_TOKENS, plan)
    assert chosen_s == plans.pop((plan.prefill, plan.decode))
    assert next_s == min(plans.values(), default=None)


def test_why_requests_went_where_they_went() -> None:
    record = PlanRecord(num_unavailable=2)
    for facts in ((True, True, False), (False, True, False), (False,) * 3, (False, True, True)):
        record.chosen[ChosenPlan(*facts)] += 1
    reasons = dict.fromkeys(("local", "cached_prefix", "least_loaded", "retry"), 1)
    assert record.decisions() == reasons | {"unavailable": 2}


def test_nothing_but_what_was_chosen() -> None:
    engines = [engine("d", Role.DECODE, 0, 0, True)]
    chosen_s, next_s = estimates(engines, NUM_TOKENS, Plan("d", "d"))
    assert (round(chosen_s, 9), next_s) == (0.044, None)
