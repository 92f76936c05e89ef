"""Routing by the index: the longest cached prefix is preferred, weighed against load."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.clock import FakeClock
from fakes.gateway.engine_link import FakeLink
from fakes.gateway.requests import valid
from hypothesis import given
from hypothesis import strategies as st

from baton.core.membership import Member, Role
from baton.core.request.request import Request, Ticket
from baton.core.request.sampling_params import SamplingParams
from baton.core.request.token_ids import block_hashes, root_hash
from baton.gateway.engines.engine_state import EngineState
from baton.gateway.engines.engine_table import EngineTable
from baton.gateway.engines.linked_engine import LinkedEngine
from baton.gateway.engines.prompt_router import PromptRouter
from baton.gateway.engines.reported_load import ReportedLoad
from baton.gateway.engines.routing import choose_plan
from baton.gateway.request.engine_link import Avoid, Demand, EngineOutput
from baton.prefix_index.messages import Delta, encode
from baton.prefix_index.mirror import PrefixMirror

P, Q, D = "aa" * 16, "bb" * 16, "dd" * 16
BLOCK_SIZE = 16


def state(name: str, role: Role, **fields: object) -> EngineState:
    links = frozenset("pq") if role is Role.DECODE else frozenset[str]()
    engine = EngineState(name, role, "fp", 16, free_blocks=500, credit_blocks=500, links=links)
    return engine._replace(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("p", "q", "expected"),
    [
        ({}, {"cached_tokens": 16}, "q"),
        ({"cached_tokens": 512}, {"cached_tokens": 528}, "q"),
        ({"waiting_tokens": 15}, {}, "q"),
        ({"waiting_tokens": 6, "cached_tokens": 16}, {}, "p"),  # next in queue waits for 984
        ({"waiting_tokens": 7, "cached_tokens": 16}, {}, "q"),
        ({"cached_tokens": 960, "waiting_tokens": 899}, {}, "p"),
        ({"cached_tokens": 960, "waiting_tokens": 901}, {}, "q"),
        ({"cached_tokens": 960, "credit_blocks": 3}, {}, "q"),
    ],
)
def test_cached_tokens_are_tokens_that_nobody_computes(
    p: dict[str, int], q: dict[str, int], expected: str
) -> None:
    engines = [
        state("p", Role.PREFILL, **p), state("q", Role.PREFILL, **q), state("d", Role.DECODE)
    ]  # fmt: skip
    assert choose_plan(engines, 1000)[0] == expected


def test_on_a_decode_engine_requests_weigh_more_than_a_small_hit() -> None:
    def chosen(cached_tokens: int, num_running: int) -> str:
        d = state("d", Role.DECODE, cached_tokens=cached_tokens, num_requests=num_running)
        return choose_plan([state("p", Role.PREFILL), d, state("e", Role.DECODE)], 8192)[1]

    assert chosen(16, 0) == "d"
    assert chosen(1024, 1) == "e"
    assert chosen(4096 + 16, 1) == "d"


amounts = st.integers(0, 200)


@given(st.sampled_from(Role), amounts, amounts, amounts, amounts, amounts, amounts)
def test_more_cached_never_makes_an_engine_less_preferred(
    role: Role, waiting: int, running: int, cached: int, other_waiting: int, more: int, other: int
) -> None:
    partner = state("q" if role is Role.PREFILL else "p", Role.PREFILL)
    rest = [state("d", Role.DECODE)] if role is Role.PREFILL else []
    mine = state("p" if role is Role.PREFILL else "e", role, waiting_tokens=waiting)
    mine = mine._replace(num_requests=running, cached_tokens=cached)
    rival = state("q" if role is Role.PREFILL else "f", role)
    rival = rival._replace(waiting_tokens=other_waiting, cached_tokens=other)
    engines = [*rest, rival, *([] if role is Role.PREFILL else [partner])]
    was_chosen = mine.incarnation in choose_plan([mine, *engines], 400)
    better = mine._replace(cached_tokens=cached + more)
    assert not was_chosen or mine.incarnation in choose_plan([better, *engines], 400)


LOAD = ReportedLoad(0, 0, 0, 100, 50, False, frozenset({P, Q}))
PROMPT = tuple(range(4 * BLOCK_SIZE))


def table_with(cached_blocks: dict[str, int], prompt: tuple[int, ...] = PROMPT) -> EngineTable:
    """A table of two prefill engines and one decode engine, with each engine's cached prefix of the
    prompt."""
    table = EngineTable(PrefixMirror(FakeClock()))
    chain = block_hashes(root_hash("fp"), prompt, BLOCK_SIZE)
    for incarnation in (P, Q, D):
        role = Role.DECODE if incarnation == D else Role.PREFILL
        member = Member(incarnation, role, "name", "h:1", "demo", "fp", 1 << 17, BLOCK_SIZE, 2000)
        table.add(LinkedEngine(member, FakeLink(incarnation), LOAD))
        cached = chain[: cached_blocks.get(incarnation, 0)]
        table.mirror.take(encode(Delta(incarnation, 1, (), tuple(cached))))
    return table


async def routed(table: EngineTable, prompt: tuple[int, ...]) -> PromptRouter:
    router = PromptRouter(table, valid(prompt))
    await router.hash_prompt()
    return router


async def chosen(table: EngineTable, prompt: tuple[int, ...] = PROMPT) -> tuple[str, int, int]:
    """The prefill engine, and the cached tokens expected on it and on the decode engine."""
    router = await routed(table, prompt)
    route = router.choose(Demand(len(prompt)), avoid=Avoid(), fingerprint=None)
    return route.prefill.incarnation, *route.cached_tokens


async def test_the_longest_cached_prefix_is_found() -> None:
    assert await chosen(table_with({P: 1, Q: 3})) == (Q, 48, 0)
    assert await chosen(table_with({P: 3, Q: 1, D: 2})) == (P, 48, 32)
    assert await chosen(table_with({})) == (P, 0, 0)
    assert await chosen(table_with({Q: 2}), PROMPT[:15]) == (P, 0, 0)
    assert await chosen(table_with({Q: 2}), PROMPT[:32] + (9,) * 40) == (Q, 32, 0)


async def test_a_prefill_computes_one_token_at_least_and_a_puller_may_have_all() -> None:
    assert await chosen(table_with({P: 4, D: 4})) == (P, 48, 64)


async def test_long_prompts_are_hashed_as_far_as_somebody_has_them() -> None:
    prompt = tuple(i % 251 for i in range(300 * BLOCK_SIZE))
    for num_cached in (63, 64, 65, 200, 299):
        table = table_with({Q: num_cached}, prompt)
        assert await chosen(table, prompt) == (Q, num_cached * BLOCK_SIZE, 0)
        num_hashed = len((await routed(table, prompt)).hashes["fp"])
        assert num_cached <= num_hashed <= num_cached + 64
    assert (await routed(table_with({}), prompt)).hashes == {"fp": []}, "nothing to find"


async def test_engines_of_other_kinds_and_lost_ones_do_not_count() -> None:
    table = table_with({Q: 3})
    table.remove(Q)
    assert await chosen(table) == (P, 0, 0)
    engine = table_with({Q: 3}).engines[Q]
    table.add(LinkedEngine(replace(engine.member, fingerprint="other"), engine.outbox, LOAD))
    chain = block_hashes(root_hash("fp"), PROMPT, BLOCK_SIZE)
    table.mirror.take(encode(Delta(Q, 1, (), tuple(chain))))
    assert await chosen(table) == (P, 0, 0)


async def test_what_is_cached_does_not_count_as_load_and_stale_hits_are_counted() -> None:
    table = table_with({Q: 3})
    router = await routed(table, PROMPT)
    q = table.engines[Q]
    q.clock = FakeClock()
    for attempt, found in enumerate((48, 16, 0)):
        route = router.choose(Demand(len(PROMPT)), avoid=Avoid(), fingerprint=None)
        assert route.prefill.incarnation == Q
        request = Request("r", attempt, PROMPT, SamplingParams())
        route.prefill.dispatch(request, route, Ticket("t", Q, D), 1.0)
        assert q.account.tokens_ahead == 16
        q.receive([EngineOutput("r", attempt, token_ids=(1,), cached_tokens=found)])
    assert (table.prompts.num_index_hits, table.prompts.num_stale_hits) == (3, 2)
    assert table.plans.decisions() == {"cached_prefix": 3}
    assert q.account.tokens_ahead == 0
