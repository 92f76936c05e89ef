"""Requests that kill engines affect no other request: sessions on engines that die and restart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.clock import FakeClock, FakeEntropy
from fakes.gateway.engine_link import FakeLink, FakeRouter, FakeSink, Letters, Work
from fakes.gateway.step_outputs import give

from baton.core.errors import EngineFailed, HandoffFailed, NodeLost, TrialRefused, Unavailable
from baton.core.request.request import FinishReason
from baton.core.request.sampling_params import RequestOptions, SamplingParams
from baton.gateway.request.engine_link import Avoid, Demand, EngineOutput, Route
from baton.gateway.request.session import Session
from baton.gateway.request.session_output import SessionOutput
from baton.gateway.request.setbacks import SessionLimits, engine_lost
from baton.gateway.request.suspects import LATE_S, Suspects
from baton.gateway.validation.validation import ValidatedRequest
from baton.node.requests.request_io import Entry, RequestIO
from baton.node.requests.trials import Trials

NUM_STREAMS, MAX_TOKENS = 32, 6
STEP_S = 0.01
RESTART_STEPS = 200


class Door:
    """An engine's admission of trials."""

    def __init__(self, cluster: Cluster, link: FakeLink) -> None:
        self._cluster, self._link = cluster, link
        send: Any = None  # output is discarded
        self._requests = RequestIO(send, cluster.clock, "n", 1000)
        self._trials = Trials(self._requests, lambda key: len(self._answer_of(key)))
        self._entries: list[Entry] = []
        self.num_refused = 0

    def look(self) -> None:
        """Close attempts that are over, and admit or refuse those dispatched since."""
        for entry in self._entries:
            attempt = self._cluster.sessions[entry.request.request_id].attempt
            if attempt is None or attempt.number != entry.request.attempt:
                self._requests.end(entry.key, None)
        for request, *_ in self._link.dispatched[len(self._entries) :]:
            session = self._cluster.sessions[request.request_id]
            is_others = session.suspects is self._cluster.others
            entry = Entry(request, f"gateway-{is_others}", 60.0, None)
            self._entries.append(entry)
            self._requests.open(entry)
            try:
                if request.is_on_trial:
                    self._trials.admit(entry)
            except TrialRefused as error:
                self.num_refused += 1
                self._requests.end(entry.key, None)
                output = EngineOutput(request.request_id, request.attempt, error=error)
                session.engine_output(self._link.incarnation, output)

    def _answer_of(self, key: str) -> list[int]:
        return self._cluster.sessions[key.split("/")[0]].answer.output_ids


