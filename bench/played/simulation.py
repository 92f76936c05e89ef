"""A cluster whose devices alone are played: the production's router, sessions and schedulers, over
steps that take as long as a `StepCost` says, in virtual time.

    call ─► Session ─► EngineTable.choose ─► Engine.add | reserve, start ─► step ─► tokens
                        ▲ heartbeats                     one event a step, at its end

Several gateways know of each other's requests what engines' heartbeats have, which come every
quarter of a second, and soon after another number of prompt tokens waits. Engines measure their
first steps, as on GPUs. A hand-off takes `HANDOFF_S` and what its bytes take, and so does the KV of
a running request that moves. The gateways' own time, the network's and a step's launch are not
played. Engines whose setup has `blocks` cache prefixes, and gateways learn of that as they do
through Redis. Needs an event loop, whose timers do not matter.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from baton.core.errors import BatonError, Overloaded, PromiseRefused
from baton.core.membership import Member, Role
from baton.core.metrics import TokenTimes
from baton.core.ports import Clock
from baton.core.request.request import (
    PrefixSource,
    Request,
    RequestOptions,
    SamplingParams,
    Ticket,
    TokenLogprobs,
)
from baton.core.request.timeline import Event, Stamp
from baton.core.request.token_ids import BlockHash, block_hashes, root_hash
from baton.core.step_cost import StepCost, StepShape, pairs_of
from baton.engine.engine import Engine
from baton.engine.execution.batch import Runner, SampledToken, SequenceSlice
from baton.engine.first_steps import BUDGET_S
from baton.engine.kv.generations import LocalGenerations
from baton.engine.kv.limits import EngineLimits
from baton.engine.scheduling.outputs import StepOutput
from baton.gateway.admission.admission import QueueLimit
from baton.gateway.engines.engine_table import EngineTable
from baton.gateway.engines.linked_engine import LinkedEngine
from baton.gateway.engines.prompt_router import PromptRouter
from baton.gateway.engines.reported_load import EngineCounters, ReportedLoad
from baton.gateway.engines.routing_policies import make_policy
from baton.gateway.moves.mover import RequestMover
from baton.gateway.promises.promise_decider import PromiseDecider
from baton.gateway.request.dispatch_wait import SessionLimits
from baton.gateway.request.engine_link import EngineOutput, Work
from baton.gateway.request.output_chunk import OutputChunk
from baton.gateway.request.session import Session
from baton.gateway.request.session_table import DispatchQueue, SessionTable
from baton.gateway.text.text_stream import TextStream
from baton.gateway.validation.validation import ValidatedRequest
from baton.prefix_index.mirror import PrefixMirror
from baton.prefix_index.prefix_sources import FETCH_S

from .caches import LINK_GBYTES_PER_S, TOKEN_BYTES, PlayedCopier, PublishedCache

HEARTBEAT_S = 0.25
_RECOUNT_S = 0.02  # as of node/engine_process/engine_loop.py
HANDOFF_S = 0.003
_KV_TOKEN_S = TOKEN_BYTES / 300e9  # of an 8B model over NVLink
_NUM_BLOCKS, _BLOCK_SIZE = 50_000, 16
_FINGERPRINT = "fp"
_TOKEN_ID = 97
_DEADLINE_S = 1e6


@dataclass
class Call:
    """A request's stream. Times are of the virtual clock."""

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


class VirtualClock:
    """`core.ports.Clock`, moved by whoever plays."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ns(self) -> int:
        return int(self.now_s * 1e9)


class _Ids:
    """`core.ports.Entropy` without any."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def new_id(self) -> str:
        return f"{next(self._count):032x}"

    def new_seed(self) -> int:
        return next(self._count)


class _Letters:
    def step(self, token_id: int) -> str:
        return chr(token_id)


