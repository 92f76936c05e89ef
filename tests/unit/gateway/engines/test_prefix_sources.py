"""Fetch or compute: the estimated time of a fetch, and when it is chosen."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from fakes.clock import FakeClock
from fakes.gateway.engine_link import FakeLink
from fakes.gateway.requests import valid

from baton.core.membership import Member, Role
from baton.core.request.request import Request, Ticket
from baton.core.request.sampling_params import SamplingParams
from baton.core.step_cost import StepCost
from baton.gateway.engines.engine_table import EngineTable
from baton.gateway.engines.linked_engine import LinkedEngine
from baton.gateway.engines.plan_record import PAIR
from baton.gateway.engines.prompt_router import PromptRouter
from baton.gateway.engines.reported_load import ReportedLoad
from baton.gateway.engines.routing_policies import make_policy
from baton.gateway.request.engine_link import Avoid, Demand, Route
from baton.prefix_index.mirror import PrefixMirror
from baton.prefix_index.prefix_sources import (
    FETCH_S,
    UNMEASURED_GBYTES_PER_S,
    CachedPrefix,
    Fetch,
    Holders,
)
from baton.proto.v1 import node_pb2

P, Q, D = "aa" * 16, "bb" * 16, "dd" * 16
TOKEN_BYTES = 1e6


def fetch(cached: dict[str, int], rates: dict[str, dict[str, float]], own: int = 0) -> Fetch | None:
    return Holders.of(cached, rates).best_fetch(P, own, TOKEN_BYTES)


@pytest.mark.parametrize(
    ("rates", "source", "rate"),
    [
        ({P: {D: 10.0, Q: 100.0}}, Q, 100.0),  # the fastest of equal sources
        ({P: {D: 10.0}, Q: {}}, D, 10.0),  # Q's link is unmeasured: assumed equal to D's, no faster
        ({P: {}, D: {P: 20.0}}, D, 20.0),  # the opposite direction was measured
        ({P: {}, D: {Q: 5.0}}, Q, 5.0),  # no link of P was measured: as any measured one
        ({P: {}}, Q, UNMEASURED_GBYTES_PER_S),  # no link was measured: the fetch will open one
    ],
)
def test_a_fetch_takes_its_bytes_time_over_the_best_link(
    rates: dict[str, dict[str, float]], source: str, rate: float
) -> None:
    found = fetch({D: 1600, Q: 1600, P: 160}, rates, own=160)
    assert found is not None and found.num_tokens == 1600
    assert found.seconds == pytest.approx(FETCH_S + 1440 * TOKEN_BYTES / (rate * 1e9))
    if source == D or rate > 10:
        assert found.source == source
    assert found.limit_s > found.seconds


def test_nothing_is_fetched_that_is_here_or_unreachable() -> None:
    rates = {P: {D: 10.0}}
    assert fetch({D: 160, P: 160}, rates, own=160) is None
    assert fetch({P: 160}, rates) is None, "from itself"
    most = fetch({D: 320, Q: 160}, rates)
    assert most is not None and most.source == D


COST = StepCost(0.001, (2e-5,) * 10, max_rows=4096)  # 50,000 tokens/s
LOAD = ReportedLoad(
    0, 0, 0, 4096, 4096, False, frozenset(), room_blocks=4096, step_cost=COST, step_tokens=2048
)


@dataclass
class Knowing(PromptRouter):
    """A router whose index lookup returns `known`."""

    known: dict[str, CachedPrefix] = field(default_factory=dict)

    def cached(self, num_tokens: int) -> dict[str, CachedPrefix]:
        return self.known


class World:
    def __init__(
        self, gbytes_per_s: float, *, block_bytes: int = 1 << 20, policy: str = "auto"
    ) -> None:
        self.table = EngineTable(PrefixMirror(FakeClock()), make_policy(policy))
        self.links: dict[str, FakeLink] = {}
        for name, role in ((P, Role.PREFILL), (Q, Role.PREFILL), (D, Role.DECODE)):
            member = Member(name, role, name[:2], "h:1", "m", "fp", 9999, 16, 5000)
            load = LOAD
            if role is Role.DECODE:
                rates = {P: gbytes_per_s, Q: gbytes_per_s}
                load = replace(LOAD, links=frozenset(rates), link_gbytes_per_s=rates)
            link = self.links[name] = FakeLink(name)
            welcome = node_pb2.Welcome(block_bytes=block_bytes)
            self.table.add(LinkedEngine(member, link, load, welcome, FakeClock()))

    def route(
        self, cached: dict[str, int], num_tokens: int = 4001, *, can_lend: bool = True
    ) -> Route:
        known = {
            name: CachedPrefix(num, lendable_tokens=num if can_lend else 0)
            for name, num in cached.items()
        }
        router = Knowing(self.table, valid(), known=known)
        return router.choose(Demand(num_tokens), avoid=Avoid(), fingerprint=None)

    def sent(self, route: Route) -> tuple[Request, Request]:
        one = Request("e" * 32, 0, (1,) * 4001, SamplingParams())
        ticket = Ticket("f" * 32, route.prefill.incarnation, route.decode.incarnation)
        for link in (route.prefill, route.decode):
            link.dispatch(one, route, ticket, 1.0)
        prefill, decode = (self.links[link.incarnation] for link in (route.prefill, route.decode))
        return prefill.dispatched[-1][0], decode.dispatched[-1][0]


def test_a_prefix_is_fetched_where_the_link_is_faster_than_the_computation() -> None:
    world = World(100.0)
    prefill, decode = world.sent(world.route({D: 4001}))
    source = prefill.prefix_source
    assert source is not None and (source.incarnation, source.num_blocks) == (D, 250)
    assert decode.prefix_source is None, "who decodes pulls from who has computed it"
    assert world.table.plans.by_kind()[PAIR, "prefixes_from", "dd"] == 1


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin", "random", "session_affinity"])
def test_other_policies_do_not_see_what_is_cached(policy: str) -> None:
    blind, without = (World(100.0, policy=policy) for _ in range(2))
    for cached in ({Q: 4000}, {D: 4001}, {P: 4000}):
        route, other = blind.route(cached), without.route({})
        assert route.prefill.incarnation == other.prefill.incarnation
        prefill, _ = blind.sent(route)
        without.sent(other)
        assert prefill.prefix_source is None
        assert World(100.0).route({Q: 4000}).prefill.incarnation == Q


def test_it_is_computed_where_the_link_is_slower() -> None:
    prefill, _ = (world := World(1.0)).sent(world.route({D: 4001}))
    assert prefill.prefix_source is None


@pytest.mark.parametrize("block_bytes", [0, 1 << 20])
def test_nothing_is_fetched_for_a_prompt_that_is_scored_or_of_unknown_size(
    block_bytes: int,
) -> None:
    world = World(100.0, block_bytes=block_bytes)
    prefill, _ = world.sent(world.route({D: 4001}, can_lend=not block_bytes))
    assert prefill.prefix_source is None


def test_an_idle_engine_fetches_rather_than_that_a_prompt_waits_where_its_prefix_is() -> None:
    world = World(100.0)
    busy = replace(LOAD, waiting_tokens=50_000)
    world.table.engines[P].receive_heartbeat(busy)
    route = world.route({P: 3200})
    assert route.prefill.incarnation == Q
    prefill, _ = world.sent(route)
    assert prefill.prefix_source is not None and prefill.prefix_source.incarnation == P


def test_an_engine_that_failed_the_request_is_no_source_for_it() -> None:
    world = World(100.0)
    avoid = Avoid(frozenset({Q}))
    cached = {Q: CachedPrefix(4000, lendable_tokens=4000)}
    router = Knowing(world.table, valid(), known=cached)
    route = router.choose(Demand(4001), avoid=avoid, fingerprint=None)
    prefill, _ = world.sent(route)
    assert prefill.prefix_source is None
