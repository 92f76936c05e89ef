"""What the gateway knows of every linked engine: its welcome, last heartbeat and own dispatches.

Owns what was dispatched to each (prefill_backlog.py, decode_places.py have the accounts of it), and
how often the prefix index was right. Knows no grpc and no directory: cluster_view.py tells it what
happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Protocol

from ...core.errors import Unavailable
from ...core.membership import Member, Role
from ...core.ports import Clock, SystemClock
from ...core.request.request import Request, Ticket
from ...core.step_cost import PromptSpeed, StepCost, StepShape
from ...prefix_index.mirror import PrefixMirror
from ..request.engine_link import Avoid, Demand, EngineOutput, MustWait, PlainToken, Route, Work
from ..request.suspects import Suspects
from ..validation.validation import ModelLimits
from .decode_places import DecodePlaces, Key
from .prefill_backlog import Backlog, PrefillBacklog
from .routing import EngineState, choose_plan

_RESERVED_BLOCKS = 2  # padding and canary
_STEP_TOKENS = 2048  # of an engine that does not say
_MANY = 1 << 16  # decodes
_MEASURED_ROWS = 256  # an engine that took a step of so many knows what prompts take it
_NOTHING_CACHED: Mapping[str, int] = MappingProxyType({})
_NOTHING_HELD: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """What an engine counts since its incarnation began (node.proto, Counters)."""

    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_transfers: int = 0
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    num_expired_leases: int = 0
    failed_transfers: Mapping[str, int] = field(default_factory=dict)  # by error code


@dataclass(frozen=True, slots=True)
class ReportedLoad:
    """An engine's heartbeat."""

    num_running: int
    num_waiting: int
    waiting_tokens: int
    free_blocks: int
    credit_blocks: int
    is_draining: bool
    links: frozenset[str]
    held_blocks: int = 0
    counters: EngineCounters = EngineCounters()
    link_gbytes_per_s: Mapping[str, float] = field(default_factory=dict)
    num_steps: int = 0  # so far
    num_requests: int = 0  # accepted from all gateways and not ended
    room_blocks: int = 0
    output_tokens: int = 0
    step_cost: StepCost | None = None
    step_cost_error: float | None = None
    decodes: StepShape = field(default_factory=StepShape)
    tbt_target_s: float | None = None
    step_tokens: int = 0
    waiting_by_caller: Mapping[int, int] = field(default_factory=dict)

    @property
    def prompt_speed(self) -> PromptSpeed | None:
        """At which it computes prompts beside the decodes that it has; None: not measured yet."""
        return None if self.step_cost is None else self.prompt_speed_by(self.step_cost)

    @property
    def max_rows(self) -> int:
        """Of the steps that its cost was measured on: few where it never had a prompt."""
        return 0 if self.step_cost is None else self.step_cost.max_rows

    def prompt_speed_by(self, cost: StepCost) -> PromptSpeed:
        """The same, were its steps to cost as much as this."""
        return cost.prompt_speed(self.step_tokens or _STEP_TOKENS, self.decodes, self.tbt_target_s)

    def decodes_within(self, seconds: float) -> int:
        """How many like those that run a step may have that takes no longer; one at least."""
        cost, now = self.step_cost, self.decodes
        if cost is None or not now.num_decodes:
            return _MANY
        low, high = 1, 2
        while high < _MANY and cost.seconds(now.scaled_to(high)) <= seconds:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if cost.seconds(now.scaled_to(middle)) <= seconds:
                low = middle
            else:
                high = middle
        return low


class EngineSender(Protocol):
    """Where an engine's messages go; never blocks."""

    def dispatch(
        self, request: Request, work: Work, ticket: Ticket | None, deadline_remaining_s: float
    ) -> None: ...

    def cancel(self, request_id: str, attempt: int) -> None: ...