class Device(Runner, Clock, Protocol):
    """A `batch.Runner`, and the clock that it moves: `now_s` is set where a step begins."""

    now_s: float


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """`tbt_target_s`: its promise, if it makes one. `cost`, `blocks`: where it is not as all.
    `device`: a real one, in place of a played; `eos_ids` end its outputs."""

    role: Role
    tbt_target_s: float | None = None
    max_num_batched_tokens: int = 2048
    prefill_chunk_tokens: int = 0
    max_num_seqs: int = 256
    cost: StepCost | None = None
    blocks: Blocks | None = None
    device: Device | None = None
    eos_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Blocks:
    """Of an engine that caches prefixes; `num_host` in host memory."""

    size: int
    num: int
    num_host: int = 0


class PlayedGateway:
    """What of a gateway decides where requests go, and streams their tokens."""

    def __init__(
        self, clock: VirtualClock, seed: int, max_queue_s: float | None, policy: str
    ) -> None:
        self.table = EngineTable(PrefixMirror(clock), make_policy(policy, random.Random(seed)))
        self.queue = DispatchQueue(self.table.released)
        self.sessions = SessionTable(clock, 1 << 20, self.queue)
        self.limit = QueueLimit(self.table, self.queue, max_queue_s)
        self.mover = RequestMover(self.table, self.sessions, clock, random.Random(seed))

    def received(self, name: str, outputs: Sequence[EngineOutput]) -> None:
        """What it does with a step's outputs."""
        self.table.engines[name].settle(outputs)
        self.sessions.engine_tokens(name, ())
        self.sessions.engine_outputs(name, outputs)


class Simulation:
    """`at` plays something later; `run` moves the clock until nothing is left, or for a while.

    `max_queue_s`: gateways refuse what would wait longer, and count it in `num_refused`.
    `moves_requests`: whether running ones move away from engines whose promise is broken.
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
        """`ttft_s`: where given, the first gateway moves promises between engines, so that first
        tokens come within it. `policy`: by which gateways route."""
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
        self.link_rates = dict.fromkeys(setups, LINK_GBYTES_PER_S)  # from any to any
        self.engines = {n: PlayedEngine(self, n, cost, setups[n], sources) for n in setups}
        self.moves: list[tuple[float, str, bool]] = []  # when, which engine, whether it promises
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
        """A request comes now, to the gateways in turn; without `caller_id` from somebody new.
        `token_ids`: of its prompt, where it matters which; `cache_salt`: as the gateway keyed it;
        `sampling`: where not just so many tokens are to come.
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
            hashes[_FINGERPRINT] = self._hashes(token_ids, cache_salt)
        prompt = (1,) * num_prompt_tokens if token_ids is None else token_ids
        session = Session(
            self._ids.new_id(),
            ValidatedRequest(
                prompt, sampling, "", RequestOptions(cache_salt=cache_salt), caller_id=caller_id
            ),
            deadline_s=now_s + _DEADLINE_S,
            arrived=Stamp(Event.ARRIVED, 0, "gateway"),
            text=TextStream(_Letters(), ()),
            sink=call,
            router=PromptRouter(
                gateway.table, token_ids or (), cache_salt, caller_id, hashes=hashes
            ),
            clock=self.clock,
            entropy=self._ids,
            limits=SessionLimits(max_queue_s=self._max_queue_s),
        )
        gateway.sessions.start(session)
        if self._max_queue_s < math.inf and session.is_waiting:
            self.after(self._max_queue_s, lambda: gateway.sessions._wake(session))

    def _hashes(self, token_ids: array[int], cache_salt: str) -> list[BlockHash]:
        size = next(engine.block_size for engine in self.engines.values() if engine.cache)
        return block_hashes(root_hash(_FINGERPRINT, cache_salt), token_ids, size)

    def _publish(self, cache: PublishedCache) -> None:
        for message in cache.take_messages():
            for gateway in self.gateways:
                gateway.table.mirror.take(message)

    def hear(self, name: str, load: ReportedLoad) -> None:
        """All gateways get this engine's heartbeat."""
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


