"""Predicted waits and refusals: an engine of known speed, on a clock that the test moves."""

from __future__ import annotations

import random

import pytest
from fakes.clock import FakeClock

from baton.core.errors import Overloaded
from baton.core.membership import Member, Role
from baton.core.request import Request, SamplingParams, Ticket
from baton.gateway.admission import QueueLimit
from baton.gateway.engine_link import EngineOutput, Work
from baton.gateway.engine_table import EngineTable, LinkedEngine, Load
from baton.gateway.prefill_speed import PrefillSpeed
from baton.gateway.worker_place import share
from baton.prefix_index.mirror import PrefixMirror

TICKET = Ticket("t" * 32, "1" * 32, "2" * 32)


class Outbox:
    def dispatch(self, *_: object) -> None: ...

    def cancel(self, *_: object) -> None: ...


class Cluster:
    """Prefill engines and what is asked of them."""

    def __init__(self, *names: str) -> None:
        self.clock = FakeClock()
        self.table = EngineTable(PrefixMirror(self.clock))
        for name in names:
            member = Member(name, Role.PREFILL, name, "", "demo", "fp", 4096, 16, 1000)
            self.table.add(LinkedEngine(member, Outbox(), clock=self.clock))
            self.beat(name, 0)

    def beat(self, name: str, waiting_tokens: int, num_steps: int = 0) -> None:
        load = Load(0, 0, waiting_tokens, 900, 900, False, frozenset(), num_steps=num_steps)
        self.table.engines[name].heard(load)

    def dispatch(self, name: str, request_id: str, num_tokens: int) -> None:
        request = Request(request_id, 0, (1,) * num_tokens, SamplingParams(max_tokens=5))
        self.table.engines[name].dispatch(request, Work.PREFILL, TICKET, 60.0)

    def answer(self, name: str, request_id: str) -> None:
        output = EngineOutput(request_id, 0, token_ids=(1,), cached_tokens=0)
        self.table.engines[name].settle([output])

    def learn(self, name: str, tokens_per_s: float) -> None:
        self.dispatch(name, "first", 100)
        self.clock.advance(100 / tokens_per_s)
        self.answer(name, "first")


def test_speed_is_tokens_over_time_and_forgets_slowly() -> None:
    speed = PrefillSpeed()
    assert speed.tokens_per_s is None
    speed.began(("a", 0), 100, 1.0)
    speed.ended(("a", 0), 2.0)
    assert speed.tokens_per_s == pytest.approx(100)
    speed.began(("b", 0), 400, 2.0)
    speed.forget(("b", 0))
    speed.ended(("b", 0), 3.0)
    speed.ended(("unknown", 0), 3.0)
    assert speed.tokens_per_s == pytest.approx(100)
    for number in range(100):
        speed.began((str(number), 0), 1000, 3.0)
        speed.ended((str(number), 0), 4.0)
    assert speed.tokens_per_s == pytest.approx(1000, rel=0.01)


def test_a_wait_is_what_is_ahead_and_its_own_by_the_speed() -> None:
    cluster = Cluster("p")
    assert cluster.table.predicted_prefill_s(500, {}) == 0  # nothing is known yet
    cluster.learn("p", 1000)
    assert cluster.table.predicted_prefill_s(500, {}) == 0  # nothing is ahead
    cluster.dispatch("p", "second", 1500)
    assert cluster.table.predicted_prefill_s(500, {}) == pytest.approx(2.0)
    assert cluster.table.predicted_prefill_s(500, {"p": 400}) == pytest.approx(1.6)
    cluster.beat("p", 3500)  # other gateways' too
    assert cluster.table.predicted_prefill_s(500, {}) == pytest.approx(4.0)


