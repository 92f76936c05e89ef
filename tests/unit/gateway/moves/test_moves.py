"""Which requests move, and to which engine: with engines of known cost, then a gateway with fake
engines.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from fakes.clock import FakeClock, FakeEntropy
from fakes.gateway.engine_link import FakeLink, FakeSink, Letters, Work
from hypothesis import given
from hypothesis import strategies as st

from baton.core.membership import Member, Role
from baton.core.request.request import Adapter, PrefixSource
from baton.core.request.sampling_params import SamplingParams
from baton.core.request.token_ids import column
from baton.core.step_cost import StepCost
from baton.core.step_shape import StepShape
from baton.gateway.engines.engine_table import EngineTable
from baton.gateway.engines.linked_engine import LinkedEngine
from baton.gateway.engines.plan_record import MOVE
from baton.gateway.engines.prompt_router import PromptRouter
from baton.gateway.engines.reported_load import ReportedLoad
from baton.gateway.moves import mover
from baton.gateway.moves.choice import BROKEN, KEPT, EngineSteps, Running, choose_moves
from baton.gateway.moves.mover import RequestMover, movable_by_engine
from baton.gateway.request.engine_link import Blocked, EngineOutput
from baton.gateway.request.session import Session
from baton.gateway.request.session_output import SessionOutput
from baton.gateway.request.session_table import SessionTable
from baton.gateway.request.setbacks import SessionLimits
from baton.gateway.validation.validation import ValidatedRequest
from baton.prefix_index.mirror import PrefixMirror
from baton.proto.v1 import node_pb2

COST = StepCost(0.005, (0.0,) * 10, 0.0, 1e-8, max_rows=8192)  # 5 ms, and 10 ms per million keys
PROMISE_S = 0.015


def steps(name: str, *contexts: int, others: int = 0, **fields: object) -> EngineSteps:
    """An engine with our requests of these contexts, and other gateways' keys."""
    shape = StepShape(num_decodes=len(contexts) + bool(others), keys=sum(contexts) + others)
    ours = [Running(f"{name}{index}", size) for index, size in enumerate(contexts)]
    known = EngineSteps(name, "fp", COST, PROMISE_S, shape, True, 100, 10_000_000, ours)
    return replace(known, **fields)  # type: ignore[arg-type]


def chosen(*engines: EngineSteps) -> list[tuple[str, str]]:
    return [(m.request_id, m.target) for m in choose_moves(engines, random.Random(1))]


def test_the_longest_moves_to_who_has_most_to_spare_and_no_more_than_needed() -> None:
    broken = steps("a", 300_000, 600_000, 200_000)
    assert chosen(broken, steps("b", 200_000), steps("c", 100_000)) == [("a1", "c")]
    assert chosen(steps("a", 1_000_000), steps("b")) == [], "it is kept"
    assert chosen(broken) == []
    assert chosen(broken, steps("b", 800_000)) == [], "it would break there"
    assert chosen(broken, steps("b", fingerprint="other")) == []
    assert chosen(broken, steps("b", takes_more=False)) == []
    assert chosen(broken, steps("b", num_places=0)) == []
    assert chosen(broken, steps("b", room_tokens=100)) == []


def test_a_gateway_moves_its_share() -> None:
    ours = tuple([20_000] * 25)
    num_alone = len(chosen(steps("a", *ours, others=600_000), steps("b")))
    assert num_alone == 4, "at once"
    little = steps("a", *ours[:2], others=1_080_000)
    assert len(chosen(replace(little, decodes=StepShape(num_decodes=56, keys=1_120_000)),
                      steps("b"))) == 1  # fmt: skip


def test_all_leave_an_engine_whose_promise_was_withdrawn() -> None:
    """All decodes leave, however short the engine's steps are; targets receive only what lets them
    keep their promise."""
    left = steps("a", *[10_000] * 20, is_withdrawn=True, takes_more=False)
    assert len(chosen(left, steps("b"))) == 16, "at once"
    assert len(chosen(left, steps("b", 820_000))) == 2
    assert chosen(left) == chosen(left, replace(left, incarnation="b")) == []


@given(
    st.lists(st.lists(st.integers(1000, 400_000), max_size=8), min_size=1, max_size=5),
    st.integers(0, 99),
)
def test_no_target_is_broken_by_what_comes_and_none_is_a_source(
    clusters: list[list[int]], seed: int
) -> None:
    engines = {str(i): steps(str(i), *contexts) for i, contexts in enumerate(clusters)}
    moves = choose_moves(engines.values(), random.Random(seed))
    assert len({move.request_id for move in moves}) == len(moves)
    assert not {move.source for move in moves} & {move.target for move in moves}
    for move in moves:
        assert engines[move.source].load > BROKEN
        (size,) = (n for i, n in engines[move.source].ours if i == move.request_id)
        engines[move.target] = engines[move.target].with_one(size)
    assert all(engines[move.target].load <= KEPT for move in moves)


