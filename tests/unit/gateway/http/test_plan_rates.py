"""The page's rates of plans: over the last seconds, including the fraction of the current one."""

from __future__ import annotations

import pytest
from fakes.clock import FakeClock

from baton.core.membership import Role
from baton.gateway.engines.engine_state import EngineState
from baton.gateway.engines.plan_record import (
    ALONE,
    MOVE,
    PAIR,
    ChosenPlan,
    PlanRecord,
    SampledPlan,
)
from baton.gateway.engines.reported_load import PromptSpeed
from baton.gateway.engines.routing import Plan
from baton.gateway.http.dashboard.plan_rates import SPAN_S, PlanRates

NUM_TOKENS = 2000
_FIELDS = {
    "free_blocks": 1 << 20,
    "credit_blocks": 1 << 20,
    "takes_whole": True,
    "speed": PromptSpeed(0.004, 20e-6),
}
ENGINES = [
    EngineState("p", Role.PREFILL, "f", 16, **_FIELDS),
    EngineState("d", Role.DECODE, "f", 16, num_requests=10, links=frozenset("p"), **_FIELDS),
]


def plans() -> tuple[FakeClock, PlanRecord, PlanRates]:
    clock = FakeClock()
    record = PlanRecord()
    rates = PlanRates(record, clock)
    rates.look()
    return clock, record, rates


def choose(record: PlanRecord, prefill: str, decode: str, prefix_from: str = "") -> None:
    record.chosen[ChosenPlan(prefill == decode, False, False, prefix_from)] += 1
    record.last = SampledPlan(ENGINES, NUM_TOKENS, Plan(prefill, decode))


def test_counts_and_means_of_the_last_seconds() -> None:
    clock, record, rates = plans()
    empty = {"per_s": 0.0, "chosen_s": None, "next_s": None, "prefixes_from": {}, "moves": {}}
    assert rates.rows() == [{"plan": plan} | empty for plan in (PAIR, ALONE, MOVE)]
    for _ in range(40):
        clock.advance(0.1)
        choose(record, "p", "p")
    rates.look()
    pair, alone, _ = rates.rows()
    assert alone["per_s"] == 4.0 and pair["per_s"] == 0.0
    assert float(str(alone["chosen_s"])) == pytest.approx(0.044)
    assert float(str(alone["next_s"])) > 0.044
    for _ in range(SPAN_S + 1):
        clock.advance(1.0)
        rates.look()
    assert rates.rows()[1] == {"plan": ALONE} | empty


def test_prefixes_are_counted_by_the_engine_that_they_come_from() -> None:
    clock, record, rates = plans()
    for number in range(SPAN_S):
        clock.advance(1.0)
        choose(record, "p", "d", "decode-0")
        choose(record, "p", "d", "decode-1" if number % 2 else "")
        rates.look()
    pair, alone, _ = rates.rows()
    assert pair["prefixes_from"] == pytest.approx({"decode-0": 1.0, "decode-1": 0.5})
    assert alone["prefixes_from"] == {}


def test_a_steady_rate_is_shown_as_it_is() -> None:
    clock, record, rates = plans()
    for step in range(300):
        clock.advance(0.1)
        choose(record, "p", "p")
        if step % 10 == 3:
            rates.look()
        if step > 120:
            assert rates.rows()[1]["per_s"] == pytest.approx(10.0, abs=0.2)