class PlayedEngine:
    """An `Engine` over a played device, with the hand-off's two ends.

    Its own clock runs ahead within a step: what a step brings is sent at its end.
    """

    def __init__(
        self,
        simulation: Simulation,
        name: str,
        cost: StepCost,
        setup: EngineSetup,
        sources: frozenset[str],
    ) -> None:
        self.name = name
        self._simulation = simulation
        self._setup = setup
        self._links = sources if setup.role is Role.DECODE else frozenset[str]()
        self._device: Device = setup.device or _Device(setup.cost or cost)
        blocks = setup.blocks or Blocks(_BLOCK_SIZE, _NUM_BLOCKS)
        self.block_size, block_bytes = blocks.size, blocks.size * TOKEN_BYTES
        self.cache = None if setup.blocks is None else PublishedCache(name)
        self._copier = None
        if blocks.num_host:
            self._copier = PlayedCopier(self._device, blocks.num_host, block_bytes)
        limits = EngineLimits(
            blocks.num,
            blocks.size,
            1 << 17,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            prefill_chunk_tokens=setup.prefill_chunk_tokens,
        )
        self.engine = Engine(
            self._device,
            limits,
            LocalGenerations(blocks.num),
            fingerprint=_FINGERPRINT,
            eos_token_ids=setup.eos_ids,
            enable_prefix_caching=self.cache is not None,
            cache_observer=self.cache,
            clock=self._device,
            host_copier=self._copier,
        )
        if setup.device is None:
            self.engine.measure_first_steps(BUDGET_S)
        self.engine.promise.tbt_target_s = setup.tbt_target_s
        self._tickets: dict[str, Ticket] = {}  # of what is held
        self._intents: dict[str, Request] = {}  # by key
        self._arrived: deque[tuple[Request, int]] = deque()  # KV that waits for blocks here
        self._is_busy = False
        self._num_steps = 0
        self._reported = (0, 0)  # tokens that wait, and steps so far, at the last heartbeat
        self._recount_s = 0.0  # when another heartbeat may follow
        self._is_uncounted = False
        self.num_refusals = 0
        self.is_draining = False
        self.most_waiting = 0  # requests, at heartbeats
        self.busy_s = 0.0
        self.num_fetches = 0
        self._woken_s = -1.0
        member = Member(
            *(name, setup.role, name, "", "demo", _FINGERPRINT), 1 << 17, blocks.size, blocks.num
        )
        self._gateway_of: dict[str, PlayedGateway] = {}  # by key
        for gateway in simulation.gateways:
            link = _Link(self, gateway)
            gateway.table.add(
                LinkedEngine(
                    member,
                    link,
                    clock=simulation.clock,
                    max_num_seqs=limits.max_num_seqs,
                    block_bytes=block_bytes,
                    num_host_blocks=blocks.num_host,
                    own_target_s=setup.tbt_target_s or 0.0,
                )
            )

    def take(
        self, gateway: PlayedGateway, request: Request, work: Work, ticket: Ticket | None
    ) -> None:
        """A dispatch."""
        self._gateway_of[request.key] = gateway
        if work is Work.DECODE:
            self._intents[request.key] = request
            return
        if work is Work.LOCAL and request.may_refuse:
            try:
                self.engine.promise.check(request)
            except PromiseRefused as refused:
                self._refuse(request, refused)
                return
        if ticket is not None:
            self._tickets[request.key] = ticket
        if request.prefix_source is not None and request.output_token_ids:
            self._move_in(request)
            return
        if request.prefix_source is None or not self._fetch(request, request.prefix_source, work):
            self._add(request, work)

    def _add(self, request: Request, work: Work) -> None:
        self.engine.add(request, hold=work is Work.PREFILL)
        self._step()
        self._count_soon()

    def _count_soon(self) -> None:
        """Something has changed, of which gateways may have to know before the next beat."""
        if not self._is_uncounted:
            self._is_uncounted = True
            now_s = self._simulation.clock.now_s
            self._simulation.at(max(now_s, self._recount_s), self._recount)

    def _recount(self) -> None:
        self._is_uncounted = False
        self._recount_s = self._simulation.clock.now_s + _RECOUNT_S
        if not self.engine.has_prompts and not self._reported[0]:
            return
        before, load = self._reported, self.load()
        if self._reported != before:
            self._simulation.hear(self.name, load)

    def _fetch(self, request: Request, source: PrefixSource, work: Work) -> bool:
        """Get a prefix out of another engine's cache before the prompt is computed; False: at once,
        without. As node/peers/prefix_fetches.py does."""
        tokens = request.known_token_ids[: source.num_blocks * self.block_size]
        hashes = block_hashes(root_hash(_FINGERPRINT, request.cache_salt), tokens, self.block_size)
        prefix = self.engine.prefixes.borrow(hashes)
        if prefix is None:
            return False
        lender = self._simulation.engines[source.incarnation].engine
        if (lent := lender.prefixes.lend(hashes[prefix.num_cached_blocks :])) is None:
            self.engine.prefixes.drop(prefix)
            return False
        num_bytes = len(lent[1]) * self.block_size * TOKEN_BYTES
        pull_s = FETCH_S + num_bytes / (LINK_GBYTES_PER_S * 1e9)

        def over() -> None:
            lender.prefixes.give_back(lent[0])
            self.engine.prefixes.keep(prefix)
            self.num_fetches += 1
            self._add(request, work)

        self._simulation.after(pull_s, over)
        return True

    def _refuse(self, request: Request, error: PromiseRefused) -> None:
        gateway = self._gateway_of.pop(request.key)
        self.num_refusals += 1
        answer = EngineOutput(request.request_id, request.attempt, error=error)
        self._simulation.after(0.0, lambda: gateway.received(self.name, [answer]))

    def _move_in(self, request: Request) -> None:
        """A running request moves here: its next token follows once its KV is copied."""
        *before, last = request.output_token_ids
        moved = replace(request, output_token_ids=before, prefix_source=None)
        self._simulation.after(_pull_s(request), lambda: self._arrive(moved, last))

    def forget(self, key: str) -> None:
        """A request was over with its first token, or has moved away."""
        self._intents.pop(key, None)
        if self._gateway_of.pop(key, None) is not None:
            self.engine.abort(key)

    def load(self) -> ReportedLoad:
        load, totals = self.engine.load(self._intents.values()), self.engine.totals()
        self._reported = load.waiting_tokens, self._num_steps if load.waiting_tokens else 0
        self.most_waiting = max(self.most_waiting, load.num_waiting)
        return ReportedLoad(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            waiting_tokens=load.waiting_tokens,
            free_blocks=load.free_blocks,
            credit_blocks=load.credit_blocks,
            is_draining=self.is_draining,
            links=self._links,
            link_gbytes_per_s=self._simulation.link_rates,
            host_block_s=totals.host.block_s,
            num_steps=self._num_steps,
            num_requests=load.num_running + load.num_waiting + len(self._intents),
            room_blocks=load.room_blocks,
            output_tokens=load.output_tokens,
            step_cost=self.engine.step_cost(),
            decodes=load.decodes,
            tbt_target_s=self.engine.promise.target_s,
            step_tokens=self.engine.limits.prompt_step_tokens,
            is_promise_withdrawn=not self.engine.promise.is_promising,
            counters=EngineCounters(
                num_prompts=totals.num_prompts,
                num_prompt_tokens=totals.num_prompt_tokens,
                num_decode_tokens=totals.num_decode_tokens,
            ),
            waiting_by_caller=load.waiting_by_caller,
        )

    def set_promise(self, *, is_promising: bool) -> None:
        """An order: from the next step on."""
        self.engine.promise.is_promising = is_promising
        self._simulation.moves.append((self._simulation.clock.now_s, self.name, is_promising))

    def _step(self) -> None:
        if self._is_busy or not self.engine.has_work:
            return
        self._device.now_s = began_s = self._simulation.clock.now_s
        output = self.engine.step()
        self._note_cache()
        if self._device.now_s == began_s and self._wait_for_copies():
            return
        self._num_steps += 1
        self.busy_s += self._device.now_s - began_s
        self._is_busy = True
        self._simulation.at(self._device.now_s, lambda: self._step_ended(output))

    def _wait_for_copies(self) -> bool:
        """Nothing was launched: the next copy's end may bring something."""
        now_s = self._simulation.clock.now_s
        end_s = None if self._copier is None else self._copier.next_end_s(now_s)
        if end_s is not None and end_s != self._woken_s:
            self._woken_s = end_s
            self._simulation.at(end_s, self._step)
        return self._copier is not None

    def _note_cache(self) -> None:
        if (cache := self.cache) and (due_s := cache.due_s(self._device.now_s)) is not None:
            self._simulation.at(due_s, lambda: self._simulation._publish(cache))

    def _step_ended(self, output: StepOutput) -> None:
        self._is_busy = False
        assert not output.failed, output.failed
        while self._arrived and self._start(*self._arrived[0]):
            self._arrived.popleft()
        self._step()
        self._count_soon()
        outputs: dict[PlayedGateway, list[EngineOutput]] = {}
        for token in output.tokens:
            if token.key not in self._gateway_of:
                continue  # it moved away during the step
            request_id, _, attempt = token.key.partition("/")
            ticket = self._tickets.pop(token.key, None)
            outputs.setdefault(self._gateway_of[token.key], []).append(
                EngineOutput(
                    request_id, int(attempt), token.index, (token.token_id,), token.finish_reason
                )
            )
            if token.finish_reason is not None or ticket is not None:
                del self._gateway_of[token.key]
            if token.finish_reason is None and ticket is not None:
                self._hand_off(token.key, ticket, token.token_id)
        for gateway, received in outputs.items():
            gateway.received(self.name, received)

    def _hand_off(self, key: str, ticket: Ticket, token_id: int) -> None:
        puller = self._simulation.engines[ticket.puller_incarnation]
        request = puller._intents.pop(key)
        self._simulation.after(_pull_s(request), lambda: self._pulled(puller, request, token_id))

    def _pulled(self, puller: PlayedEngine, request: Request, token_id: int) -> None:
        self.engine.abort(request.key)
        self._step()
        puller._arrive(request, token_id)

    def _arrive(self, request: Request, token_id: int) -> None:
        if self._arrived or not self._start(request, token_id):
            self._arrived.append((request, token_id))
        self._step()

    def _start(self, request: Request, token_id: int) -> bool:
        if request.key not in self._gateway_of:
            return True  # called off
        reservation = self.engine.reserve(request)
        if reservation is None:
            return False
        self.engine.start(reservation, token_id)
        return True