class World:
    """A gateway with engines `a` and `b` and one request on either; `is_streaming`: its first token
    has arrived."""

    def __init__(self, num_requests: int = 1, *, is_streaming: bool = True) -> None:
        self.clock = FakeClock()
        self.table = EngineTable(PrefixMirror(self.clock))
        self.sessions = SessionTable(self.clock, 100)
        self.links = {name: FakeLink(name) for name in "ab"}
        for name, link in self.links.items():
            member = Member(name, Role.DECODE, name, "h:1", "demo", "fp", 1 << 20, 16, 1 << 20)
            self._add(member, link)
        self.report(busy="")
        self.mover = RequestMover(self.table, self.sessions, self.clock, random.Random(1))
        self.running = [self.session(f"r{index}") for index in range(num_requests)]
        for session in self.running:
            self.sessions.start(session)
            name = session.attempt.pair[1]  # type: ignore[union-attr]
            if is_streaming:
                output = EngineOutput(session.request_id, 0, 0, (ord("x"),))
                self.table.engines[name].receive([output])
                self.sessions.engine_step(name, [output])

    def _add(self, member: Member, link: FakeLink) -> LinkedEngine:
        load = ReportedLoad(0, 0, 0, 0, 0, False, frozenset())
        welcome = node_pb2.Welcome(max_num_seqs=64, block_bytes=2048)
        engine = LinkedEngine(member, link, load, welcome, self.clock)
        self.table.add(engine)
        return engine

    @property
    def movable(self) -> dict[str, list[Session]]:
        return movable_by_engine(self.sessions, self.clock.monotonic_s())

    def session(
        self, request_id: str, *, max_queue_s: float = math.inf, **sampling: object
    ) -> Session:
        params = SamplingParams(**{"max_tokens": 500, **sampling})  # type: ignore[arg-type]
        request = ValidatedRequest(column((1,) * 1000), params, "label")
        return Session(
            SessionOutput(request_id, request, Letters().step, FakeSink(), self.clock, 0),
            deadline_s=1e3,
            router=PromptRouter(self.table, request),
            entropy=FakeEntropy(),
            limits=SessionLimits(max_queue_s=max_queue_s),
        )

    def add_prefill_engine(
        self, *, waiting_tokens: int = 0, is_promising: bool = False, **fields: object
    ) -> FakeLink:
        """Add `p`, from which both others can pull."""
        link = self.links["p"] = FakeLink("p")
        member = Member("p", Role.PREFILL, "p", "h:1", "demo", "fp", 1 << 20, 16, 1 << 20)
        engine = self._add(member, link)
        self.report(busy="", links=frozenset("p"), **fields)
        target_s = PROMISE_S if is_promising else None
        load = replace(engine.load, tbt_target_s=target_s, waiting_tokens=waiting_tokens)
        engine.receive_heartbeat(replace(load, decodes=StepShape(), credit_blocks=1 << 16))
        return link

    def report(self, busy: str, **fields: object) -> None:
        """Send heartbeats; engine `busy` breaks its promise."""
        for name, engine in self.table.engines.items():
            load = ReportedLoad(
                *(3, 0, 0, 1 << 16, 0, False, frozenset()),
                link_gbytes_per_s={"ba"[name == "b"]: 100.0},
                num_requests=0,
                room_blocks=1 << 16,
                step_cost=COST,
                tbt_target_s=PROMISE_S,
                decodes=StepShape(num_decodes=40, keys=1_100_000 if name == busy else 40_000),
            )
            engine.receive_heartbeat(replace(load, **fields))  # type: ignore[arg-type]


async def test_the_mover_sends_them_with_the_old_engine_as_their_source() -> None:
    world = World()
    on = world.movable.keys()
    world.mover.look()
    assert not world.table.plans.moves, "nothing is broken"
    source = next(iter(on))
    target = "ab"[source == "a"]
    world.report(busy=source or "")
    before = len(world.links[target].dispatched)
    world.mover.look()
    (moved, *more) = world.links[target].dispatched[before:]
    assert not more
    request, work, _, _ = moved
    assert work is Work.LOCAL and request.attempt == 1
    assert request.prefix_source == PrefixSource(
        source or "", 1000 // 16, request.prefix_source.limit_s
    )
    world.mover.look()
    assert len(world.links[target].dispatched) == before + 1, "both rest"
    output = EngineOutput(request.request_id, 1, 1, (ord("y"),))
    world.sessions.engine_step(target, [output])
    assert world.table.plans.moves == {"moved": 1}
    assert world.links[source].cancelled == [0]
    plans = world.table.plans.by_kind()
    assert plans[MOVE, "plans"] == plans[MOVE, "moves", target] == 1


