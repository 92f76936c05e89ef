"""An adapter is served if every engine has loaded it; the test plays the engines."""

from __future__ import annotations

import asyncio

import pytest
from fakes.clock import FakeClock
from fakes.gateway.engine_link import FakeLink
from fakes.gateway.requests import valid

from baton.core.errors import (
    AdapterRefused,
    BatonError,
    InvalidRequest,
    ModelNotFound,
    NodeLost,
    StartupFailed,
    Unavailable,
)
from baton.core.membership import Member, Role
from baton.core.request.request import Adapter
from baton.gateway.adapters.adapter_registry import AdapterRegistry
from baton.gateway.engines.engine_table import EngineTable
from baton.gateway.engines.linked_engine import LinkedEngine
from baton.gateway.engines.prompt_router import PromptRouter
from baton.gateway.engines.reported_load import ReportedLoad
from baton.gateway.request.engine_link import Avoid, Demand
from baton.prefix_index.mirror import PrefixMirror
from baton.proto.v1 import node_pb2

PREFILL, DECODE, SPARE = "aa" * 16, "dd" * 16, "ee" * 16
ONE, TWO = "1" * 32, "2" * 32


class World:
    """Engines whose responses the test sets."""

    def __init__(self) -> None:
        self.table = EngineTable(PrefixMirror(FakeClock()))
        self.links: dict[str, FakeLink] = {}
        self.registry = AdapterRegistry(self.table, "base")
        self.add(PREFILL, Role.PREFILL)
        self.add(DECODE, Role.DECODE)

    def add(self, name: str, role: Role, max_loras: int = 1) -> LinkedEngine:
        member = Member(name, role, f"node {name[:2]}", "h:1", "base", "fp", 200, 4, 100)
        load = ReportedLoad(0, 0, 0, 100, 50, False, frozenset({PREFILL}))
        self.links[name] = link = FakeLink(name)
        engine = LinkedEngine(member, link, load, node_pb2.Welcome(max_loras=max_loras))
        self.table.add(engine)
        return engine

    async def load(self, name: str, answers: dict[str, str | BatonError]) -> None:
        loading = asyncio.create_task(self.registry.load(name, "/adapter"))
        await asyncio.sleep(0)
        for incarnation, answer in answers.items():
            assert self.links[incarnation].adapter_orders[-1] == (name, "/adapter")
            self.links[incarnation].adapter_answers[-1].set_result(answer)
        await loading


async def test_it_is_served_if_all_engines_have_it() -> None:
    world = World()
    await world.load("sql", {PREFILL: ONE, DECODE: ONE})
    assert world.registry.adapters["sql"].digest == ONE
    for name, text in {"sql": "taken", "base": "taken", "a b": "no name"}.items():
        with pytest.raises(InvalidRequest, match=text):
            await world.registry.load(name, "/other")
    late = world.add(SPARE, Role.DECODE)
    world.registry.linked(late)
    assert world.links[SPARE].adapter_orders == [("sql", "/adapter")]
    world.registry.unload("sql")
    with pytest.raises(ModelNotFound, match="sql"):
        world.registry.unload("sql")
    assert not world.registry.adapters


async def test_one_refusal_is_enough() -> None:
    world = World()
    refusal = AdapterRefused("/adapter/adapter_config.json: r is 99")
    with pytest.raises(AdapterRefused, match=r"node dd refuses sql: .*r is 99"):
        await world.load("sql", {PREFILL: ONE, DECODE: refusal})
    with pytest.raises(AdapterRefused, match="not the same on all hosts"):
        await world.load("sql", {PREFILL: ONE, DECODE: TWO})
    assert not world.registry.adapters
    await world.load("sql", {PREFILL: ONE, DECODE: ONE})


async def test_an_engine_that_is_lost_owes_nothing() -> None:
    world = World()
    loading = asyncio.create_task(world.registry.load("sql", "/adapter"))
    await asyncio.sleep(0)
    world.links[DECODE].adapter_answers[-1].set_result(NodeLost("a node was lost"))
    world.links[PREFILL].adapter_answers[-1].set_result(ONE)
    assert (await loading).digest == ONE
    with pytest.raises(Unavailable):
        await world.load("other", {PREFILL: NodeLost("x"), DECODE: NodeLost("x")})


def test_modules_of_the_command_line() -> None:
    table = EngineTable(PrefixMirror(FakeClock()))
    for text in ("sql", "=x", "base=/x", "a b=/x", "a="):
        with pytest.raises(StartupFailed, match="--lora-modules"):
            AdapterRegistry(table, "base", [text])
    assert not AdapterRegistry(table, "base", ["a=/x"]).is_settled


def test_routing_prefers_engines_that_have_it() -> None:
    world = World()
    links = frozenset({PREFILL})
    has_it = ReportedLoad(0, 0, 0, 100, 50, False, links, adapters=frozenset({ONE}))
    world.add(SPARE, Role.DECODE).receive_heartbeat(has_it)
    nobody = world.add("ff" * 16, Role.DECODE, max_loras=0)
    nobody.receive_heartbeat(ReportedLoad(0, 0, 0, 900, 50, False, links))
    request = valid(adapter=Adapter("one", ONE, "/one"))
    route = PromptRouter(world.table, request).choose(Demand(10), avoid=Avoid(), fingerprint=None)
    assert route.decode.incarnation == SPARE
    route = PromptRouter(world.table, valid()).choose(Demand(10), avoid=Avoid(), fingerprint=None)
    assert route.decode.incarnation == nobody.incarnation, "with most free blocks"
