"""A cluster with simulated devices: production router, sessions and schedulers over steps that take
as long as a `StepCost` predicts, in virtual time.

    call ─► Session ─► PromptRouter.choose ─► Engine.add | reserve, start ─► step ─► tokens
                        ▲ heartbeats                     one event a step, at its end

Several gateways learn of each other's requests only from engines' heartbeats, which are sent every
quarter of a second, and soon after the number of waiting prompt tokens changes. Engines measure
their first steps, as on GPUs. A hand-off takes `HANDOFF_S` plus the time of its bytes, and so does
the KV of a running request that moves. The time of gateways, network and step launches is not
simulated. Engines whose setup has `blocks` cache prefixes, and gateways receive their cache events
as they do through Redis. Needs an event loop, whose timers do not matter.
"""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton.core.errors import BatonError, Overloaded
from baton.core.membership import Role
from baton.core.metrics import TokenTimes
from baton.core.ports import Entropy
from baton.core.request.sampling_params import RequestOptions, SamplingParams
from baton.core.request.token_ids import BlockHash, block_hashes, root_hash
from baton.core.step_cost import StepCost
from baton.gateway.engines.prompt_router import PromptRouter
from baton.gateway.engines.reported_load import ReportedLoad
from baton.gateway.promises.promise_decider import PromiseDecider
from baton.gateway.request.output_chunk import OutputChunk
from baton.gateway.request.session import Session
from baton.gateway.request.session_output import SessionOutput
from baton.gateway.request.setbacks import SessionLimits
from baton.gateway.validation.validation import ValidatedRequest

from .caches import LINK_GBYTES_PER_S, PublishedCache
from .device import VirtualClock
from .engine import FINGERPRINT, EngineSetup, PlayedEngine
from .gateway import PlayedGateway

HEARTBEAT_S = 0.25
_DEADLINE_S = 1e6


@dataclass
class Call:
    """The stream of a request. Times are of the virtual clock."""

    caller_id: int
    arrived_s: float
    num_outputs: int
    clock: VirtualClock
    token_s: list[float] = field(default_factory=list)
    error: BatonError | None = None

    def emit(self, chunk: OutputChunk) -> bool:
        self.token_s += [self.clock.now_s] * len(chunk.token_ids)
        return True

    def fail(self, error: BatonError) -> None:
        self.error = error

    @property
    def is_served(self) -> bool:
        return len(self.token_s) == self.num_outputs

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.arrived_s

    @property
    def times(self) -> TokenTimes:
        return TokenTimes(self.arrived_s, tuple(self.token_s))