async def test_a_promise_that_is_withdrawn_sends_away_what_decodes_there() -> None:
    """Decodes leave an engine whose promise is withdrawn, although their steps keep within its
    looser target for remaining decodes."""
    world = World()
    (source,) = world.movable
    target, load = "ab"[source == "a"], world.table.engines[source].load
    assert load is not None
    withdrawn = replace(load, is_promise_withdrawn=True, tbt_target_s=2 * PROMISE_S)
    world.table.engines[source].receive_heartbeat(withdrawn)
    world.mover.look()
    ((request, work, *_),) = world.links[target].dispatched
    assert work is Work.LOCAL and request.prefix_source.incarnation == source


async def test_nothing_moves_without_a_link_or_to_who_is_busy_or_drains() -> None:
    for fields in (
        {"link_gbytes_per_s": {}},
        {"link_gbytes_per_s": {"another": 100.0}},
        {"is_draining": True},
        {"is_promise_withdrawn": True},
        {"waiting_tokens": 1 << 20},
        {"room_blocks": 1},
    ):
        world = World()
        (source,) = world.movable or {""}
        num_before = sum(len(link.dispatched) for link in world.links.values())
        world.report(busy=source or "", **fields)
        world.mover.look()
        num_after = sum(len(link.dispatched) for link in world.links.values())
        assert num_after == num_before, fields


async def test_what_some_engine_does_not_serve_stays() -> None:
    """A request stays if no target supports its constraint, adapter or context length."""
    world = World()
    (session,) = world.running
    (source,) = world.movable
    target = "ab"[source == "a"]
    session.request = replace(session.request, adapter=Adapter("lora", "digest", "/x"))
    world.report(busy=source)
    world.mover.look()
    assert not world.links[target].dispatched
    for engine in world.table.engines.values():
        engine.welcome.max_loras = 1
    member = world.table.engines[target].member
    world.table.engines[target].member = replace(member, max_model_len=1499)
    world.mover.look()
    assert not world.links[target].dispatched, "its 1500 tokens would end there early"
    world.table.engines[target].member = replace(member, max_model_len=1500)
    world.mover.look()
    assert world.links[target].dispatched


async def test_a_prompt_leaves_decodes_that_leave_it_no_room() -> None:
    """A prompt that decodes leave no room is dispatched again, to an engine that only prefills."""
    world = World(is_streaming=False)
    (session,) = world.running
    assert session.attempt is not None
    name = session.attempt.pair[0]
    source, other = world.links[name], world.links["ab"[name == "a"]]
    world.clock.advance(0.4)
    world.mover.look()
    prefill = world.add_prefill_engine()
    world.mover.look()
    assert not source.cancelled, "it has not waited for long"
    world.clock.advance(0.2)
    world.mover.look()
    ((request, work, *_),) = prefill.dispatched
    assert work is Work.PREFILL and request.attempt == 1 and source.cancelled == [0]
    works = [work for link in (source, other) for _, work, *_ in link.dispatched]
    assert works == [Work.LOCAL, Work.DECODE]
    assert world.table.plans.moves == {"planned_again": 1} and session.last_attempt is not None
    world.clock.advance(10.0)
    world.mover.look()
    assert len(prefill.dispatched) == 1, "once"


async def test_a_prompt_stays_where_nobody_would_be_quicker() -> None:
    for num_tokens, is_promising in ((0, True), (1 << 20, False)):
        world = World(is_streaming=False)
        prefill = world.add_prefill_engine(waiting_tokens=num_tokens, is_promising=is_promising)
        world.clock.advance(1.0)
        world.mover.look()
        assert not prefill.dispatched and not world.table.plans.moves


async def test_a_long_prompt_takes_long_anywhere() -> None:
    """A long prompt is given more time first: its attention takes half a second even on an idle
    engine."""
    world = World(is_streaming=False)
    prefill = world.add_prefill_engine(step_cost=replace(COST, pair_s=1e-6))
    world.clock.advance(0.9)
    world.mover.look()
    assert not prefill.dispatched
    world.clock.advance(0.2)
    world.mover.look()
    assert prefill.dispatched