@dataclass(slots=True)
class LinkedEngine:
    """One engine behind a live link.

    `max_num_seqs`: sequences that it runs at once; 0: it does not say. `released`: callers of which
    something ended here, or was answered, so that what waits may find a place; whoever dispatches
    what waits clears it. `num_index_hits`: dispatches for which the index promised cached tokens;
    `num_stale_hits`: those of them that found fewer.
    """

    member: Member
    outbox: EngineSender
    load: ReportedLoad | None = None
    num_dispatched: int = 0
    num_index_hits: int = 0
    num_stale_hits: int = 0
    clock: Clock = field(default_factory=SystemClock)
    max_num_seqs: int = 0
    released: set[int] = field(default_factory=set)
    backlog: PrefillBacklog = field(init=False)
    places: DecodePlaces = field(init=False)
    _promised: dict[Key, int] = field(default_factory=dict)  # cached tokens, by the index
    _callers: dict[Key, int] = field(default_factory=dict)  # of what is open
    _num_promised: int = _MANY  # decodes of a step that keeps its promise

    def __post_init__(self) -> None:
        self.backlog = PrefillBacklog(self.clock)
        self.places = DecodePlaces(self.max_num_seqs)

    @property
    def incarnation(self) -> str:
        return self.member.incarnation

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def fingerprint(self) -> str:
        return self.member.fingerprint

    @property
    def takes_prompts(self) -> bool:
        """Whether it computes them: for others, or for itself, beside its decodes."""
        promises = self.load is not None and self.load.tbt_target_s is not None
        return promises or self.member.role is Role.PREFILL

    @property
    def is_ready(self) -> bool:
        return self.load is not None and not self.load.is_draining

    def receive_heartbeat(self, load: ReportedLoad) -> None:
        """A heartbeat."""
        self.load = load
        self.backlog.heartbeat(
            Backlog(load.waiting_tokens, load.waiting_by_caller, load.num_steps, load.prompt_speed)
        )
        self.places.heartbeat(load.num_requests, load.room_blocks)
        target_s = load.tbt_target_s
        self._num_promised = _MANY if target_s is None else load.decodes_within(target_s)

    def dispatch(
        self,
        request: Request,
        work: Work,
        ticket: Ticket | None,
        deadline_remaining_s: float,
        cached_tokens: int = 0,
    ) -> None:
        """`cached_tokens`: what the index promises of the request here."""
        self.num_dispatched += 1
        num_tokens, caller_id = request.num_known_tokens, request.caller_id
        keys = [
            (request_id, request.attempt) for request_id in (request.request_id, *request.fork_ids)
        ]
        if work is not Work.DECODE:
            self.backlog.sent(keys[0], caller_id, num_tokens, cached_tokens)
            if cached_tokens:
                self._promised[keys[0]] = cached_tokens
        if work is not Work.PREFILL:
            num_left = request.sampling.max_tokens - len(request.output_token_ids)
            num_blocks = self.blocks_for(num_tokens - cached_tokens, num_left, len(keys))
            self.places.sent(keys, num_blocks, self.clock.monotonic_s())
        self._callers.update(dict.fromkeys(keys, caller_id))
        self.outbox.dispatch(request, work, ticket, deadline_remaining_s)

    def cancel(self, request_id: str, attempt: int) -> None:
        self._ended((request_id, attempt))
        self.outbox.cancel(request_id, attempt)

    def settle(self, outputs: Iterable[EngineOutput], tokens: Iterable[PlainToken] = ()) -> None:
        """Take note of what these outputs answer or end."""
        if self.backlog.has_ours:
            for request_id, attempt, *_ in tokens:
                self._answered((request_id, attempt))
        for output in outputs:
            key = (output.request_id, output.attempt)
            if output.cached_tokens is not None and (promised := self._promised.pop(key, 0)):
                self.num_index_hits += 1
                self.num_stale_hits += output.cached_tokens < promised
            if output.token_ids:
                self._answered(key)
            if output.finish_reason is not None or output.error is not None:
                self._ended(key)

    def _answered(self, key: Key) -> None:
        """Its prompt is computed: a prefill engine has nothing more to do for it."""
        if not self.backlog.ended(key, is_computed=True):
            return
        if not self.places.has(key):
            self._ended(key)
        elif (caller_id := self._callers.get(key)) is not None:
            self.released.add(caller_id)

    def _ended(self, key: Key) -> None:
        """What the request had or waited for here, others may have."""
        caller_id = self._callers.pop(key, None)
        if caller_id is None:
            return
        self.released.add(caller_id)
        self._promised.pop(key, None)
        self.backlog.ended(key, is_computed=False)
        self.places.ended(key, self.clock.monotonic_s())

    def blocks_for(self, num_tokens: int, max_output_tokens: int, num_sequences: int) -> int:
        """Of the KV of samples of one prompt, with what each is expected to grow by."""
        expected = self.load.output_tokens if self.load is not None else 0
        num_growth = min(max_output_tokens, expected or max_output_tokens)
        size = self.member.block_size
        return -(-num_tokens // size) + num_sequences * -(-(num_growth + 1) // size)

    def state(
        self,
        load: ReportedLoad,
        demand: Demand,
        caller_id: int,
        cached_tokens: int,
        others_cost: StepCost | None = None,
    ) -> EngineState:
        """For routing one request of this caller, of which so much should be cached here.

        `others_cost`: of engines like it, for one that had no prompts to measure: it would never be
        given any.
        """
        speed = self.backlog.speed
        if others_cost is not None and load.max_rows < _MEASURED_ROWS:
            speed = load.prompt_speed_by(others_cost)
        num_blocks = self.blocks_for(
            demand.num_tokens - cached_tokens, demand.max_output_tokens, demand.num_sequences
        )
        return EngineState(
            incarnation=self.member.incarnation,
            role=self.member.role,
            fingerprint=self.member.fingerprint,
            block_size=self.member.block_size,
            num_requests=self.places.num_requests,
            waiting_tokens=self.backlog.tokens_ahead,
            free_blocks=load.free_blocks,
            credit_blocks=load.credit_blocks,
            is_draining=load.is_draining,
            links=load.links,
            link_gbytes_per_s=load.link_gbytes_per_s,
            num_dispatched=self.num_dispatched,
            cached_tokens=cached_tokens,
            speed=speed,
            keeps_promise=load.tbt_target_s is not None,
            takes_prompt=demand.is_retry or self.backlog.takes_more_of(caller_id),
            has_place=self.places.has_place(demand.num_sequences, num_blocks)
            and self._keeps_promise_with(load, demand),
        )

    def _keeps_promise_with(self, load: ReportedLoad, demand: Demand) -> bool:
        """Whether its steps would, with these sequences too; theirs counts if it is stricter."""
        most = self._num_promised
        if demand.tbt_target_s and load.tbt_target_s is not None:
            most = min(most, load.decodes_within(demand.tbt_target_s))
        num_decodes = load.decodes.num_decodes
        return not num_decodes or num_decodes + demand.num_sequences <= most

    @property
    def pool_blocks(self) -> int:
        """Blocks that requests can have."""
        return self.member.num_blocks - _RESERVED_BLOCKS

    @property
    def pool_tokens(self) -> int:
        """Tokens whose KV fits the pool when it is empty."""
        return self.pool_blocks * self.member.block_size


@dataclass(frozen=True, slots=True)
class ChosenEngine:
    """An engine as the request sees it that it was chosen for (engine_link.EngineLink)."""

    engine: LinkedEngine
    cached_tokens: int

    @property
    def incarnation(self) -> str:
        return self.engine.incarnation

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def fingerprint(self) -> str:
        return self.engine.fingerprint

    def dispatch(
        self, request: Request, work: Work, ticket: Ticket | None, deadline_remaining_s: float
    ) -> None:
        self.engine.dispatch(request, work, ticket, deadline_remaining_s, self.cached_tokens)

    def cancel(self, request_id: str, attempt: int) -> None:
        self.engine.cancel(request_id, attempt)


class EngineTable:
    """All linked engines by incarnation; what is mirrored of the prefix index is theirs."""

    def __init__(self, mirror: PrefixMirror) -> None:
        self.engines: dict[str, LinkedEngine] = {}
        self.mirror = mirror
        self.suspects = Suspects()
        self.decisions: Counter[str] = Counter()  # why requests went where they went
        self.released: set[int] = set()  # of all engines: LinkedEngine has what it means

    def add(self, engine: LinkedEngine) -> None:
        """The engine's link is up."""
        engine.released = self.released
        self.engines[engine.incarnation] = engine
        self.mirror.add(engine.incarnation, engine.member.num_blocks)

    def remove(self, incarnation: str) -> None:
        """The engine's link is down."""
        del self.engines[incarnation]
        self.mirror.remove(incarnation)

    def choose(
        self,
        demand: Demand,
        *,
        avoid: Avoid,
        fingerprint: str | None,
        caller_id: int = 0,
        cached_tokens: Mapping[str, int] = _NOTHING_CACHED,
        is_constrained: bool = False,
    ) -> Route:
        """See engine_link.Router. An engine counts from its first heartbeat on; one where a suspect
        is on trial comes after all others.

        `cached_tokens`: by incarnation, what engines are likely to have of the request.
        `is_constrained`: it is for engines alone that take constraints.
        """
        costs = self._costs()
        states = [
            engine.state(
                engine.load,
                demand,
                caller_id,
                cached_tokens.get(engine.incarnation, 0),
                costs.get(engine.fingerprint),
            )
            for engine in self.engines.values()
            if engine.load is not None and (engine.member.can_constrain or not is_constrained)
        ]
        choose = partial(choose_plan, states, demand.num_tokens, fingerprint=fingerprint)
        clear = self.suspects.keep_clear(avoid)
        try:
            prefill, decode = choose(avoid=clear)
        except Unavailable:  # not where it must wait: then it waits for a place beside no suspect
            if clear == avoid:
                raise
            prefill, decode = choose(avoid=avoid)
        return Route(
            ChosenEngine(self.engines[prefill], cached_tokens.get(prefill, 0)),
            ChosenEngine(self.engines[decode], cached_tokens.get(decode, 0)),
        )

    def _costs(self) -> Mapping[str, StepCost]:
        """By fingerprint, the cost that was measured on the largest steps, where some engine is to
        borrow one."""
        loads = [(e.fingerprint, e.load) for e in self.engines.values() if e.load is not None]
        if all(load.max_rows >= _MEASURED_ROWS for _, load in loads):
            return {}
        found: dict[str, StepCost] = {}
        for fingerprint, load in loads:
            cost, best = load.step_cost, found.get(fingerprint)
            if cost is not None and (best is None or cost.max_rows > best.max_rows):
                found[fingerprint] = cost
        return found

    def why_not_ready(self) -> str:
        """What is missing before any request can be served; empty if nothing is."""
        try:
            self.choose(Demand(1), avoid=Avoid(), fingerprint=None)
        except Unavailable as error:
            return error.message
        except MustWait:
            pass  # busy is ready
        return ""

    def lacks_constraints(self) -> Role | None:
        """A role of which engines are linked, and none takes constraints."""
        for role in Role:
            members = [e.member for e in self.engines.values() if e.member.role is role]
            if members and not any(member.can_constrain for member in members):
                return role
        return None

    def predicted_prefill_s(
        self,
        caller_id: int,
        num_tokens: int,
        cached_tokens: Mapping[str, int] = _NOTHING_CACHED,
        held: Mapping[int, int] = _NOTHING_HELD,
    ) -> float:
        """How long until a prompt's first token, at the engine that would have it soonest, if all
        queues are fair between callers. `held`: tokens that wait for a place, by caller.

        0 where nothing is ahead of it, or an engine's cost is not known.
        """
        prefill = [e for e in self.engines.values() if e.takes_prompts and e.is_ready]
        parts = {other: tokens / len(prefill) for other, tokens in held.items()} if prefill else {}
        waits_s = []
        for engine in prefill:
            own = num_tokens - cached_tokens.get(engine.incarnation, 0)
            ahead = engine.backlog.fair_tokens_ahead(caller_id, own, parts)
            speed = engine.backlog.speed
            waits_s.append(speed.seconds_of(ahead + own) if ahead and speed is not None else 0.0)
        return min(waits_s, default=0.0)

    @property
    def places_per_s(self) -> float | None:
        """How many places on decode engines become free; None: not known yet."""
        rates = [engine.places.places_per_s for engine in self.engines.values()]
        known = [rate for rate in rates if rate is not None]
        return sum(known) if known else None

    def limits(self, base: ModelLimits) -> ModelLimits:
        """`base` narrowed to what the linked engines can do."""
        engines = list(self.engines.values())
        prefill = [e for e in engines if e.takes_prompts]
        decode = [e for e in engines if e.member.role is Role.DECODE]
        lens = (e.member.max_model_len for e in engines)
        return ModelLimits(
            model=base.model,
            vocab_size=base.vocab_size,
            max_model_len=min(lens, default=base.max_model_len),
            max_prompt_tokens=max((e.pool_tokens for e in prefill), default=None),
            max_total_tokens=max((e.pool_tokens for e in decode), default=None),
        )
