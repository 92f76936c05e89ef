"""A burst of one prompt goes to one engine; sent prompts are dropped once the index lists them."""

from __future__ import annotations

from array import array

from fakes.clock import FakeClock
from fakes.gateway.engine_link import FakeLink
from fakes.gateway.requests import valid
from fakes.gateway.step_costs import linear_cost
from hypothesis import given
from hypothesis import strategies as st

from baton.core.membership import Member, Role
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.gateway.engines.engine_table import EngineTable
from baton.gateway.engines.linked_engine import LinkedEngine
from baton.gateway.engines.prompt_router import PromptRouter
from baton.gateway.engines.prompts_in_flight import LINGER_S, PromptsInFlight
from baton.gateway.engines.reported_load import ReportedLoad
from baton.gateway.request.engine_link import Avoid, Demand, EngineOutput
from baton.prefix_index.mirror import PrefixMirror

SIZE = 4
SOURCES = ("p" * 32, "q" * 32, "r" * 32)


@given(st.lists(st.integers(1, 3), max_size=40), st.lists(st.integers(1, 3), max_size=40))
def test_common_blocks_are_those_that_are_the_same(one: list[int], other: list[int]) -> None:
    prompts = PromptsInFlight(FakeClock())
    if len(one) >= SIZE:
        prompts.sent("p", "fp", "", one, SIZE)
    most = min(len(one), len(other)) // SIZE
    expected = next(
        (i for i in range(most) if one[: (i + 1) * SIZE] != other[: (i + 1) * SIZE]), most
    )
    assert prompts.common_blocks("fp", "", other, SIZE).get("p", 0) == expected
    assert not prompts.common_blocks("fp", "another tenant", other, SIZE)
    assert not prompts.common_blocks("another model", "", other, SIZE)


def num_kept(prompts: PromptsInFlight) -> int:
    return sum(map(len, prompts._prompts.values()))


def test_what_ends_is_forgotten() -> None:
    clock = FakeClock()
    prompts, ids = PromptsInFlight(clock), array("I", range(20))
    first, second, _ = (prompts.sent(name, "fp", "", ids, SIZE) for name in "ppq")
    assert prompts.common_blocks("fp", "", ids, SIZE) == {"p": 5, "q": 5}
    prompts.ended(first, is_computed=True)
    prompts.ended(second, is_computed=False)
    assert prompts.common_blocks("fp", "", ids, SIZE) == {"p": 5, "q": 5}
    clock.advance(LINGER_S)
    assert prompts.common_blocks("fp", "", ids, SIZE) == {"q": 5}
    prompts.engine_lost("q")
    assert not prompts._prompts and not prompts._answered


def test_what_an_engine_that_is_lost_had_answered_is_forgotten_once() -> None:
    clock = FakeClock()
    prompts, ids = PromptsInFlight(clock), array("I", range(20))
    sent = prompts.sent("p", "fp", "", ids, SIZE)
    prompts.ended(sent, is_computed=True)
    prompts.engine_lost("p")
    assert prompts.common_blocks("fp", "", ids, SIZE) == {}
    prompts.sent("q", "fp", "", ids, SIZE)
    clock.advance(LINGER_S)
    assert prompts.common_blocks("fp", "", ids, SIZE) == {"q": 5}
    assert num_kept(prompts) == 1 and not prompts._answered


def table() -> EngineTable:
    table = EngineTable(PrefixMirror(FakeClock()))
    cost = linear_cost(0.005, 1e-4)
    for name in (*SOURCES, "d" * 32):
        role = Role.DECODE if name[0] == "d" else Role.PREFILL
        member = Member(name, role, name[0], "h:1", "demo", "fp", 4096, SIZE, 1000)
        links = frozenset(SOURCES) if role is Role.DECODE else frozenset[str]()
        load = ReportedLoad(0, 0, 0, 900, 900, False, links, step_cost=cost)
        table.add(LinkedEngine(member, FakeLink(name), load, clock=table.mirror.clock))
    return table


async def test_a_burst_of_one_prompt_lands_together() -> None:
    engines, homes = table(), list[str]()
    prefix = list(range(400))
    for number in range(4):
        prompt = [*prefix, *range(1000 + 20 * number, 1020 + 20 * number)]
        router = PromptRouter(engines, valid(prompt, cache_salt="tenant", caller_id=number))
        await router.hash_prompt()
        route = router.choose(Demand(len(prompt)), avoid=Avoid(), fingerprint=None)
        request = Request(str(number), 0, prompt, SamplingParams(), cache_salt="tenant")
        route.prefill.dispatch(request, route, None, 10.0)
        homes.append(route.prefill.incarnation)
    assert homes == homes[:1] * 4
    assert engines.engines[homes[0]].account.tokens_ahead == 480, "each computes its own end"
    other = PromptRouter(engines, valid(prefix, cache_salt="another tenant"))
    await other.hash_prompt()
    assert other.cached(400) == {}
    output = EngineOutput("0", 0, 0, (5,))
    engines.engines[homes[0]].receive([output])
    engines.engines[homes[0]].cancel("1", 0)
    assert num_kept(engines.prompts) == 3
    engines.remove(homes[0])
    assert not engines.prompts._prompts