@dataclass
class Cluster:
    """Sessions, and engines that run one step at a time. A poison request kills the engine of
    `deadly` work that computes its token `at`; a replacement starts after `RESTART_STEPS`."""

    num_engines: int
    deadly: Work
    at: int = 0
    poison: frozenset[str] = frozenset({"r7"})
    restarts: bool = True
    clock: FakeClock = field(default_factory=FakeClock)
    suspects: Suspects = field(default_factory=Suspects)
    others: Suspects = field(default_factory=Suspects)  # another gateway's suspects
    doors: dict[str, Door] = field(default_factory=dict)  # by incarnation
    engines: dict[Work, list[FakeLink]] = field(default_factory=dict)
    sessions: dict[str, Session] = field(default_factory=dict)
    sinks: dict[str, FakeSink] = field(default_factory=dict)
    due: list[tuple[int, Work]] = field(default_factory=list)  # restarts, by step
    num_started: int = 0
    num_lost: int = 0
    num_steps: int = 0

    def __post_init__(self) -> None:
        for work in Work:
            self.engines[work] = []
            for _ in range(self.num_engines):
                self.start(work)

    def start(self, work: Work) -> None:
        self.num_started += 1
        link = FakeLink(f"{work.value}-{self.num_started}")
        self.engines[work].append(link)
        self.doors[link.incarnation] = Door(self, link)

    def choose(
        self,
        demand: Demand,
        *,
        avoid: Avoid,
        fingerprint: str | None,
        suspects: Suspects | None = None,
    ) -> Route:
        """The engines with the fewest dispatches; none that runs a trial, if there are others."""
        suspects = suspects or self.suspects
        for avoided in (avoid | suspects.engines, avoid):
            fit = [
                [e for e in self.engines[work] if e.incarnation not in avoided]
                for work in (Work.PREFILL, Work.DECODE)
            ]
            if all(fit):
                return Route(*(min(engines, key=lambda e: len(e.dispatched)) for engines in fit))
        raise Unavailable("no engine")

    def ask(self, request_id: str, call_id: str = "", *, is_others: bool = False) -> None:
        self.sinks[request_id] = FakeSink()
        suspects = self.others if is_others else self.suspects
        session = self.sessions[request_id] = Session(
            SessionOutput(
                request_id,
                ValidatedRequest((1, 2, 3), SamplingParams(max_tokens=MAX_TOKENS), ""),
                Letters().step,
                self.sinks[request_id],
                self.clock,
                0,
            ),
            deadline_s=60.0,
            router=SimpleNamespace(choose=partial(self.choose, suspects=suspects)),
            entropy=FakeEntropy(),
            limits=SessionLimits(recovery_wait_s=10.0),
            suspects=suspects,
        )
        session.call_id = call_id or request_id
        session.try_dispatch()

    def step(self) -> None:
        self.num_steps += 1
        for due in [due for due in self.due if due[0] <= self.num_steps]:
            self.due.remove(due)
            self.start(due[1])
            for session in self.sessions.values():
                session.try_dispatch()
        for engine in [*self.engines[Work.PREFILL], *self.engines[Work.DECODE]]:
            self._step(engine)
        self.wait()

    def wait(self, num_steps: int = 1) -> None:
        """Advance the clock by that many steps; no engine takes one."""
        for _ in range(num_steps):
            self.clock.advance(STEP_S)
            for session in self.sessions.values():
                if session.next_wakeup_s <= self.clock.monotonic_s():
                    session.tick()

    def _step(self, engine: FakeLink) -> None:
        work = Work.PREFILL if engine in self.engines[Work.PREFILL] else Work.DECODE
        batch = []
        self.doors[engine.incarnation].look()
        for request, _, _, _ in engine.dispatched:
            session = self.sessions[request.request_id]
            attempt = session.attempt
            if attempt is None or attempt.number != request.attempt:
                continue
            num_known = len(session.answer.output_ids)
            is_prefill_due = num_known == len(request.output_token_ids)
            if is_prefill_due is (work is Work.PREFILL):
                batch.append((session, request, num_known))
        if work is self.deadly and any(
            request.request_id in self.poison and known >= self.at for _, request, known in batch
        ):
            self.kill(engine, work)
            return
        for session, request, known in batch:
            reason = FinishReason.LENGTH if known + 1 == MAX_TOKENS else None
            output = EngineOutput(request.request_id, request.attempt, known, (97,), reason)
            give(session, engine.incarnation, output)

    def kill(self, engine: FakeLink, work: Work) -> None:
        self.num_lost += 1
        self.engines[work].remove(engine)
        if self.restarts:
            self.due.append((self.num_steps + RESTART_STEPS, work))
        for session in self.sessions.values():
            engine_lost(session, engine.incarnation, has_died=True)

    def run(self) -> float:
        """Run until all sessions are over; returns the elapsed seconds."""
        while not all(sink.is_over for sink in self.sinks.values()):
            self.step()
            assert self.num_steps < 6000
        for suspects in (self.suspects, self.others):
            assert not suspects.trials and not suspects.silent
        return self.num_steps * STEP_S

    def lost(self) -> set[str]:
        return {name for name, sink in self.sinks.items() if sink.error is not None}


@pytest.mark.parametrize("num_engines", [1, 2, 3])
@pytest.mark.parametrize(
    ("deadly", "at"), [(Work.PREFILL, 0), (Work.DECODE, 1), (Work.DECODE, 4)], ids=str
)
def test_a_poison_request_is_lost_alone(num_engines: int, deadly: Work, at: int) -> None:
    cluster = Cluster(num_engines, deadly, at)
    for i in range(NUM_STREAMS):
        cluster.ask(f"r{i}")
    took_s = cluster.run()
    assert cluster.lost() == {"r7"}
    assert isinstance(cluster.sinks["r7"].error, EngineFailed)
    assert cluster.num_lost == 2
    down_s = (3 - num_engines) * RESTART_STEPS * STEP_S
    # Each trial takes a prefill, two steps and at most a pause; trials on one engine are serial.
    assert took_s < down_s + 0.5 + NUM_STREAMS * (3 * STEP_S + 0.02)


@pytest.mark.parametrize("num_engines", [1, 2, 3])
@pytest.mark.parametrize(("deadly", "at"), [(Work.PREFILL, 0), (Work.DECODE, 1)], ids=str)
def test_two_gateways_lose_the_poison_request_alone(
    num_engines: int, deadly: Work, at: int
) -> None:
    """Two gateways that do not share their suspects still lose only the poison request."""
    cluster = Cluster(num_engines, deadly, at)
    for i in range(NUM_STREAMS):
        cluster.ask(f"r{i}", is_others=i % 2 == 0)
    cluster.run()
    assert (cluster.lost(), cluster.num_lost) == ({"r7"}, 2)
    if num_engines == 1:
        assert any(door.num_refused for door in cluster.doors.values())


