"""Routing and its inputs: load, room, links, and requests that engines have not yet confirmed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.clock import FakeClock
from fakes.gateway.engine_link import FakeLink
from fakes.gateway.requests import valid
from fakes.gateway.step_costs import linear_cost
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import PromiseRefused, Unavailable
from baton.core.membership import Member, Role
from baton.core.request.request import FinishReason, Request, Ticket
from baton.core.request.sampling_params import SamplingParams
from baton.core.step_cost import StepCost
from baton.core.step_shape import StepShape
from baton.gateway.engines.cluster_view import why_not_ready
from baton.gateway.engines.engine_state import EngineState
from baton.gateway.engines.engine_table import EngineTable
from baton.gateway.engines.linked_engine import LinkedEngine
from baton.gateway.engines.prompt_router import PromptRouter
from baton.gateway.engines.reported_load import PromptSpeed, ReportedLoad
from baton.gateway.engines.routing import choose_plan
from baton.gateway.request.engine_link import (
    Avoid,
    Blocked,
    Demand,
    EngineOutput,
    MustWait,
    Route,
)
from baton.gateway.validation.served_model import ModelLimits
from baton.prefix_index.mirror import PrefixMirror


def prefill(name: str, **fields: object) -> EngineState:
    state = EngineState(name, Role.PREFILL, "fp", 16, free_blocks=100, credit_blocks=50)
    return state._replace(**fields)  # type: ignore[arg-type]


def decode(name: str, links: str = "p q", **fields: object) -> EngineState:
    state = EngineState(
        name, Role.DECODE, "fp", 16, free_blocks=100, links=frozenset(links.split())
    )
    return state._replace(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ([prefill("p"), decode("d")], ("p", "d")),
        ([prefill("p", waiting_tokens=9), prefill("q"), decode("d")], ("q", "d")),
        ([prefill("p", waiting_tokens=9), prefill("q"), decode("d", "p")], ("p", "d")),
        ([prefill("p", credit_blocks=1), prefill("q", waiting_tokens=9), decode("d")], ("q", "d")),
        ([prefill("p", credit_blocks=0), decode("d")], ("p", "d")),
        ([prefill("p", is_draining=True), prefill("q"), decode("d")], ("q", "d")),
        ([prefill("p"), decode("d", num_requests=2), decode("e", num_requests=1)], ("p", "e")),
        (
            [
                prefill("p"),
                decode("d", num_requests=1, has_place=False),
                decode("e", num_requests=9),
            ],
            ("p", "e"),
        ),
        ([prefill("p"), decode("d", free_blocks=50), decode("e")], ("p", "e")),
        ([prefill("p"), decode("d", free_blocks=1), decode("e", num_requests=9)], ("p", "e")),
        (
            [prefill("p", takes_prompt=False), prefill("q", waiting_tokens=9), decode("d")],
            ("q", "d"),
        ),
        ([prefill("p"), decode("d", fingerprint="x"), decode("e", num_requests=9)], ("p", "e")),
    ],
)
def test_choice(engines: list[EngineState], expected: tuple[str, str]) -> None:
    assert choose_plan(engines, 33, fingerprint="fp") == expected


@pytest.mark.parametrize(
    ("engines", "message"),
    [
        ([], "no prefill and no decode node is ready"),
        ([prefill("p")], "no decode node is ready"),
        ([decode("d")], "no prefill node is ready"),
        ([prefill("p"), decode("d", is_draining=True)], "no decode node is ready"),
        ([prefill("p"), decode("d", "other")], "no decode node is linked to a prefill node"),
    ],
)
def test_what_is_missing_is_named(engines: list[EngineState], message: str) -> None:
    with pytest.raises(Unavailable, match=message):
        choose_plan(engines, 33)


@pytest.mark.parametrize(
    ("rates", "loads", "expected"),
    [
        ((370.0, 12.0), (0, 0), "d"),
        ((12.0, 370.0), (0, 0), "e"),
        ((12.0, 370.0), (0, 1), "d"),  # load outweighs the link
        ((370.0, 351.0), (0, 0), "e"),  # the same class of link: more free blocks decide
        ((0.0, 0.0), (0, 0), "e"),  # no link was measured
    ],
)
def test_at_equal_load_the_faster_link_is_taken(
    rates: tuple[float, float], loads: tuple[int, int], expected: str
) -> None:
    engines = [
        decode(
            name,
            "p",
            link_gbytes_per_s={"p": rate},
            num_requests=load,
            free_blocks=900 + (name == "e"),
        )
        for name, rate, load in zip("de", rates, loads, strict=True)
    ]
    assert choose_plan([prefill("p"), *engines], 33) == ("p", expected)


@pytest.mark.parametrize(
    ("engines", "reason"),
    [
        ([prefill("p"), decode("d", has_place=False)], Blocked.PLACE),
        ([prefill("p", takes_prompt=False), decode("d", has_place=False)], Blocked.PLACE),
        ([prefill("p", takes_prompt=False), decode("d")], Blocked.TURN),
        ([prefill("p", takes_prompt=False), prefill("q"), decode("d", "p")], Blocked.TURN),
    ],
)
def test_a_request_waits_here_for_a_place_or_its_turn(
    engines: list[EngineState], reason: Blocked
) -> None:
    with pytest.raises(MustWait) as wait:
        choose_plan(engines, 33)
    assert wait.value.reason is reason


def test_failed_engines_and_pairs_are_avoided() -> None:
    engines = [prefill("p"), prefill("q", waiting_tokens=9), decode("d"), decode("e")]
    assert choose_plan(engines, 33, avoid=Avoid("p")) == ("q", "d")
    assert choose_plan(engines, 33, avoid=Avoid("pd")) == ("q", "e")
    assert choose_plan(engines, 33, avoid=Avoid({("p", "d")})) == ("p", "e")
    with pytest.raises(Unavailable):
        choose_plan(engines, 33, avoid=Avoid("pq"))


def speed(token_s: float, step_s: float = 0.0) -> PromptSpeed:
    return PromptSpeed(step_s, token_s)


FAST, SLOW = speed(20e-6), speed(60e-6)


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        # No queue: no hand-off is the cheapest.
        ([prefill("p", speed=FAST), decode("d", speed=FAST, takes_whole=True)], "d d"),
        # Decodes make `d` slow, and `p` is idle.
        ([prefill("p", speed=FAST), decode("d", speed=SLOW, takes_whole=True)], "p d"),
        # `p` has a queue: the slow engine finishes sooner.
        (
            [
                prefill("p", speed=FAST, waiting_tokens=30_000),
                decode("d", speed=SLOW, takes_whole=True),
            ],
            "d d",
        ),
        # 0.1 s later on `d`, but the next prompts do not wait behind it.
        (
            [
                prefill("p", speed=FAST, waiting_tokens=13_000),
                decode("d", speed=SLOW, takes_whole=True),
            ],
            "d d",
        ),
        (
            [
                prefill("p", speed=FAST, waiting_tokens=6_000),
                decode("d", speed=SLOW, takes_whole=True),
            ],
            "p d",
        ),
        # Cached tokens are not computed: a chat's next turn.
        (
            [
                prefill("p", speed=FAST),
                decode("d", speed=SLOW, takes_whole=True, cached_tokens=7000),
            ],
            "d d",
        ),
        # The engine with fewer requests, whatever its role.
        (
            [
                prefill("p", speed=FAST, takes_whole=True, num_requests=3),
                decode("d", speed=FAST, takes_whole=True, num_requests=40),
            ],
            "p p",
        ),
        ([decode("d", speed=FAST, takes_whole=True)], "d d"),
        ([decode("d", takes_whole=True), decode("e", num_requests=1, takes_whole=True)], "d d"),
        (
            [
                decode("d", takes_whole=True, has_place=False),
                decode("e", num_requests=9, takes_whole=True),
            ],
            "e e",
        ),
        (
            [
                prefill("p", speed=FAST, waiting_tokens=10**6),
                decode("d", speed=FAST, takes_whole=True, takes_prompt=False),
            ],
            "p d",
        ),
        ([prefill("p", takes_prompt=False), decode("d", speed=SLOW, takes_whole=True)], "d d"),
    ],
)
def test_the_plan_that_costs_least(engines: list[EngineState], expected: str) -> None:
    assert choose_plan(engines, 8192, fingerprint="fp") == tuple(expected.split())


def test_one_engine_that_failed_is_avoided() -> None:
    engines = [decode("d", takes_whole=True), decode("e", num_requests=9, takes_whole=True)]
    assert choose_plan(engines, 33, avoid=Avoid("d")) == ("e", "e")
    with pytest.raises(MustWait):
        choose_plan([e._replace(has_place=False) for e in engines], 33)
    with pytest.raises(Unavailable, match="no prefill and no decode node is ready"):
        choose_plan(engines, 33, avoid=Avoid("de"))


def test_an_engine_that_is_not_to_do_it_alone_may_still_do_a_part() -> None:
    alone = Avoid({("d", "d"), ("p", "p")})
    engines = [prefill("p", takes_whole=True), decode("d", takes_whole=True)]
    assert choose_plan(engines, 33, avoid=alone) == ("p", "d")
    assert choose_plan([*engines, decode("e", takes_whole=True)], 33) != ("p", "d")
    with pytest.raises(Unavailable):
        choose_plan(engines[1:], 33, avoid=alone)


loads = st.integers(0, 3)
DRAWN = {"num_requests", "waiting_tokens", "free_blocks", "credit_blocks", "is_draining"}
states = st.lists(
    st.builds(
        EngineState,
        incarnation=st.uuids().map(str),
        role=st.sampled_from(Role),
        fingerprint=st.sampled_from("fg"),
        block_size=st.just(16),
        num_requests=loads,
        waiting_tokens=loads,
        free_blocks=loads,
        credit_blocks=loads,
        is_draining=st.booleans(),
        **{
            name: st.just(default)
            for name, default in EngineState._field_defaults.items()
            if name not in DRAWN
        },
    ),
    max_size=6,
    unique_by=lambda state: state.incarnation,
)


@given(states, st.data())
def test_any_answer_is_allowed_and_none_is_refused_for_nothing(
    engines: list[EngineState], data: st.DataObject
) -> None:
    sources = [e.incarnation for e in engines if e.role is Role.PREFILL]
    engines = [e._replace(links=data.draw(st.frozensets(st.sampled_from(sources)))) if sources and
               e.role is Role.DECODE else e for e in engines]  # fmt: skip
    allowed = {
        (p.incarnation, d.incarnation)
        for p in engines
        for d in engines
        if p.role is Role.PREFILL and d.role is Role.DECODE and p.incarnation in d.links
        and not p.is_draining and not d.is_draining and p.fingerprint == d.fingerprint == "f"
    }  # fmt: skip
    try:
        assert choose_plan(engines, 20, fingerprint="f") in allowed
    except Unavailable:
        assert not allowed


LOAD = ReportedLoad(0, 0, 0, 100, 50, False, frozenset("p"))


def linked(name: str, role: Role, num_blocks: int = 10, max_model_len: int = 400) -> LinkedEngine:
    member = Member(name, role, name, "h:1", "demo", "fp", max_model_len, 16, num_blocks)
    return LinkedEngine(member, FakeLink(name), LOAD)


def route_of(table: EngineTable, num_tokens: int = 3) -> Route:
    return PromptRouter(table, valid()).choose(Demand(num_tokens), avoid=Avoid(), fingerprint=None)


def is_alone(route: Route) -> bool:
    return route.prefill is route.decode


def table_of(*engines: LinkedEngine) -> EngineTable:
    table = EngineTable(PrefixMirror(FakeClock()))
    table.engines = {engine.incarnation: engine for engine in engines}
    return table


def test_a_retry_counts_as_one_though_nothing_is_left_out_any_more() -> None:
    """A request on trial may wait until its failed engine is no longer avoided; it counts as a
    retry."""
    table = table_of(linked("p", Role.PREFILL), linked("d", Role.DECODE))
    router = PromptRouter(table, valid())
    for is_retry in (False, True):
        router.choose(Demand(3, is_retry=is_retry), avoid=Avoid(), fingerprint=None)
    assert table.plans.decisions() == {"least_loaded": 1, "retry": 1}


def test_what_is_on_its_way_counts_until_it_is_answered() -> None:
    p, d, e = (
        linked("p", Role.PREFILL),
        linked("d", Role.DECODE),
        linked("e", Role.DECODE),
    )
    table = table_of(p, d, e)
    ticket = Ticket("t", "p", "d")

    def send(attempt: int, engine: LinkedEngine) -> None:
        request = Request("r", attempt, (1, 2, 3), SamplingParams(), (4,))
        engine.dispatch(request, Route(p, engine), ticket, 1.0)

    def chosen() -> str:
        return route_of(table).decode.incarnation

    send(0, d)
    assert chosen() == "e"
    send(1, e)
    send(2, e)
    assert chosen() == "d"
    d.receive([EngineOutput("r", 0, 1, (5,))])
    e.receive([EngineOutput("r", 1, stamps=())])
    assert (d.account.num_requests, e.account.num_requests) == (1, 2)
    d.receive([EngineOutput("r", 0, 2, (5,), FinishReason.STOP)])
    e.cancel("r", 1)
    e.cancel("r", 2)
    e.cancel("r", 99)
    assert (d.account.num_requests, e.account.num_requests) == (0, 0)


def test_what_an_engine_of_a_shorter_context_would_cut_short_goes_elsewhere() -> None:
    """An engine may have joined with another `--max-model-len` after the request was validated."""
    p, d, e = (
        linked("p", Role.PREFILL),
        linked("d", Role.DECODE, max_model_len=100),
        linked("e", Role.DECODE),
    )
    e.receive_heartbeat(replace(LOAD, num_requests=3))
    router = PromptRouter(table_of(p, d, e), valid())

    def chosen(num_tokens: int, max_output_tokens: int) -> str:
        demand = Demand(num_tokens, max_output_tokens=max_output_tokens)
        return router.choose(demand, avoid=Avoid(), fingerprint=None).decode.incarnation

    assert chosen(60, 40) == "d" and chosen(60, 41) == chosen(101, 1) == "e"
    del router.table.engines["e"]
    with pytest.raises(Unavailable, match="no decode node is ready"):
        chosen(60, 41)


def test_limits_are_those_of_the_engines() -> None:
    base = ModelLimits("demo", 100, 2048)
    assert table_of().limits(base) == base
    table = table_of(
        linked("p", Role.PREFILL, num_blocks=10),
        linked("q", Role.PREFILL, num_blocks=12),
        linked("d", Role.DECODE, num_blocks=20, max_model_len=300),
    )
    assert table.limits(base) == ModelLimits(
        "demo", 100, 300, max_prompt_tokens=160, max_total_tokens=288
    )


def test_an_engine_that_does_all_has_both_a_prompt_and_a_place_taken() -> None:
    d = linked("d", Role.DECODE)
    d.receive_heartbeat(replace(LOAD, tbt_target_s=0.05, step_cost=linear_cost(0.005, 20e-6)))
    table = table_of(d)
    route = route_of(table)
    assert is_alone(route) and not why_not_ready(table)
    assert table.plans.decisions() == {"local": 1}
    request = Request("r", 0, (1, 2, 3), SamplingParams())
    route.prefill.dispatch(request, route, None, 1.0)
    assert (d.account.num_requests, d.account.tokens_ahead) == (1, 3)
    d.receive([EngineOutput("r", 0, 0, (5,))])
    assert (d.account.num_requests, d.account.tokens_ahead) == (1, 0)
    d.receive([EngineOutput("r", 0, 2, (5,), FinishReason.STOP)])
    assert d.account.num_requests == 0


def test_an_engine_whose_steps_would_be_too_long_has_no_place() -> None:
    d, cost = linked("d", Role.DECODE), linear_cost(0.004, 1e-3)
    table = table_of(d)
    for num_decodes, has_place in [(0, True), (44, True), (46, False)]:
        decodes = StepShape(num_decodes=num_decodes)
        load = replace(LOAD, tbt_target_s=0.05, step_cost=cost, decodes=decodes, num_requests=1)
        d.receive_heartbeat(replace(load, room_blocks=50))
        if has_place:
            route_of(table)
        else:
            with pytest.raises(MustWait):
                route_of(table)


def test_a_promise_that_not_even_one_decode_keeps_holds_nobody_up() -> None:
    d = linked("d", Role.DECODE)
    slow = linear_cost(0.1, 1e-3)
    load = replace(LOAD, tbt_target_s=0.02, step_cost=slow, decodes=StepShape(num_decodes=9))
    d.receive_heartbeat(replace(load, num_requests=9, room_blocks=50))
    assert is_alone(route_of(table_of(d)))


def test_an_engine_that_had_no_prompts_is_taken_for_as_fast_as_others_like_it() -> None:
    p = linked("p", Role.PREFILL, max_model_len=1 << 17)
    d = linked("d", Role.DECODE, max_model_len=1 << 17)
    table = table_of(p, d)
    fast = StepCost(0.005, (20e-6,) * 10, max_rows=2048)
    unmeasured = StepCost(0.005, (0.0,) * 10, max_rows=8)
    decodes = StepShape(num_decodes=8, keys=8000)
    p.receive_heartbeat(replace(LOAD, step_cost=fast, waiting_tokens=100_000))
    busy = replace(LOAD, tbt_target_s=0.02, decodes=decodes, step_cost=unmeasured)
    d.receive_heartbeat(busy)
    assert is_alone(route_of(table, 8000))
    slow = StepCost(0.005, (1e-3,) * 10, max_rows=512)
    d.receive_heartbeat(replace(busy, step_cost=slow))
    assert not is_alone(route_of(table, 8000))


def test_an_engine_that_refused_has_no_place_until_its_next_heartbeat() -> None:
    d, e = linked("d", Role.DECODE), linked("e", Role.DECODE)
    table, load = (
        table_of(d, e),
        replace(LOAD, tbt_target_s=0.05, step_cost=linear_cost(0.004, 1e-6)),
    )
    for engine in (d, e):
        engine.receive_heartbeat(load)
    route = route_of(table)
    refused = EngineOutput("r", 0, error=PromiseRefused("no"))
    for engine, other in ((d, "e"), (e, None)):
        engine.receive([refused])
        if other is not None:
            chosen = route_of(table).decode
            assert chosen.incarnation == other
    with pytest.raises(MustWait):
        route_of(table)
    d.receive_heartbeat(load)
    assert route_of(table).decode.incarnation == "d"
    assert is_alone(route)


def test_a_promise_that_is_withdrawn_takes_no_whole_requests() -> None:
    p, d = linked("p", Role.PREFILL), linked("d", Role.DECODE)
    table, load = (
        table_of(p, d),
        replace(LOAD, tbt_target_s=0.05, step_cost=linear_cost(0.004, 1e-6)),
    )
    p.receive_heartbeat(load)
    d.receive_heartbeat(replace(load, waiting_tokens=1 << 20))
    assert is_alone(route_of(table))
    p.receive_heartbeat(replace(load, is_promise_withdrawn=True))
    route = route_of(table)
    assert (route.prefill.incarnation, route.decode.incarnation) == ("p", "d")