class _Ids(Entropy):
    """Counts instead of drawing."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def new_id(self) -> str:
        return f"{next(self._count):032x}"

    def new_seed(self) -> int:
        return next(self._count)


class _Letters:
    def step(self, token_id: int) -> str:
        return chr(token_id)


class Simulation:
    """`at` schedules a callback; `run` advances the clock until no event is left, or for some time.

    `max_queue_s`: gateways refuse requests that would wait longer, counted in `num_refused`.
    `moves_requests`: whether running requests move away from engines whose promise is broken or
    withdrawn.
    """

    moves_requests = True

    def __init__(
        self,
        cost: StepCost,
        setups: Mapping[str, EngineSetup],
        num_gateways: int = 1,
        max_queue_s: float | None = None,
        ttft_s: float | None = None,
        policy: str = "auto",
    ) -> None:
        """`ttft_s`: if given, the first gateway moves promises between engines to keep TTFT within
        it. `policy`: the routing policy of the gateways."""
        self.clock = VirtualClock()
        self.calls: list[Call] = []
        self.num_refused = 0
        self.gateways = [
            PlayedGateway(self.clock, seed, max_queue_s, policy) for seed in range(num_gateways)
        ]
        self._max_queue_s = math.inf if max_queue_s is None else max_queue_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ids = _Ids()
        sources = frozenset(n for n, setup in setups.items() if setup.role is Role.PREFILL)
        self.link_rates = dict.fromkeys(setups, LINK_GBYTES_PER_S)  # between any two engines
        self.engines = {n: PlayedEngine(self, n, cost, setups[n], sources) for n in setups}
        self.moves: list[tuple[float, str, bool]] = []  # (time, engine, whether it promises)
        self._decider = None
        if ttft_s is not None:
            self._decider = PromiseDecider(self.gateways[0].table, self.clock, ttft_s)
        self._beat()

    def at(self, due_s: float, play: Callable[[], None]) -> None:
        heapq.heappush(self._events, (due_s, next(self._order), play))

    def after(self, seconds: float, play: Callable[[], None]) -> None:
        self.at(self.clock.now_s + seconds, play)

    def run(self, for_s: float = math.inf) -> None:
        until_s = self.clock.now_s + for_s
        while self._events and self._events[0][0] <= until_s:
            self.clock.now_s, _, play = heapq.heappop(self._events)
            play()

    def call(
        self,
        num_prompt_tokens: int,
        num_outputs: int,
        caller_id: int | None = None,
        token_ids: array[int] | None = None,
        cache_salt: str = "",
        sampling: SamplingParams | None = None,
    ) -> None:
        """Send a request, to the gateways in turn; without `caller_id` from a new caller.

        `token_ids`: of the prompt, if its contents matter; `cache_salt`: as keyed by the gateway;
        `sampling`: if not simply `num_outputs` greedy tokens.
        """
        number, now_s = len(self.calls) + self.num_refused, self.clock.now_s
        gateway = self.gateways[number % len(self.gateways)]
        caller_id = number + 1 if caller_id is None else caller_id
        try:
            gateway.limit.check(caller_id, num_prompt_tokens, {}, _DEADLINE_S)
        except Overloaded:
            self.num_refused += 1
            return
        call = Call(caller_id, now_s, num_outputs, self.clock)
        self.calls.append(call)
        if sampling is None:
            sampling = SamplingParams(max_tokens=num_outputs, ignore_eos=True, temperature=0.0)
        hashes: dict[str, list[BlockHash]] = {}
        if token_ids is not None:
            hashes[FINGERPRINT] = self._hashes(token_ids, cache_salt)
        prompt = (1,) * num_prompt_tokens if token_ids is None else token_ids
        request = ValidatedRequest(
            prompt, sampling, "", RequestOptions(cache_salt=cache_salt), caller_id=caller_id
        )
        session = Session(
            SessionOutput(self._ids.new_id(), request, _Letters().step, call, self.clock, 0),
            deadline_s=now_s + _DEADLINE_S,
            router=PromptRouter(gateway.table, request, hashes),
            entropy=self._ids,
            limits=SessionLimits(max_queue_s=self._max_queue_s),
        )
        gateway.sessions.start(session)
        if self._max_queue_s < math.inf and session.is_waiting:
            self.after(self._max_queue_s, lambda: gateway.sessions._wake(session))

    def _hashes(self, token_ids: array[int], cache_salt: str) -> list[BlockHash]:
        size = next(engine.block_size for engine in self.engines.values() if engine.cache)
        return block_hashes(root_hash(FINGERPRINT, cache_salt), token_ids, size)

    def publish(self, cache: PublishedCache) -> None:
        for message in cache.take_messages():
            for gateway in self.gateways:
                gateway.table.mirror.take(message)

    def hear(self, name: str, load: ReportedLoad) -> None:
        """Deliver this engine's heartbeat to all gateways."""
        for gateway in self.gateways:
            gateway.table.engines[name].receive_heartbeat(load)
            gateway.sessions.cluster_changed(is_load_only=True)

    def _beat(self) -> None:
        for engine in self.engines.values():
            if engine.cache is not None:
                for gateway in self.gateways:
                    gateway.table.mirror.take(engine.cache.head())
        loads = {name: engine.load() for name, engine in self.engines.items()}
        for gateway in self.gateways:
            for name, load in loads.items():
                gateway.table.engines[name].receive_heartbeat(load)
            gateway.sessions.cluster_changed(is_load_only=self.clock.now_s > 0)
            if self.moves_requests:
                gateway.mover.look()
        if self._decider is not None:
            self._decider.look()
            for name, target_s in self._decider.orders().items():
                self.gateways[0].table.engines[name].outbox.set_promise(1, "", target_s)
        is_busy = self._events or any(gateway.sessions for gateway in self.gateways)
        if is_busy or not self.clock.now_s:
            self.after(HEARTBEAT_S, self._beat)
