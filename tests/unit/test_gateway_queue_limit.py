"""Predicted waits and refusals: an engine of known speed, on a clock that the test moves."""

from __future__ import annotations

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

    def beat(self, name: str, waiting_tokens: int) -> None:
        load = Load(0, 0, waiting_tokens, 900, 900, False, frozenset())
        self.table.engines[name].load = load

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


def test_a_slow_engine_that_is_idle_is_tried_again() -> None:
    cluster = Cluster("p")
    cluster.learn("p", 1)
    QueueLimit(cluster.table, 0.5).check(1000, {}, 60.0)


@pytest.mark.parametrize(("limit", "count", "each"), [(10, 1, 10), (10, 3, 4), (1, 4, 1)])
def test_a_limit_is_shared(limit: int, count: int, each: int) -> None:
    assert share(limit, count) == each