def test_three_engines_need_no_restart() -> None:
    cluster = Cluster(3, Work.PREFILL, restarts=False)
    for i in range(NUM_STREAMS):
        cluster.ask(f"r{i}")
    cluster.run()
    assert (cluster.lost(), cluster.num_lost) == ({"r7"}, 2)


def test_who_comes_meanwhile_keeps_clear_of_trials() -> None:
    """Requests that arrive during trials are served at once, on other engines."""
    cluster = Cluster(3, Work.DECODE, 1)
    for i in range(NUM_STREAMS):
        cluster.ask(f"r{i}")
    while not cluster.num_lost:
        cluster.step()
    for i in range(100, 140):
        cluster.ask(f"r{i}")
        cluster.step()
    cluster.run()
    assert (cluster.lost(), cluster.num_lost) == ({"r7"}, 2)


def test_two_poison_requests_are_lost_alone() -> None:
    cluster = Cluster(3, Work.DECODE, 1, poison=frozenset({"r7", "r20"}))
    for i in range(NUM_STREAMS):
        cluster.ask(f"r{i}")
    cluster.run()
    assert cluster.lost() == {"r7", "r20"}
    assert cluster.num_lost <= 4


def test_samples_of_one_poison_prompt_cost_no_more_engines() -> None:
    samples = frozenset({"r1", "r2", "r3", "r4"})
    cluster = Cluster(1, Work.DECODE, 1, poison=samples)
    for i in range(NUM_STREAMS):
        cluster.ask(f"r{i}", "call" if f"r{i}" in samples else "")
    for _ in range(3):
        cluster.start(Work.DECODE)
    cluster.run()
    assert (cluster.lost(), cluster.num_lost) == (samples, 2)


def test_a_sample_that_waits_for_a_trial_sleeps_beyond_its_wait_for_an_engine() -> None:
    clock, suspects, router = FakeClock(), Suspects(), FakeRouter([], [])
    first, second = FakeLink("a"), FakeLink("b")
    router.prefill = router.decode = [first]
    limits = SessionLimits(recovery_wait_s=1.0)

    def session(index: int, siblings: Sequence[Session] = ()) -> Session:
        request = ValidatedRequest((1, 2), SamplingParams(max_tokens=3), "", RequestOptions(n=2))
        answer = SessionOutput(f"r{index}", request, Letters().step, FakeSink(), clock, 0, index)
        more: Any = {"deadline_s": 60.0, "suspects": suspects, "siblings": siblings}
        return Session(answer, router, FakeEntropy(), limits, **more)

    sibling = session(1)
    samples = session(0, [sibling]), sibling
    samples[0].try_dispatch()
    router.prefill = router.decode = []
    for each in samples:
        engine_lost(each, "a", has_died=True)
    clock.advance(limits.settle_s)
    for each in samples:
        each.tick()  # from now on it waits for an engine
    clock.advance(0.9)
    router.prefill = router.decode = [second]
    for each in samples:
        each.try_dispatch()
    assert [each.is_waiting for each in samples] == [False, True]
    clock.advance(0.2)
    sibling.tick()
    assert clock.monotonic_s() < sibling.next_wakeup_s <= clock.monotonic_s() + limits.settle_s
    samples[0].engine_output("b", EngineOutput("r0", 1, 0, (65, 66)))
    clock.advance(limits.settle_s)
    sibling.tick()
    assert not sibling.is_waiting


def test_one_that_kills_at_another_place_each_time_ends_all_the_same() -> None:
    """A request that kills at varying tokens fails too: each first token clears it, but attempts
    are counted."""
    cluster = Cluster(3, Work.DECODE, 1)
    for i in range(8):
        cluster.ask(f"r{i}")
    while not cluster.num_lost:
        cluster.step()
    cluster.at = 3
    cluster.run()
    assert cluster.lost() == {"r7"}
    assert cluster.num_lost == 3