async def test_requests_that_stream_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streaming requests are skipped: there may be thousands, four times a second."""
    world = World(num_requests=3)
    world.add_prefill_engine()
    monkeypatch.setattr(mover, "_beside_decodes_since_s", lambda one: pytest.fail(one.request_id))
    world.mover.look()


async def test_the_only_decode_engine_gets_the_prompt_from_another() -> None:
    """The prompt is handed off, not computed on the decode engine, whose estimate is still the
    lowest."""
    world = World(num_requests=0)
    world.table.remove("b")
    (session,) = world.running = [world.session("r0")]
    world.sessions.start(session)
    world.clock.advance(2.0)
    prefill = world.add_prefill_engine(
        waiting_tokens=5000, step_cost=replace(COST, row_s=(2e-5,) * 10)
    )
    world.mover.look()
    assert [work for _, work, *_ in prefill.dispatched] == [Work.PREFILL]
    works = [work for _, work, *_ in world.links["a"].dispatched]
    assert works == [Work.LOCAL, Work.DECODE] and world.links["a"].cancelled == [0]
    assert not world.table.plans.num_unavailable


async def test_an_engine_that_could_hand_it_off_does_not_get_its_prompt_back() -> None:
    """The prompt does not return to its prefill engine, whose estimate is still the lowest."""
    world = World(num_requests=0)
    world.table.remove("b")
    slow = world.add_prefill_engine(is_promising=True)
    (session,) = world.running = [world.session("r0")]
    world.table.engines["a"].account.has_refused = True
    world.sessions.start(session)
    assert [work for _, work, *_ in slow.dispatched] == [Work.LOCAL]
    world.table.engines["a"].account.has_refused = False
    world.clock.advance(2.0)
    pure = world.links["q"] = FakeLink("q")
    member = replace(world.table.engines["p"].member, incarnation="q")
    engine = world._add(member, pure)
    for name in "aq":
        load = replace(world.table.engines["p"].load, links=frozenset("pq"), tbt_target_s=None)
        world.table.engines[name].receive_heartbeat(load)
    engine.receive_heartbeat(
        replace(engine.load, waiting_tokens=5000, step_cost=replace(COST, row_s=(2e-5,) * 10))
    )
    world.mover.look()
    assert slow.cancelled == [0] and len(slow.dispatched) == 1
    assert [work for _, work, *_ in pure.dispatched] == [Work.PREFILL]


async def test_a_prompt_that_finds_no_place_then_has_not_waited_for_one_before() -> None:
    world = World(num_requests=0)
    world.table.remove("b")
    (session,) = world.running = [world.session("r0", max_queue_s=1.0)]
    world.sessions.start(session)
    world.clock.advance(2.0)
    world.add_prefill_engine()
    full = world.table.engines["a"]
    full.receive_heartbeat(replace(full.load, num_requests=64, room_blocks=0))
    world.mover.look()
    assert session.blocked is Blocked.PLACE and session.next_wakeup_s == 3.0
    world.clock.advance(0.9)
    session.tick()
    assert not session.is_over
    world.clock.advance(0.2)
    session.tick()
    assert session.is_over


async def test_a_prompt_stays_where_nobody_else_serves_it() -> None:
    """A prompt stays if the faster engine lacks its adapter, or the decode engine has no link to
    it."""
    for has_adapter, links in ((True, frozenset("p")), (False, frozenset[str]())):
        world = World(is_streaming=False)
        (session,) = world.running
        prefill = world.add_prefill_engine()
        for name, engine in world.table.engines.items():
            engine.welcome.max_loras = int(name != "p")
            engine.receive_heartbeat(replace(engine.load, links=links))
        if has_adapter:
            session.request = replace(session.request, adapter=Adapter("lora", "digest", "/x"))
        world.clock.advance(1.0)
        world.mover.look()
        assert not prefill.dispatched and not world.table.plans.moves
        assert not any(link.cancelled for link in world.links.values())


async def test_a_search_is_not_begun_anew() -> None:
    """A beam search is not restarted: it sends its tokens at its end, so none does not mean that
    its prompt waits."""
    world = World(num_requests=0)
    search = world.session("search", use_beam_search=True, best_of=2)
    world.sessions.start(search)
    prefill = world.add_prefill_engine()
    world.clock.advance(1.0)
    world.mover.look()
    assert not prefill.dispatched and not world.table.plans.moves


async def test_a_prompt_does_not_leave_an_engine_for_itself() -> None:
    """An engine whose promise is withdrawn keeps the prompts that it has."""
    world = World(is_streaming=False)
    (session,) = world.running
    assert session.attempt is not None
    name = session.attempt.pair[0]
    engine = world.table.engines[name]
    engine.member = replace(engine.member, role=Role.PREFILL)
    world.report(busy="", links=frozenset(name))
    engine.receive_heartbeat(replace(engine.load, tbt_target_s=None, decodes=StepShape()))
    world.clock.advance(60.0)
    world.mover.look()
    assert not world.table.plans.moves and not world.links[name].cancelled