def _pull_s(request: Request) -> float:
    return HANDOFF_S + request.num_known_tokens * _KV_TOKEN_S


@dataclass(frozen=True, slots=True)
class _Link:
    """`EngineSender` of one gateway."""

    engine: PlayedEngine
    gateway: PlayedGateway

    def dispatch(
        self, request: Request, work: Work, ticket: Ticket | None, deadline_remaining_s: float
    ) -> None:
        self.engine.take(self.gateway, request, work, ticket)

    def cancel(self, request_id: str, attempt: int) -> None:
        self.engine.forget(f"{request_id}/{attempt}")

    def set_promise(self, epoch: int, leader: str, tbt_target_s: float | None) -> None:
        self.engine.set_promise(is_promising=tbt_target_s is not None)


class _Device:
    """One that computes nothing and takes its time; and the clock that it moves."""

    runs_ahead = False

    def __init__(self, cost: StepCost) -> None:
        self.now_s = 0.0
        self._cost = cost

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ns(self) -> int:
        return int(self.now_s * 1e9)

    def launch(self, batch: Sequence[SequenceSlice]) -> _Step:
        num_prompt_tokens = pairs = num_decodes = keys = 0
        for part in batch:
            num_tokens = part.num_scheduled_tokens
            if num_tokens == 1:
                num_decodes += 1
                keys += part.start + 1
            else:
                num_prompt_tokens += num_tokens
                pairs += pairs_of(num_tokens, part.start)
        self.now_s += self._cost.seconds(StepShape(num_prompt_tokens, pairs, num_decodes, keys))
        return _Step(batch)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        raise AssertionError("nothing is forked")


@dataclass(frozen=True, slots=True)
class _Step:
    batch: Sequence[SequenceSlice]
    number: int = 0

    def has_completed(self) -> bool:
        return True

    def collect(self) -> list[SampledToken | None]:
        token = SampledToken(_TOKEN_ID, -1.0)
        return [None if part.sample is None else token for part in self.batch]

    def prompt_logprobs(self) -> Mapping[int, tuple[TokenLogprobs, ...]]:
        return {}