@pytest.mark.parametrize("word", ["death", "heartbeat", "nothing"])
def test_who_failed_with_an_engine_out_of_reach_waits_for_word_of_it(word: str) -> None:
    """A request whose engine is unreachable waits: the engine may have died of it, and a trial
    beside another suspect of that death would count as a second kill."""
    cluster = Cluster(1, Work.PREFILL, poison=frozenset())
    cluster.ask("r7")
    cluster.ask("r8")
    dying = cluster.engines[Work.PREFILL].pop()
    cluster.start(Work.PREFILL)
    (other,), (decode,) = cluster.engines[Work.PREFILL], cluster.engines[Work.DECODE]
    dying.reported_s = cluster.clock.monotonic_s()
    error = HandoffFailed("the source is gone")
    for name, session in cluster.sessions.items():
        session.engine_output(decode.incarnation, EngineOutput(name, 0, error=error))
    began_s = cluster.clock.monotonic_s()
    for _ in range(10):
        cluster.step()
        assert not other.dispatched
    if word == "death":
        for session in cluster.sessions.values():
            engine_lost(session, dying.incarnation, has_died=True)
        while len(cluster.suspects.engines) < 1:
            cluster.step()
        assert len(other.dispatched) == 1, "one suspect at a time"
    elif word == "heartbeat":
        dying.reported_s = cluster.clock.monotonic_s()
        cluster.step()
        cluster.step()
        cluster.step()
        assert len(other.dispatched) == 2
    else:
        while len(other.dispatched) < 2:
            cluster.step()
            for session in cluster.sessions.values():
                session.tick()
                assert session.next_wakeup_s > cluster.clock.monotonic_s(), "not all the time"
        assert cluster.clock.monotonic_s() - began_s == pytest.approx(LATE_S, abs=0.05)
    cluster.run()
    assert not cluster.lost()


@pytest.mark.parametrize("is_suspect", [True, False], ids=["suspect", "no suspect"])
def test_no_suspect_is_tried_where_another_request_has_just_lost_touch(is_suspect: bool) -> None:
    """No suspect is sent to an engine that another request has just lost: if that engine is dead,
    the suspect would count as having killed two."""
    cluster = Cluster(1, Work.PREFILL, poison=frozenset(), restarts=False)
    (dying,) = cluster.engines[Work.PREFILL]
    cluster.ask("r7")
    if is_suspect:
        cluster.ask("r8")
    cluster.start(Work.PREFILL)
    cluster.kill(dying, Work.PREFILL)
    (dying,) = cluster.engines[Work.PREFILL]
    if is_suspect:
        cluster.wait(3)
    else:
        cluster.ask("r8")
    ((request, *_),) = dying.dispatched
    dying.reported_s = cluster.clock.monotonic_s()
    error = NodeLost("the stream to the source ended")
    output = EngineOutput(request.request_id, request.attempt, error=error)
    (decode,) = cluster.engines[Work.DECODE]
    cluster.sessions[request.request_id].engine_output(decode.incarnation, output)
    cluster.wait(10)
    cluster.start(Work.PREFILL)
    cluster.kill(dying, Work.PREFILL)
    cluster.run()
    assert len(dying.dispatched) == 1
    assert cluster.lost() == ({request.request_id} if is_suspect else set())


@pytest.mark.parametrize("poison", ["r7", "r8"])
def test_who_went_on_before_a_death_was_known_is_tried_alone_all_the_same(poison: str) -> None:
    """After a late last heartbeat, the requests that failed with the dead engine are all on the
    next one, which one of them kills: each is then tried alone."""
    cluster = Cluster(1, Work.PREFILL, poison=frozenset({poison}), restarts=False)
    (first,), (decode,) = cluster.engines[Work.PREFILL], cluster.engines[Work.DECODE]
    cluster.ask("r7")
    cluster.ask("r8")
    cluster.engines[Work.PREFILL].remove(first)
    cluster.start(Work.PREFILL)
    (second,) = cluster.engines[Work.PREFILL]
    error = HandoffFailed("the source is gone")
    for name, session in cluster.sessions.items():
        session.engine_output(decode.incarnation, EngineOutput(name, 0, error=error))
    cluster.wait(3)
    assert len(second.dispatched) == 2
    for session in cluster.sessions.values():
        engine_lost(session, first.incarnation, has_died=True)
    cluster.kill(second, Work.PREFILL)
    assert not cluster.lost(), "nobody was alone there"
    cluster.start(Work.PREFILL)
    cluster.start(Work.PREFILL)
    cluster.run()
    assert cluster.lost() == {poison}


def test_a_death_that_is_known_late_does_not_end_the_last_attempt() -> None:
    cluster = Cluster(1, Work.PREFILL, poison=frozenset(), restarts=False)
    cluster.ask("r7")
    session, (decode,) = cluster.sessions["r7"], cluster.engines[Work.DECODE]
    for number in range(2):
        (engine,) = cluster.engines[Work.PREFILL]
        cluster.engines[Work.PREFILL].remove(engine)
        cluster.start(Work.PREFILL)
        error = HandoffFailed("the source is gone")
        session.engine_output(decode.incarnation, EngineOutput("r7", number, error=error))
        cluster.wait(3)
    engine_lost(session, engine.incarnation, has_died=True)
    cluster.run()
    assert not cluster.lost()
