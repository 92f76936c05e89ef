"""One prefill and one decode engine behind a gateway's sessions, on a clock that events move.

    call() ─ QueueLimit ─ SessionTable, DispatchQueue, EngineTable ─► prefill: steps of at most a
             (the gateway's own)                                      chunk, fair between callers
             ◄── outputs, heartbeats ──────────────────────────────── decode: `max_num_seqs` at once
A request's tokens are three: the first, the second, and the last when its place becomes free. Needs
an event loop, whose timers do not matter.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.core.errors import Overloaded
from baton.core.fair_queue import FairQueue
from baton.core.membership import Member, Role
from baton.core.request.request import FinishReason, Request, SamplingParams, Ticket
from baton.core.request.timeline import Event, Stamp
from baton.core.step_cost import StepCost, StepShape
from baton.gateway.admission.admission import QueueLimit
from baton.gateway.engines.engine_table import EngineTable
from baton.gateway.engines.linked_engine import LinkedEngine, ReportedLoad
from baton.gateway.engines.prompt_router import PromptRouter
from baton.gateway.request.engine_link import EngineOutput, Work
from baton.gateway.request.output_chunk import OutputChunk
from baton.gateway.request.session import Session, SessionLimits
from baton.gateway.request.session_table import DispatchQueue, SessionTable
from baton.gateway.text.text_stream import TextStream
from baton.gateway.validation.validation import ValidatedRequest
from baton.prefix_index.mirror import PrefixMirror

from ..clock import FakeClock, FakeEntropy
from .engine_link import Letters

HEARTBEAT_S = 0.25


@dataclass
class PlayedCall:
    """The sink of one session. `token_s`: when each token came."""

    caller_id: int
    arrived_s: float
    clock: FakeClock
    token_s: list[float] = field(default_factory=list)
    error: BaseException | None = None

    def emit(self, chunk: OutputChunk) -> bool:
        self.token_s += [self.clock.monotonic_s()] * len(chunk.token_ids)
        return True

    def fail(self, error: BaseException) -> None:
        self.error = error

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.arrived_s


class PlayedCluster:
    """`at` plays something later, `run` moves the clock until nothing is left to play."""

    def __init__(
        self,
        *,
        cost: StepCost,
        chunk_tokens: int = 8192,
        max_num_seqs: int = 256,
        stay_s: float = 1.0,
        max_queue_s: float | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.calls: list[PlayedCall] = []
        self.num_refused = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._entropy = FakeEntropy()
        self.table = EngineTable(PrefixMirror(self.clock))
        self.queue = DispatchQueue(self.table.released)
        self.sessions = SessionTable(self.clock, 1 << 20, self.queue)
        self._limit = QueueLimit(self.table, self.queue, max_queue_s)
        self._max_queue_s = math.inf if max_queue_s is None else max_queue_s
        self.prefill = PlayedPrefill(self, cost, chunk_tokens)
        self.decode = PlayedDecode(self, max_num_seqs, stay_s)
        self._beat()

    def at(self, seconds: float, play: Callable[[], None]) -> None:
        """`seconds` from now."""
        due_s = self.clock.monotonic_s() + seconds
        heapq.heappush(self._events, (due_s, next(self._order), play))

    def run(self, for_s: float = 1e9) -> None:
        until_s = self.clock.monotonic_s() + for_s
        while self._events and self._events[0][0] <= until_s:
            due_s, _, play = heapq.heappop(self._events)
            self.clock.advance(due_s - self.clock.monotonic_s())
            play()

    def call(self, caller_id: int, num_tokens: int) -> None:
        """A request comes: it is refused, or has its session."""
        try:
            self._limit.check(caller_id, num_tokens, {}, 600.0)
        except Overloaded:
            self.num_refused += 1
            return
        now_s = self.clock.monotonic_s()
        call = PlayedCall(caller_id, now_s, self.clock)
        self.calls.append(call)
        sampling = SamplingParams(max_tokens=3)
        session = Session(
            self._entropy.new_id(),
            ValidatedRequest(bytes(num_tokens), sampling, "", caller_id=caller_id),
            deadline_s=now_s + 600.0,
            arrived=Stamp(Event.ARRIVED, 0, "gateway"),
            text=TextStream(Letters(), ()),
            sink=call,
            router=PromptRouter(self.table, {}, caller_id),
            clock=self.clock,
            entropy=self._entropy,
            limits=SessionLimits(max_queue_s=self._max_queue_s),
        )
        self.sessions.start(session)
        if self._max_queue_s < math.inf and session.is_waiting:
            self.at(self._max_queue_s, lambda: self.sessions._wake(session))

    def link(self, engine: PlayedPrefill | PlayedDecode, role: Role, max_num_seqs: int) -> None:
        name = role.value
        member = Member(name, role, name, "", "demo", "fp", 1 << 20, 16, 1 << 20)
        self.table.add(LinkedEngine(member, engine, clock=self.clock, max_num_seqs=max_num_seqs))

    def send(self, name: str, *outputs: EngineOutput) -> None:
        """What cluster_view.py does with a step."""
        self.table.engines[name].settle(outputs)
        self.sessions.engine_tokens(name, ())
        self.sessions.engine_outputs(name, outputs)

    def _beat(self) -> None:
        for engine in (self.prefill, self.decode):
            self.table.engines[engine.name].receive_heartbeat(engine.load())
        self.sessions.cluster_changed(is_load_only=self.clock.monotonic_s() > 0)
        if self._events or not self.clock.monotonic_s() or self.sessions:
            self.at(HEARTBEAT_S, self._beat)


class PlayedPrefill:
    """Steps of at most a chunk of prompt tokens, of callers in fair order; none that is longer than
    the first of its step, which would wait for it."""

    name = Role.PREFILL.value

    def __init__(self, cluster: PlayedCluster, cost: StepCost, chunk_tokens: int) -> None:
        self._cluster = cluster
        self._cost = cost
        self._chunk_tokens = chunk_tokens
        self._waiting: FairQueue[Request] = FairQueue()
        self._is_busy = False
        self.most_waiting = 0
        cluster.link(self, Role.PREFILL, 0)

    def dispatch(self, request: Request, work: Work, ticket: Ticket, remaining_s: float) -> None:
        self._waiting.add(request, request.caller_id, request.num_known_tokens)
        self.most_waiting = max(self.most_waiting, len(self._waiting))
        self._step()

    def cancel(self, request_id: str, attempt: int) -> None: ...

    def _step(self) -> None:
        if self._is_busy or not self._waiting:
            return
        self._is_busy, done, num_tokens = True, [self._waiting.pop()], 0
        num_tokens = done[0].num_known_tokens
        while (head := self._waiting.head) is not None:
            if num_tokens + head.num_known_tokens > self._chunk_tokens or (
                head.num_known_tokens > done[0].num_known_tokens
            ):
                break
            done.append(self._waiting.pop())
            num_tokens += head.num_known_tokens
        self._cluster.at(self._cost.seconds(StepShape(num_tokens)), lambda: self._computed(done))

    def _computed(self, done: list[Request]) -> None:
        self._is_busy = False
        self._step()
        outputs = [EngineOutput(r.request_id, 0, 0, (97,), cached_tokens=0) for r in done]
        self._cluster.send(self.name, *outputs)
        for request in done:
            self._cluster.decode.take(request.request_id)

    def load(self) -> ReportedLoad:
        by_caller = self._waiting.waiting_tokens()
        return ReportedLoad(
            *(0, len(self._waiting), sum(by_caller.values()), 1 << 20, 1 << 20, False),
            links=frozenset(),
            step_cost=self._cost,
            waiting_by_caller=by_caller,
        )


class PlayedDecode:
    """A request stays for `stay_s` once it has a place; those without wait in their order."""

    name = Role.DECODE.value

    def __init__(self, cluster: PlayedCluster, max_num_seqs: int, stay_s: float) -> None:
        self._cluster = cluster
        self._max_num_seqs = max_num_seqs
        self._stay_s = stay_s
        self._known: set[str] = set()
        self._waiting: deque[str] = deque()
        self.num_running = 0
        cluster.link(self, Role.DECODE, max_num_seqs)

    def dispatch(self, request: Request, work: Work, ticket: Ticket, remaining_s: float) -> None:
        self._known.add(request.request_id)

    def cancel(self, request_id: str, attempt: int) -> None: ...

    def take(self, request_id: str) -> None:
        """The request's KV is there."""
        self._waiting.append(request_id)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.num_running < self._max_num_seqs:
            request_id = self._waiting.popleft()
            self.num_running += 1
            self._cluster.at(0.01, lambda i=request_id: self._begin(i))

    def _begin(self, request_id: str) -> None:
        self._cluster.send(self.name, EngineOutput(request_id, 0, 1, (98,)))
        self._cluster.at(self._stay_s, lambda: self._end(request_id))

    def _end(self, request_id: str) -> None:
        self.num_running -= 1
        self._known.remove(request_id)
        self._admit()
        last = EngineOutput(request_id, 0, 2, (99,), FinishReason.LENGTH)
        self._cluster.send(self.name, last)

    def load(self) -> ReportedLoad:
        return ReportedLoad(
            *(self.num_running, len(self._waiting), 0, 1 << 20, 0, False),
            links=frozenset({Role.PREFILL.value}),
            num_requests=len(self._known),
            room_blocks=1 << 20,
        )