def test_the_best_engine_counts() -> None:
    cluster = Cluster("slow", "fast")
    for name, speed in (("slow", 100), ("fast", 1000)):
        cluster.learn(name, speed)
        cluster.beat(name, 900)
    assert cluster.table.predicted_prefill_s(100, {}) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("max_queue_s", "remaining_s", "is_refused"),
    [(None, 2.1, False), (None, 1.9, True), (2.1, 60.0, False), (1.9, 60.0, True)],
)
def test_who_may_wait(max_queue_s: float | None, remaining_s: float, is_refused: bool) -> None:
    cluster = Cluster("p")
    cluster.learn("p", 1000)
    cluster.dispatch("p", "second", 1500)
    limit = QueueLimit(cluster.table, max_queue_s)
    if not is_refused:
        limit.check(500, {}, remaining_s)
        return
    with pytest.raises(Overloaded) as refused:
        limit.check(500, {}, remaining_s)
    assert refused.value.retry_after_s == pytest.approx(0.1)
    with pytest.raises(Overloaded) as refused:
        limit.check(5500, {}, remaining_s)
    assert refused.value.retry_after_s == pytest.approx(7.0 - 1.9)


def test_of_two_engines_that_compute_a_prompt_each_the_one_that_began_first_is_ahead() -> None:
    cluster = Cluster("p", "q")
    p, q = cluster.table.engines.values()
    for name in "pq":
        cluster.learn(name, 1000)
    cluster.dispatch("p", "ours", 1000)
    cluster.clock.advance(0.4)
    cluster.beat("q", 1000)  # another gateway's
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
    assert (p.tokens_ahead, q.tokens_ahead) == (932, 900), "p was slower than it had been"
    cluster.clock.advance(60.0)
    assert (p.tokens_ahead, q.tokens_ahead) == (0, 0)


def test_later_tokens_of_a_stream_are_no_progress_of_prompts() -> None:
    cluster = Cluster("p")
    (p,) = cluster.table.engines.values()
    cluster.learn("p", 1000)
    cluster.dispatch("p", "second", 1000)
    cluster.clock.advance(0.4)
    cluster.answer("p", "first")
    assert p.tokens_ahead == 600


def test_a_step_that_ended_while_as_much_came_is_a_step_that_ended() -> None:
    cluster = Cluster("p")
    (p,) = cluster.table.engines.values()
    cluster.learn("p", 1000)
    cluster.beat("p", 1000, num_steps=3)
    cluster.clock.advance(0.9)
    cluster.beat("p", 1000, num_steps=3)
    assert p.tokens_ahead == 100
    cluster.clock.advance(0.1)
    cluster.beat("p", 1000, num_steps=4)
    assert p.tokens_ahead == 1000


@pytest.mark.parametrize("num_gateways", [1, 3])
def test_queues_of_several_engines_are_as_short_as_one_before_all(num_gateways: int) -> None:
    """As if each prompt went to the first engine that is free, which is the best that can be done
    with equal prompts: engines say what waits when it changes, and each gateway hears it."""
    num_tokens, takes_s, rng = 8000, 0.2, random.Random(0)
    gateways = [Cluster("p", "q", "r") for _ in range(num_gateways)]
    for gateway in gateways:
        for name in gateway.table.engines:
            gateway.learn(name, num_tokens / takes_s)
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
        asked = rng.randrange(num_gateways)
        engines = gateways[asked].table.engines
        chosen = min(engines, key=lambda name: (engines[name].tokens_ahead, rng.random()))
        end_s = max([now_s, *(end_s for end_s, _ in queues[chosen])]) + takes_s
        queues[chosen].append((end_s, asked))
        gateways[asked].dispatch(chosen, f"{chosen}{end_s}", num_tokens)
        beat(chosen)
        waits_s += end_s - now_s
        free_s[0] = max(free_s[0], now_s) + takes_s
        best_s += free_s[0] - now_s
        free_s.sort()
    assert waits_s < 1.01 * best_s


def test_a_slow_engine_that_is_idle_is_tried_again() -> None:
    cluster = Cluster("p")
    cluster.learn("p", 1)
    QueueLimit(cluster.table, 0.5).check(1000, {}, 60.0)


@pytest.mark.parametrize(("limit", "count", "each"), [(10, 1, 10), (10, 3, 4), (1, 4, 1)])
def test_a_limit_is_shared(limit: int, count: int, each: int) -> None:
    assert share(limit, count) == each
