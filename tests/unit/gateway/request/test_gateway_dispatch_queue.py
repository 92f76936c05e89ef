"""Requests queued at the gateway: their order, which are held back, and that no state is left
behind.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from fakes.clock import FakeClock, FakeEntropy
from fakes.gateway.engine_link import FakeLink, FakeRouter, FakeSink, Letters
from fakes.gateway.step_costs import linear_cost

from baton.bench.played.engine import EngineSetup
from baton.bench.played.simulation import Simulation
from baton.core.errors import Cancelled, DeadlineExceeded, NodeLost, Overloaded, Unavailable
from baton.core.membership import Role
from baton.core.request.request import FinishReason
from baton.core.request.sampling_params import SamplingParams
from baton.core.step_shape import StepShape
from baton.gateway.request.dispatch_queue import DispatchQueue
from baton.gateway.request.engine_link import Blocked, Demand, EngineOutput, MustWait, Route
from baton.gateway.request.session import Session
from baton.gateway.request.session_output import SessionOutput
from baton.gateway.request.session_table import SessionTable
from baton.gateway.request.setbacks import SessionLimits
from baton.gateway.validation.validation import ValidatedRequest

H200 = linear_cost(0.005, 25e-6)  # an 8B model: 8k tokens in 0.21 s


def percentile(values: list[float], percent: float) -> float:
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * percent / 100))]


def played(decode: EngineSetup, max_queue_s: float | None = None) -> Simulation:
    """A simulation of one prefill engine and this decode engine."""
    prefill = EngineSetup(Role.PREFILL, prefill_chunk_tokens=8192)
    return Simulation(H200, {"prefill": prefill, "decode": decode}, max_queue_s=max_queue_s)


async def test_a_light_caller_beside_ten_bulk_callers() -> None:
    light, bulk, decode = 99, range(10), EngineSetup(Role.DECODE)
    idle = played(decode)
    idle.call(4, 3, light)
    idle.run(1.0)
    cluster = played(decode)
    for caller_id in bulk:
        for _ in range(32):
            cluster.call(8000, 3, caller_id)
    for number in range(300):
        cluster.at(0.1 + 0.2 * number, lambda: cluster.call(4, 3, light))
    cluster.run()
    assert all(call.is_served for call in cluster.calls) and not cluster.num_refused
    waits_s = [call.ttft_s for call in cluster.calls if call.caller_id == light]
    assert len(waits_s) == 300
    (first,) = idle.calls
    assert percentile(waits_s, 99) <= 3 * first.ttft_s + H200.seconds(StepShape(8192))
    ends_s = [max(c.token_s[-1] for c in cluster.calls if c.caller_id == one) for one in bulk]
    assert max(ends_s) - min(ends_s) < 10 * H200.seconds(StepShape(8000))
    assert 0 < cluster.engines["prefill"].most_waiting < 40, "the others wait at the gateway"


@pytest.mark.parametrize("max_queue_s", [None, 1.0])
async def test_a_full_decode_engine_lets_prompts_wait_before_their_prefill(
    max_queue_s: float | None,
) -> None:
    """With 16.5 requests/s where 15 can be decoded, requests wait before their first token, not
    after it."""
    rng, seconds, num_outputs = random.Random(0), 40.0, 33
    # 24 sequences at once, for 32 steps of 50 ms each.
    decode = EngineSetup(Role.DECODE, max_num_seqs=24, cost=linear_cost(0.05, 1e-9))
    cluster = played(decode, max_queue_s)
    due_s, num_calls = 0.0, 0
    while (due_s := due_s + rng.expovariate(16.5)) < seconds:
        cluster.at(due_s, lambda: cluster.call(1024, num_outputs, rng.randrange(20)))
        num_calls += 1
    cluster.run()
    served = [call for call in cluster.calls if call.error is None]
    assert all(call.is_served for call in served)
    gaps_s = [call.token_s[1] - call.token_s[0] for call in served]
    assert percentile(gaps_s, 99.9) <= 0.15
    waits_s = [call.ttft_s for call in served]
    if max_queue_s is None:
        assert percentile(waits_s, 99) > 3 and len(served) == num_calls
    else:
        assert percentile(waits_s, 99) < max_queue_s + 0.1 and len(served) < num_calls - 25
    (gateway,) = cluster.gateways
    assert len(served) / cluster.clock.now_s > 0.9 * 15, "places do not stay empty"
    assert not len(gateway.sessions) and not len(gateway.queue)


class Places(FakeRouter):
    """A router with `num_places` free slots and `num_turns` dispatches."""

    num_places = 0
    num_turns = 1000

    def choose(self, demand: Demand, **how: object) -> Route:
        route = super().choose(demand, **how)  # type: ignore[arg-type]
        if not self.num_turns:
            raise MustWait(Blocked.TURN)
        if self.num_places < demand.num_sequences:
            raise MustWait(Blocked.PLACE)
        self.num_places -= demand.num_sequences
        self.num_turns -= 1
        return route


class Rig:
    """Sessions of several callers with one pair of engines."""

    def __init__(self, num_places: int = 0, **limits: float) -> None:
        self.clock = FakeClock()
        self.released: set[int] = set()
        self.queue = DispatchQueue(self.released)
        self.table = SessionTable(self.clock, 100, self.queue)
        self.links = FakeLink("p"), FakeLink("d")
        self.router = Places([self.links[0]], [self.links[1]])
        self.router.num_places = num_places
        self.limits = SessionLimits(settle_s=0.0, avoid_s=0.0, **limits)  # type: ignore[arg-type]
        self.sinks: dict[str, FakeSink] = {}
        self.sessions: dict[str, Session] = {}

    def start(self, name: str, caller_id: int = 1, num_tokens: int = 10, n: int = 1) -> Session:
        siblings = [self._session(f"{name}{i}", caller_id, num_tokens) for i in range(1, n)]
        leader = self._session(name, caller_id, num_tokens, siblings)
        for session in (*siblings, leader):
            self.table.start(session)
        return leader

    def _session(
        self, name: str, caller_id: int, num_tokens: int, siblings: list[Session] | None = None
    ) -> Session:
        self.sinks[name] = FakeSink()
        request = ValidatedRequest(
            bytes(num_tokens), SamplingParams(max_tokens=3), name, caller_id=caller_id
        )
        self.sessions[name] = Session(
            SessionOutput(name, request, Letters().step, self.sinks[name], self.clock, 0),
            deadline_s=60.0,
            router=self.router,
            entropy=FakeEntropy(),
            limits=self.limits,
            siblings=siblings or (),
        )
        return self.sessions[name]

    def free(self, num_places: int = 1) -> None:
        self.router.num_places += num_places
        self.released.add(0)
        self.table.engine_step("d", ())

    def tick(self, name: str) -> None:
        self.table._wake(self.sessions[name])

    @property
    def dispatched(self) -> list[str]:
        return [request.request_id for request, *_ in self.links[0].dispatched]

    def is_clean(self) -> bool:
        queue = self.queue
        return not (
            queue.shares or queue._counted or queue._held or queue._stranded or len(queue._eligible)
        )


async def test_with_a_place_free_a_session_is_dispatched_as_it_comes() -> None:
    rig = Rig(num_places=1)
    rig.start("a")
    assert rig.dispatched == ["a"] and rig.is_clean()
    assert len(rig.router.demands) == 1


async def test_places_go_to_callers_in_turn_and_nobody_passes_the_head() -> None:
    rig = Rig()
    for number in range(3):
        rig.start(f"a{number}", 1, 1000)
    rig.start("b0", 2, 1000)
    rig.start("b1", 2, 10)
    rig.free(2)
    assert rig.dispatched == ["a0", "b0"]
    rig.start("n", 3, 10, n=4)  # needs four slots at once, from the lightest caller
    num_asked = len(rig.router.demands)
    for _ in range(3):
        rig.free()
        assert rig.dispatched[2:] in ([], ["b1"], ["b1", "a1"], ["b1", "a1", "a2"], ["n"])
    assert len(rig.router.demands) - num_asked <= 6, "heads alone are tried"
    rig.free(10)
    assert sorted(rig.dispatched) == ["a0", "a1", "a2", "b0", "b1", "n"] and rig.is_clean()
    assert len(rig.links[0].dispatched[rig.dispatched.index("n")][0].fork_ids) == 3


async def test_many_that_wait_cost_a_heartbeat_one_try() -> None:
    rig = Rig()
    for number in range(50):
        rig.start(f"r{number}", number)
    num_asked = len(rig.router.demands)
    for _ in range(10):
        rig.table.cluster_changed(is_load_only=True)
    assert len(rig.router.demands) == num_asked + 10


async def test_who_is_held_back_by_own_prompts_is_passed_and_comes_again() -> None:
    rig = Rig(num_places=99)
    rig.router.blocked = Blocked.TURN
    for name in ("a", "b", "c"):
        rig.start(name, 1)
    assert rig.dispatched == [] and len(rig.queue) == 3
    num_asked = len(rig.router.demands)
    rig.table.cluster_changed(is_load_only=True)
    assert len(rig.router.demands) == num_asked, "nothing of its own was answered"
    rig.router.blocked = None
    rig.start("other", 2)
    assert rig.dispatched == ["other"]
    rig.released.add(1)
    rig.table.engine_step("p", ())
    assert rig.dispatched == ["other", "a", "b", "c"] and rig.is_clean()


async def test_a_held_caller_goes_on_when_its_next_one_ends_early() -> None:
    rig = Rig(num_places=99)
    rig.router.blocked = Blocked.TURN
    for name in ("a", "b", "c", "d"):
        rig.start(name, 1)
    rig.table.cancel(rig.sessions["b"], Cancelled("gone"))  # a held request
    rig.router.blocked, rig.router.num_places = None, 0
    rig.released.add(1)
    rig.table.engine_step("p", ())  # no slot for the next request
    rig.table.cancel(rig.sessions["a"], Cancelled("gone"))
    rig.free(2)
    assert rig.dispatched == ["c", "d"] and rig.is_clean()


async def test_what_is_aborted_gets_no_place_that_is_free_by_that() -> None:
    rig = Rig(num_places=1)
    for name in ("a", "b", "other"):
        rig.start(name)
    rig.router.num_places = 1
    rig.released.add(1)  # released by the first one's end
    assert rig.table.abort(["a", "b"]) == 2
    assert rig.dispatched == ["a", "other"] and rig.is_clean()


async def test_retries_go_first() -> None:
    rig = Rig(num_places=1)
    rig.start("old")
    rig.table.engine_step("p", [EngineOutput("old", 0, 0, (97,))])
    for name in ("x", "y"):
        rig.start(name, 2)
    rig.table.engine_step("d", [EngineOutput("old", 0, error=NodeLost("gone"))])
    rig.tick("old")
    assert len(rig.queue) == 3
    rig.free()
    (again,) = [r for r, *_ in rig.links[0].dispatched if r.attempt == 1]
    assert (again.request_id, again.output_token_ids) == ("old", (97,))
    rig.free(2)
    assert rig.dispatched == ["old", "old", "x", "y"]


@pytest.mark.parametrize("how", ["cancel", "deadline", "max_queue", "abort", "drain"])
@pytest.mark.parametrize("where", [Blocked.PLACE, Blocked.TURN, Blocked.ENGINE])
async def test_what_ends_while_it_waits_leaves_nothing_behind(how: str, where: Blocked) -> None:
    rig = Rig(num_places=99, max_queue_s=5.0, recovery_wait_s=9.0)
    rig.router.blocked = where
    if where is Blocked.ENGINE:
        rig.router.blocked = None
        decode, rig.router.decode = rig.router.decode, []
    for name in ("a", "b"):
        rig.start(name, n=2)
    if how == "cancel":
        rig.table.cancel(rig.sessions["a"], Cancelled("the client went away"))
    elif how == "abort":
        assert rig.table.abort(["a"]) == 1
    elif how == "drain":
        rig.table.end_all(Unavailable("shutting down"))
        assert not len(rig.table) and rig.is_clean()
        return
    else:
        rig.clock.advance(60.0 if how == "deadline" else 5.0)
        rig.tick("a")
    error = rig.sinks["a"].error
    if how == "max_queue" and where is not Blocked.ENGINE:
        assert isinstance(error, Overloaded) and "5 s" in error.message
    elif how == "max_queue":
        assert error is None, "engines may come back"
        rig.clock.advance(4.5)
        rig.tick("a")
        assert isinstance(rig.sinks["a"].error, Unavailable)
    else:
        assert type(error) is (DeadlineExceeded if how == "deadline" else Cancelled)
    rig.router.blocked = None
    if where is Blocked.ENGINE:
        rig.router.decode = decode
    rig.table.cluster_changed()
    assert rig.dispatched == ["b"] and rig.is_clean()
    for name in ("b", "b1"):
        rig.table.engine_step("p", [EngineOutput(name, 0, 0, (97,), FinishReason.STOP)])
    rig.table.cancel(rig.sessions["a1"], Cancelled("the client went away"))
    assert not len(rig.table) and not rig.table._timers


async def test_a_free_place_is_taken_though_who_waited_before_gave_up() -> None:
    decode = EngineSetup(Role.DECODE, max_num_seqs=2, cost=linear_cost(0.05, 1e-9))
    cluster = played(decode, max_queue_s=5.0)
    for due_s in (0, 0, 0, 40, 42):  # each decodes for 15 s
        cluster.at(due_s, lambda: cluster.call(64, 300))
    cluster.run()
    assert [call.is_served for call in cluster.calls] == [True, True, False, True, True]
    assert not cluster.num_refused


async def test_callers_that_never_wait_are_not_remembered() -> None:
    cluster = played(EngineSetup(Role.DECODE))
    for number in range(50):
        cluster.at(number, lambda: cluster.call(4, 3))
    cluster.run()
    assert all(call.is_served for call in cluster.calls)
    assert len(cluster.gateways[0].table.released) <= 1


async def test_engines_that_go_strand_what_waits_and_take_it_when_they_are_back() -> None:
    rig = Rig(recovery_wait_s=9.0)
    for number in range(3):
        rig.start(f"r{number}", number)
    prefill, rig.router.prefill = rig.router.prefill, []
    rig.table.engine_lost("p", has_died=False)
    rig.table.cluster_changed()
    assert [session.blocked for session in rig.sessions.values()] == [Blocked.ENGINE] * 3
    rig.router.prefill, rig.router.num_places = prefill, 2
    rig.table.cluster_changed()
    assert rig.dispatched == ["r0", "r1"]
    assert rig.sessions["r2"].next_wakeup_s == 60.0, "engines are there, and it waits for a place"


def test_a_caller_cannot_take_all_that_may_be_in_flight() -> None:
    table = SessionTable(FakeClock(), 64)
    admitted = 0
    with pytest.raises(Overloaded, match="56 of this caller"):
        for _ in range(64):
            table.admit(1)
            admitted += 1
    assert admitted == 56
    for caller_id in (2, 3, 4, 5):
        table.admit(caller_id)
        table.admit(caller_id)
    for caller_id in range(1, 9):
        with pytest.raises(Overloaded):
            table.admit(caller_id)
    table.leave(1)
    with pytest.raises(Overloaded):
        table.admit(1)
    table.admit(9)
    for a, b in pairwise((9, 2, 2, 3)):
        table.leave(a)
        table.admit(b)


async def test_who_waited_for_engines_keeps_the_order_behind_its_caller_s_own_prompts() -> None:
    rig = Rig(num_places=9)
    prefill, rig.router.prefill = rig.router.prefill, []
    names = [f"r{number}" for number in range(5)]
    for name in names:
        rig.start(name)
    rig.router.prefill = prefill
    for number in range(5):
        rig.router.num_turns = 1
        rig.released.add(1)
        rig.table.cluster_changed(is_load_only=bool(number))
        assert rig.dispatched == names[: number + 1]
    assert rig.is_clean()


async def test_what_is_held_keeps_its_order_through_engines_that_go_and_callers_that_wait() -> None:
    rig = Rig(num_places=9)
    rig.router.num_turns = 0
    names = [f"r{number}" for number in range(5)]
    for name in names:
        rig.start(name)
    prefill, rig.router.prefill = rig.router.prefill, []
    rig.released.add(1)
    rig.table.cluster_changed()  # one of them is left waiting
    rig.router.prefill = prefill
    rig.table.cluster_changed()
    rig.router.num_places = 0
    rig.router.num_turns = 1000
    rig.start("other", 2)  # must not overtake
    for _ in range(2):
        rig.released.add(1)
        rig.table.cluster_changed(is_load_only=True)
    rig.router.num_places, rig.router.num_turns = 1, 1
    rig.table.cluster_changed(is_load_only=True)
    while rig.sessions["r4"].is_waiting:
        rig.router.num_places, rig.router.num_turns = 1, 1
        rig.released.add(1)
        rig.table.cluster_changed(is_load_only=True)
    assert [name for name in rig.dispatched if name != "other"] == names
