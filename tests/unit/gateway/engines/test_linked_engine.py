"""A gateway's records of the requests sent to an engine: none is left once the engine has
responded.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.clock import FakeClock
from fakes.gateway.engine_link import FakeLink
from fakes.gateway.requests import valid

from baton.core.errors import Unavailable
from baton.core.membership import Member, Role
from baton.core.request.request import FinishReason, Request, TokenLogprobs
from baton.core.request.sampling_params import SamplingParams
from baton.core.step_cost import StepCost
from baton.core.step_shape import StepShape
from baton.gateway.engines.cluster_view import _REPORT_S, ClusterView
from baton.gateway.engines.engine_state import fits_promise
from baton.gateway.engines.engine_table import EngineTable
from baton.gateway.engines.linked_engine import LinkedEngine
from baton.gateway.engines.prompt_router import PromptRouter
from baton.gateway.engines.reported_load import ReportedLoad
from baton.gateway.http.dashboard.snapshot import EngineRoster
from baton.gateway.request.engine_link import Avoid, Demand, EngineOutput, Route
from baton.prefix_index.mirror import PrefixMirror
from baton.prefix_index.prefix_sources import Fetch
from baton.proto.v1 import node_pb2

COST = StepCost(0.005, (1e-5,) * 10, max_rows=8192)
LOAD = ReportedLoad(0, 0, 0, 1 << 16, 1 << 16, False, frozenset(), step_cost=COST)


def linked(role: Role, **load: Any) -> LinkedEngine:
    member = Member("e", role, "e", "h:1", "demo", "fp", 1 << 20, 16, 1 << 20)
    welcome = node_pb2.Welcome(max_num_seqs=64, block_bytes=2048)
    return LinkedEngine(member, FakeLink("e"), replaced(**load), welcome, FakeClock())


def replaced(**fields: Any) -> ReportedLoad:
    names = {name: getattr(LOAD, name) for name in LOAD.__dataclass_fields__}
    return ReportedLoad(**names | {"room_blocks": 1 << 16} | fields)


def request(num_tokens: int, **fields: Any) -> Request:
    return Request("r", 0, (1,) * num_tokens, SamplingParams(max_tokens=16), **fields)


OTHER = FakeLink("other")


def test_samples_that_go_on_elsewhere_leave_nothing_at_the_prefill_engine() -> None:
    engine = linked(Role.PREFILL)
    engine.dispatch(request(100, fork_ids=("r1", "r2")), Route(engine, OTHER), None, 9.0)
    for request_id in ("r", "r1", "r2"):
        engine.receive([EngineOutput(request_id, 0, 0, (97,))], [])
    assert not engine.account._decodes and not engine.account.unanswered


def test_a_prompt_is_there_while_any_of_its_samples_wants_it() -> None:
    for is_computed in (True, False):
        engine = linked(Role.PREFILL)
        engine.dispatch(request(100, fork_ids=("r1", "r2")), Route(engine, OTHER), None, 9.0)
        for request_id in ("r1", "r"):
            engine.cancel(request_id, 0)
            assert engine.account.tokens_ahead == 100
        if is_computed:
            engine.receive([EngineOutput("r2", 0, 0, (97,))], [])
        else:
            engine.cancel("r2", 0)
        assert engine.account.tokens_ahead == 0 and engine.account.has_no_prompt
        assert not engine.account.unanswered


def test_beams_whose_prompt_is_scored_end_where_the_prompt_is_computed() -> None:
    """The output with the scores comes first, and carries the number of cached tokens."""
    engine = linked(Role.PREFILL)
    engine.dispatch(request(100), Route(engine, OTHER), None, 9.0)
    scores = (TokenLogprobs(-1.0, ()),)
    engine.receive([EngineOutput("r", 0, cached_tokens=0, prompt_logprobs=scores)], [])
    assert engine.account.unanswered
    engine.receive([EngineOutput("r", 0)], [])
    assert not engine.account.unanswered and not engine.account._decodes


def test_blocks_of_a_fetched_prefix_are_taken_too() -> None:
    rooms = []
    for fetch in (None, Fetch("other", 1584, 0.01)):
        engine = linked(Role.DECODE)
        before = engine.account._room_blocks
        engine.dispatch(request(1600), Route(engine, engine, fetch=fetch), None, 9.0)
        rooms.append(before - engine.account._room_blocks)
    assert rooms[0] == rooms[1] > 100


def test_places_that_a_promise_leaves_are_taken_as_prompts_are_sent() -> None:
    """Slots are taken on dispatch, before the decodes start: otherwise all prompts queued between
    two heartbeats would get the same slot."""
    decodes = StepShape(num_decodes=4, keys=400)
    engine = linked(Role.DECODE, tbt_target_s=0.0051, num_requests=4, decodes=decodes)
    for number in range(6):
        assert fits_promise(engine, Demand(100))
        sent = Request(f"r{number}", 0, (1,) * 100, SamplingParams(max_tokens=16))
        engine.dispatch(sent, Route(OTHER, engine), None, 9.0)
    assert not fits_promise(engine, Demand(100))
    engine.receive([EngineOutput("r0", 0, 0, (97,), FinishReason.LENGTH)], [])
    assert fits_promise(engine, Demand(100))


def test_a_step_of_a_pipeline_has_its_share_of_the_requests() -> None:
    decodes = StepShape(num_decodes=4, keys=400)  # in one stage's step, which has room for ten
    load = {"tbt_target_s": 0.0051, "num_stages": 2, "decodes": decodes}
    for num_requests, has_place in ((8, True), (19, True), (20, False)):
        engine = linked(Role.DECODE, num_requests=num_requests, **load)
        assert fits_promise(engine, Demand(100)) is has_place


def test_a_prompt_that_is_scored_has_nothing_cached_where_it_is_computed() -> None:
    engine, table = linked(Role.DECODE, tbt_target_s=0.05), EngineTable(PrefixMirror(FakeClock()))
    router = PromptRouter(table, valid(sampling=SamplingParams(prompt_logprobs=0)))
    assert engine.takes_prompts and router._prefix(engine, [], 1600, 50, 0).num_tokens == 0
    engine = linked(Role.DECODE)
    assert router._prefix(engine, [], 1600, 50, 0).num_tokens == 800, "it is pulled there"


def view_of(engine: LinkedEngine, clock: FakeClock, sessions: Any = None) -> ClusterView:
    table = EngineTable(PrefixMirror(clock))
    table.add(engine)
    return ClusterView(
        *(None, "demo", None, clock, table, sessions, lambda: None, 1.0, None)  # type: ignore[arg-type]
    )


def test_nothing_is_sent_where_a_stream_has_ended_before_it_is_known_why() -> None:
    engine = linked(Role.DECODE, tbt_target_s=0.05)
    view = view_of(engine, FakeClock())
    router = PromptRouter(view._table, valid())
    assert router.choose(Demand(100), avoid=Avoid(), fingerprint=None)
    view.ended(SimpleNamespace(member=engine.member))  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="no decode node is ready"):
        router.choose(Demand(100), avoid=Avoid(), fingerprint=None)
    roster = EngineRoster(view._table, lambda: [engine.member], view.is_starting)
    roster.look(0.0)
    assert [row["state"] for row in roster.rows()] == ["unlinked"]


async def test_every_heartbeat_is_looked_at_soon() -> None:
    """A heartbeat is reported to sessions at once, or with others within a moment, after the last
    one."""
    looks: list[bool] = []
    engine, clock = linked(Role.DECODE), FakeClock()
    sessions = SimpleNamespace(cluster_changed=lambda *, is_load_only: looks.append(is_load_only))
    view = view_of(engine, clock, sessions)
    link: Any = SimpleNamespace(member=engine.member)
    for waiting in (5, 4, 3):
        view.heartbeat(link, replaced(waiting_tokens=waiting))
    assert looks == [True]
    clock.advance(_REPORT_S)
    await asyncio.sleep(1.5 * _REPORT_S)
    assert looks == [True, True]
    view.heartbeat(link, replaced(is_draining=True))
    assert looks == [True, True, False], "whom it may serve has changed"
