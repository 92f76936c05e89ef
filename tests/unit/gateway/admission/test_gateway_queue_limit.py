"""Predicted waits and refusals: engines of known cost, on a clock that the test advances."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from fakes.clock import FakeClock
from fakes.gateway.engine_link import FakeLink
from fakes.gateway.step_costs import linear_cost, linear_cost_message
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import Cancelled, DeadlineExceeded, Overloaded
from baton.core.membership import Member, Role
from baton.core.request.request import Request, Ticket
from baton.core.request.sampling_params import SamplingParams
from baton.core.step_shape import StepShape, pairs_of
from baton.gateway.admission.queue_limit import QueueLimit
from baton.gateway.engines.engine_account import EngineAccount
from baton.gateway.engines.engine_table import EngineTable
from baton.gateway.engines.linked_engine import LinkedEngine
from baton.gateway.engines.reported_load import ReportedLoad, load_from_wire
from baton.gateway.request.dispatch_queue import DispatchQueue
from baton.gateway.request.engine_link import EngineOutput, Route
from baton.prefix_index.mirror import PrefixMirror
from baton.prefix_index.prefix_sources import CachedPrefix
from baton.proto.v1 import node_pb2

TICKET = Ticket("t" * 32, "1" * 32, "2" * 32)
ME, BULK = 1, 2


class Outbox:
    def dispatch(self, *_: object) -> None: ...

    def cancel(self, *_: object) -> None: ...


class Cluster:
    """Prefill engines and the requests sent to them. `rates`: tokens/s that each engine
    publishes."""

    def __init__(self, **rates: float | None) -> None:
        self.clock = FakeClock()
        self.table = EngineTable(PrefixMirror(self.clock))
        self.costs = {n: linear_cost(0.0, 1 / rate) if rate else None for n, rate in rates.items()}
        for name in rates:
            self.link(name)
            self.beat(name, 0)

    def link(self, name: str) -> None:
        member = Member(name, Role.PREFILL, name, "", "demo", "fp", 4096, 16, 1000)
        load = ReportedLoad(0, 0, 0, 900, 900, False, frozenset())
        self.table.add(LinkedEngine(member, Outbox(), load, clock=self.clock))

    def beat(
        self,
        name: str,
        waiting_tokens: int,
        num_steps: int = 0,
        by_caller: Mapping[int, int] | None = None,
        waiting_pairs: int = 0,
    ) -> None:
        load = ReportedLoad(
            *(0, 0, waiting_tokens, 900, 900, False, frozenset()),
            num_steps=num_steps,
            step_cost=self.costs[name],
            waiting_pairs=waiting_pairs,
            waiting_by_caller=by_caller or {},
        )
        self.table.engines[name].receive_heartbeat(load)

    def dispatch(
        self, name: str, request_id: str, num_tokens: int, caller_id: int = ME, cached: int = 0
    ) -> None:
        request = Request(
            request_id, 0, (1,) * num_tokens, SamplingParams(max_tokens=5), caller_id=caller_id
        )
        engine = self.table.engines[name]
        route = Route(engine, FakeLink(TICKET.puller_incarnation), (cached, 0))
        engine.dispatch(request, route, TICKET, 60.0)

    def answer(self, name: str, request_id: str) -> None:
        output = EngineOutput(request_id, 0, token_ids=(1,), cached_tokens=0)
        self.table.engines[name].receive([output])

    def wait_s(self, num_tokens: int, caller_id: int = ME, **cached: int) -> float:
        prefixes = {name: CachedPrefix(num) for name, num in cached.items()}
        return self.limit().prefill_s(caller_id, num_tokens, prefixes)

    def backlogs(self) -> list[EngineAccount]:
        return [engine.account for engine in self.table.engines.values()]

    def limit(self, max_queue_s: float | None = None) -> QueueLimit:
        return QueueLimit(self.table, DispatchQueue(self.table.released), max_queue_s)


def test_a_wait_is_what_is_ahead_and_its_own_by_the_engines_cost() -> None:
    cluster = Cluster(p=1000)
    assert cluster.wait_s(500) == 0  # the queue is empty
    cluster.dispatch("p", "second", 1500)
    assert cluster.wait_s(500) == pytest.approx(2.0)
    assert cluster.wait_s(500, p=400) == pytest.approx(1.6)
    cluster.costs["p"] = linear_cost(0.25, 0.001)
    cluster.beat("p", 3500, by_caller={ME: 3500})  # includes other gateways' requests
    assert cluster.wait_s(500) == pytest.approx(4000 * (0.25 + 2.048) / 2048)  # in two steps


@pytest.mark.parametrize("is_ours", [True, False])
def test_what_prompts_see_takes_its_time(is_ours: bool) -> None:
    """The wait includes a prompt's attention: 7.2 s for 120k tokens, beside 2.4 s for their
    GEMMs."""
    cluster = Cluster(p=50_000)
    cost = cluster.costs["p"] = replace(linear_cost(0.0, 2e-5), pair_s=1e-9)
    cluster.beat("p", 0)
    before, after = StepShape(120_000, pairs_of(120_000, 0)), StepShape(10_000, pairs_of(10_000, 0))
    if is_ours:
        cluster.dispatch("p", "before", 120_000)
    else:
        cluster.beat("p", 120_000, by_caller={BULK: 120_000}, waiting_pairs=before.pairs)
    whole_s = cost.seconds(before)
    if is_ours:
        assert cluster.wait_s(10_000) == pytest.approx(whole_s + cost.seconds(after), rel=1e-3)
    else:  # no more of the other caller's tokens than our own, at their rate
        wait_s = whole_s / 12 + cost.seconds(after)
        assert cluster.wait_s(10_000) == pytest.approx(wait_s, rel=1e-3)
    assert cluster.wait_s(120_000) == pytest.approx(2 * whole_s, rel=1e-3)
    cluster.clock.advance(whole_s / 2)
    assert cluster.wait_s(120_000) == pytest.approx(1.5 * whole_s, rel=1e-3)
    with pytest.raises(Overloaded):
        cluster.limit().check(ME, 120_000, {}, 1.4 * whole_s)


def test_a_prefix_that_another_engine_has_counts_where_it_is_fetched_from() -> None:
    cluster = Cluster(p=1000, q=1000)
    for name in ("p", "q"):
        cluster.dispatch(name, f"second at {name}", 1500 if name == "p" else 9000)
    assert cluster.wait_s(500, q=496) == pytest.approx(2.0)
    cluster.table.engines["p"].welcome.block_bytes = 16_000
    load = cluster.table.engines["p"].load
    cluster.table.engines["p"].load = replace(load, link_gbytes_per_s={"q": 1.0})
    prefixes = {"q": CachedPrefix(496, lendable_tokens=496)}
    wait_s = cluster.limit().prefill_s(ME, 500, prefixes)
    assert wait_s == pytest.approx(1.5 + 0.004 + 0.004 + 0.0005, abs=1e-3)


def test_nothing_is_predicted_by_what_no_engine_has_measured() -> None:
    cluster = Cluster(p=None)
    cluster.dispatch("p", "second", 1 << 20)
    cluster.beat("p", 1 << 30)
    assert cluster.wait_s(1 << 20) == 0
    for step_s, token_s in ((0.0, 0.0), (-1.0, 0.1), (0.0, float("nan")), (float("inf"), 0.1)):
        beat = node_pb2.Heartbeat(step_cost=linear_cost_message(step_s, token_s))
        assert load_from_wire(beat).step_cost is None
    beat = node_pb2.Heartbeat(step_cost=linear_cost_message(0.0, 1e-12))
    assert load_from_wire(beat).step_cost == linear_cost(0.0, 1e-12)


def test_the_best_engine_counts() -> None:
    cluster = Cluster(slow=100, fast=1000)
    for name in cluster.costs:
        cluster.beat(name, 900, by_caller={ME: 900})
    assert cluster.wait_s(100) == pytest.approx(1.0)


def test_of_others_no_more_is_ahead_than_one_has_waiting_oneself() -> None:
    cluster = Cluster(p=1000)
    for number in range(64):
        cluster.dispatch("p", f"bulk {number}", 1000, BULK)
    cluster.beat("p", 94_000, by_caller={BULK: 84_000, 3: 10_000})
    assert cluster.wait_s(4) == pytest.approx(0.012)  # 4 of each other caller, 4 its own
    assert cluster.wait_s(15_000) == pytest.approx(40.0)
    assert cluster.wait_s(1000, BULK) == pytest.approx(84 - 64 + 64 + 1 + 10)
    cluster.limit(0.1).check(ME, 4, {}, 60.0)
    with pytest.raises(Overloaded):
        cluster.limit(0.1).check(BULK, 4, {}, 60.0)
    with pytest.raises(Overloaded):
        cluster.limit(0.1).check(BULK, 0, {}, 60.0)  # before its prompt is processed


def test_what_is_computed_of_a_long_prompt_leaves_as_much_of_it_ahead() -> None:
    cluster = Cluster(p=1000)
    cluster.beat("p", 100_000, by_caller={BULK: 100_000})
    for _ in range(2):
        assert cluster.wait_s(500) == pytest.approx(1.0, abs=0.01)
        cluster.clock.advance(1.0)


def test_callers_that_are_not_listed_have_less_than_those_that_are() -> None:
    cluster = Cluster(p=1000)
    cluster.beat("p", 5000, by_caller={3: 1000, 4: 1000})
    assert cluster.wait_s(100) == pytest.approx(0.1 + 0.2 + 0.3)
    cluster.beat("p", 5000)
    assert cluster.wait_s(100) == pytest.approx(5.1), "an engine that lists nobody"


@pytest.mark.parametrize(
    ("max_queue_s", "remaining_s", "is_refused"),
    [(None, 2.1, False), (None, 1.9, True), (2.1, 60.0, False), (1.9, 60.0, True)],
)
def test_who_may_wait(max_queue_s: float | None, remaining_s: float, is_refused: bool) -> None:
    cluster = Cluster(p=1000)
    cluster.dispatch("p", "second", 1500)
    limit = cluster.limit(max_queue_s)
    if not is_refused:
        limit.check(ME, 500, {}, remaining_s)
        return
    with pytest.raises(Overloaded) as refused:
        limit.check(ME, 500, {}, remaining_s)
    assert refused.value.retry_after_s == pytest.approx(0.1)
    with pytest.raises(Overloaded) as refused:
        limit.check(ME, 5500, {}, remaining_s)
    assert refused.value.retry_after_s == pytest.approx(7.0 - 1.9)
    with pytest.raises(DeadlineExceeded):
        limit.check(ME, 1, {}, 0.0)


moves = st.lists(
    st.tuples(
        st.sampled_from(["send", "answer", "cancel", "fail", "beat", "lose", "wait"]),
        st.integers(0, 5),  # index of a request or an engine
        st.integers(1, 5000),  # tokens
        st.floats(0, 1),  # the cached share of them by the index, or seconds
    ),
    max_size=40,
)


@given(
    st.sampled_from(["p", "pq"]),
    moves,
    st.floats(1e-7, 0.1),
    st.floats(0, 0.5),
    st.floats(1e-3, 1),
    st.integers(1, 4000),
)
def test_an_idle_system_refuses_nothing_whatever_came_before(
    names: str,
    history: list[tuple[str, int, int, float]],
    token_s: float,
    step_s: float,
    remaining_s: float,
    num_tokens: int,
) -> None:
    """After any sequence of requests, responses and losses an idle system refuses nothing, even if
    the last heartbeat is older than the last response and reports all that was pending since the
    one before it."""
    cluster = Cluster(**dict.fromkeys(names, 1.0))
    cluster.costs = dict.fromkeys(names, linear_cost(step_s, token_s))
    open_: dict[str, tuple[str, int, int]] = {}  # engine, caller, tokens
    since_beat: dict[str, dict[str, tuple[str, int, int]]] = {name: {} for name in names}

    def beat(name: str, count: int = 1000) -> None:
        reported: dict[int, int] = {}
        known = {**since_beat[name], **{i: o for i, o in open_.items() if o[0] == name}}
        for _, caller_id, tokens in known.values():
            reported[caller_id] = reported.get(caller_id, 0) + tokens
        listed = dict(sorted(reported.items())[:count])
        cluster.beat(name, sum(reported.values()), by_caller=listed)
        since_beat[name] = {i: o for i, o in open_.items() if o[0] == name}

    def end(request_id: str, how: str) -> None:
        name = open_.pop(request_id)[0]
        engine = cluster.table.engines[name]
        if how == "answer":
            cluster.answer(name, request_id)
        elif how == "cancel":
            engine.cancel(request_id, 0)
        else:
            engine.receive([EngineOutput(request_id, 0, error=Cancelled("no"))])

    for number, (move, which, tokens, part) in enumerate(history):
        name = names[which % len(names)]
        if move == "send":
            request_id, caller_id = f"r{number}", which % 3
            cluster.dispatch(name, request_id, tokens, caller_id, int(part * (tokens - 1)))
            open_[request_id] = since_beat[name][request_id] = (name, caller_id, tokens)
        elif move == "beat":
            beat(name, which)
        elif move == "wait":
            cluster.clock.advance(part)
        elif move == "lose":
            cluster.table.remove(name)
            open_ = {i: o for i, o in open_.items() if o[0] != name}
            since_beat[name] = {}
            cluster.link(name)
            cluster.beat(name, 0)
        elif open_:
            end([*open_][which % len(open_)], move)
    for request_id in [*open_]:
        end(request_id, "answer")
    for name in names:
        beat(name)
    for caller_id in range(3):
        cluster.limit(1e-3).check(caller_id, num_tokens, {}, remaining_s)
        assert not cluster.table.has_idle_engine or not cluster.wait_s(num_tokens, caller_id)


def test_of_two_engines_that_compute_a_prompt_each_the_one_that_began_first_is_ahead() -> None:
    cluster = Cluster(p=1000, q=1000)
    p, q = cluster.backlogs()
    cluster.dispatch("p", "ours", 1000)
    cluster.clock.advance(0.4)
    cluster.beat("q", 1000)  # another gateway's tokens
    cluster.clock.advance(0.5)
    assert (p.tokens_ahead, q.tokens_ahead) == (100, 500)
    cluster.dispatch("p", "next", 1000)
    cluster.beat("q", 2000)
    assert (p.tokens_ahead, q.tokens_ahead) == (1100, 1500)
    cluster.clock.advance(0.6)
    assert (p.tokens_ahead, q.tokens_ahead) == (1000, 900), "ours is late, and the next not begun"
    cluster.answer("p", "ours")
    cluster.beat("q", 1000)
    cluster.clock.advance(0.1)
    assert (p.tokens_ahead, q.tokens_ahead) == (900, 900)
    cluster.clock.advance(60.0)
    assert (p.tokens_ahead, q.tokens_ahead) == (0, 0)


def test_later_tokens_of_a_stream_are_no_progress_of_prompts() -> None:
    cluster = Cluster(p=1000)
    (p,) = cluster.backlogs()
    cluster.dispatch("p", "first", 1000)
    cluster.answer("p", "first")
    cluster.dispatch("p", "second", 1000)
    cluster.clock.advance(0.4)
    cluster.answer("p", "first")
    assert p.tokens_ahead == 600


def test_a_step_that_ended_while_as_much_came_is_a_step_that_ended() -> None:
    cluster = Cluster(p=1000)
    (p,) = cluster.backlogs()
    cluster.beat("p", 1000, num_steps=3)
    cluster.clock.advance(0.9)
    cluster.beat("p", 1000, num_steps=3)
    assert p.tokens_ahead == 100
    cluster.clock.advance(0.1)
    cluster.beat("p", 1000, num_steps=4)
    assert p.tokens_ahead == 1000


def test_a_caller_with_nothing_at_an_engine_may_always_send_there() -> None:
    cluster = Cluster(p=1000)
    (p,) = cluster.backlogs()
    cluster.dispatch("p", "bulk", 499, BULK)
    assert p.takes_more_of(BULK)
    cluster.dispatch("p", "more", 1, BULK)
    assert not p.takes_more_of(BULK) and p.takes_more_of(ME)
    cluster.answer("p", "bulk")
    assert p.takes_more_of(BULK)
    cluster.costs["p"] = linear_cost(1.0, 0.001)  # a step's fixed time is 1 s
    cluster.beat("p", 0)
    cluster.dispatch("p", "slow", 1400, BULK)
    assert p.takes_more_of(BULK)


@pytest.mark.parametrize("num_gateways", [1, 3])
def test_queues_of_several_engines_are_as_short_as_one_before_all(num_gateways: int) -> None:
    """Total wait is close to that of one shared queue, which is optimal for equal prompts: each
    prompt goes to the first engine that is free. Engines report their queues on change, to every
    gateway."""
    num_tokens, takes_s, rng = 8000, 0.2, random.Random(0)
    rate = num_tokens / takes_s
    gateways = [Cluster(p=rate, q=rate, r=rate) for _ in range(num_gateways)]
    queues: dict[str, list[tuple[float, int]]] = {name: [] for name in "pqr"}  # ends, gateways
    free_s, now_s, waits_s, best_s = [0.0] * 3, 0.0, 0.0, 0.0

    def advance(to_s: float) -> None:
        nonlocal now_s
        for gateway in gateways:
            gateway.clock.advance(to_s - now_s)
        now_s = to_s

    def beat(name: str) -> None:
        for gateway in gateways:
            gateway.beat(name, num_tokens * len(queues[name]))

    for _ in range(2000):
        arrives_s = now_s + rng.expovariate(0.85 * 3 / takes_s)
        while ends := [(queue[0], name) for name, queue in queues.items() if queue]:
            (end_s, owner), name = min(ends)
            if end_s > arrives_s:
                break
            advance(end_s)
            del queues[name][0]
            gateways[owner].answer(name, f"{name}{end_s}")
            beat(name)
        advance(arrives_s)
        requested = rng.randrange(num_gateways)
        engines = gateways[requested].table.engines
        chosen = min(engines, key=lambda name: (engines[name].account.tokens_ahead, rng.random()))
        end_s = max([now_s, *(end_s for end_s, _ in queues[chosen])]) + takes_s
        queues[chosen].append((end_s, requested))
        gateways[requested].dispatch(chosen, f"{chosen}{end_s}", num_tokens)
        beat(chosen)
        waits_s += end_s - now_s
        free_s[0] = max(free_s[0], now_s) + takes_s
        best_s += free_s[0] - now_s
        free_s.sort()
    assert waits_s < 1.01 * best_s
