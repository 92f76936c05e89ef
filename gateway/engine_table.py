"""What the gateway knows of every linked engine: its welcome, last heartbeat and own dispatches.

Owns the account of requests that were dispatched and not yet answered, which routing adds to the
heartbeat's load, and of how often the prefix index was right. Knows no grpc and no directory:
cluster_view.py tells it what happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Protocol

from ..core.errors import Unavailable
from ..core.membership import Member, Role
from ..core.ports import Clock, SystemClock
from ..core.request import Request, Ticket
from ..prefix_index.mirror import PrefixMirror
from .engine_link import Avoid, EngineOutput, PlainToken, Route, Work
from .prefill_speed import PrefillSpeed
from .routing import EngineState, choose_pair
from .suspects import Suspects
from .validation import ModelLimits

_RESERVED_BLOCKS = 2  # padding and canary
_NOTHING_CACHED: Mapping[str, int] = MappingProxyType({})


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
class Load:
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


class Outbox(Protocol):
    """Where an engine's messages go; never blocks."""

    def dispatch(
        self, request: Request, work: Work, ticket: Ticket, deadline_remaining_s: float
    ) -> None: ...

    def cancel(self, request_id: str, attempt: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Dispatched:
    """What we expect of a dispatch: tokens to compute, and tokens that are there already."""

    uncached_tokens: int
    cached_tokens: int
    at_s: float


@dataclass(slots=True)
class LinkedEngine:
    """One engine behind a live link.

    `num_index_hits`: dispatches for which the index promised cached tokens; `num_stale_hits`: those
    of them that found fewer.
    """

    member: Member
    outbox: Outbox
    load: Load | None = None
    num_dispatched: int = 0
    num_index_hits: int = 0
    num_stale_hits: int = 0
    clock: Clock = field(default_factory=SystemClock)
    speed: PrefillSpeed = field(default_factory=PrefillSpeed)
    _step_began_s: float = 0.0  # by heartbeat
    _answered_s: float = 0.0  # when a first token of ours came
    _unanswered: dict[tuple[str, int], _Dispatched] = field(default_factory=dict)

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
    def is_ready(self) -> bool:
        return self.load is not None and not self.load.is_draining

    def heard(self, load: Load) -> None:
        """A heartbeat."""
        before = self.load
        is_on_same_step = (
            before is not None
            and before.num_steps == load.num_steps
            and 0 < before.waiting_tokens <= load.waiting_tokens
        )
        if not is_on_same_step:
            self._step_began_s = self.clock.monotonic_s()
        self.load = load

    def dispatch(
        self,
        request: Request,
        work: Work,
        ticket: Ticket,
        deadline_remaining_s: float,
        cached_tokens: int = 0,
    ) -> None:
        """`cached_tokens`: what the index promises of the request here."""
        self.num_dispatched += 1
        uncached_tokens = request.num_known_tokens - cached_tokens
        now_s = self.clock.monotonic_s()
        dispatched = _Dispatched(uncached_tokens, cached_tokens, now_s)
        if work is Work.PREFILL:
            num_tokens = self.tokens_ahead + uncached_tokens
            self.speed.began((request.request_id, request.attempt), num_tokens, now_s)
        self._unanswered[request.request_id, request.attempt] = dispatched
        self.outbox.dispatch(request, work, ticket, deadline_remaining_s)

    def cancel(self, request_id: str, attempt: int) -> None:
        self._unanswered.pop((request_id, attempt), None)
        self.speed.forget((request_id, attempt))
        self.outbox.cancel(request_id, attempt)

    def settle(self, outputs: Iterable[EngineOutput], tokens: Iterable[PlainToken] = ()) -> None:
        """Requests that these outputs answer are in the engine's own count now, or over."""
        unanswered = self._unanswered
        if not unanswered:
            return
        for request_id, attempt, *_ in tokens:
            if (request_id, attempt) in unanswered:
                del unanswered[request_id, attempt]
                self._answered((request_id, attempt))
        for output in outputs:
            if output.cached_tokens is not None:
                self._compare(output, output.cached_tokens)
            if output.token_ids or output.finish_reason is not None or output.error is not None:
                key = (output.request_id, output.attempt)
                if unanswered.pop(key, None) is None:
                    continue  # a later token
                if output.token_ids:
                    self._answered(key)
                else:
                    self.speed.forget(key)

    def _answered(self, key: tuple[str, int]) -> None:
        """Its first token is here."""
        self._answered_s = self.clock.monotonic_s()
        self.speed.ended(key, self._answered_s)

    def _compare(self, output: EngineOutput, cached_tokens: int) -> None:
        """Count how the index did: a prefill says what it really found."""
        dispatched = self._unanswered.get((output.request_id, output.attempt))
        if dispatched is not None and dispatched.cached_tokens:
            self.num_index_hits += 1
            self.num_stale_hits += cached_tokens < dispatched.cached_tokens

    @property
    def tokens_ahead(self) -> int:
        """Prompt tokens that a new request would wait for: all gateways' by the last heartbeat, or
        ours, whichever is more, less what has been computed since the step on the device began. Two
        engines that compute a prompt each are not equals: one of them is done sooner."""
        reported = self.load.waiting_tokens if self.load is not None else 0
        if reported:
            reported -= self._computed_since(self._step_began_s)
        if not self._unanswered:
            return max(0, reported)
        ours = sum(d.uncached_tokens for d in self._unanswered.values())
        first = next(iter(self._unanswered.values()))
        computed = self._computed_since(max(first.at_s, self._answered_s))
        return max(reported, ours - min(first.uncached_tokens, computed))

    def _computed_since(self, begin_s: float) -> int:
        """Tokens, at the speed that we know of."""
        return int((self.speed.tokens_per_s or 0.0) * (self.clock.monotonic_s() - begin_s))

    def state(self, load: Load, cached_tokens: int = 0) -> EngineState:
        return EngineState(
            incarnation=self.member.incarnation,
            role=self.member.role,
            fingerprint=self.member.fingerprint,
            block_size=self.member.block_size,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            waiting_tokens=self.tokens_ahead,
            free_blocks=load.free_blocks,
            credit_blocks=load.credit_blocks,
            is_draining=load.is_draining,
            links=load.links,
            link_gbytes_per_s=load.link_gbytes_per_s,
            num_in_flight=len(self._unanswered),
            num_dispatched=self.num_dispatched,
            cached_tokens=cached_tokens,
        )

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
        self, request: Request, work: Work, ticket: Ticket, deadline_remaining_s: float
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

    def add(self, engine: LinkedEngine) -> None:
        """The engine's link is up."""
        self.engines[engine.incarnation] = engine
        self.mirror.add(engine.incarnation, engine.member.num_blocks)

    def remove(self, incarnation: str) -> None:
        """The engine's link is down."""
        del self.engines[incarnation]
        self.mirror.remove(incarnation)

    def choose(
        self,
        num_tokens: int,
        *,
        avoid: Avoid,
        fingerprint: str | None,
        cached_tokens: Mapping[str, int] = _NOTHING_CACHED,
        is_constrained: bool = False,
    ) -> Route:
        """See engine_link.Router. An engine counts from its first heartbeat on; one where a suspect
        is on trial comes after all others.

        `cached_tokens`: by incarnation, what engines are likely to have of the request.
        `is_constrained`: it is for engines alone that take constraints.
        """
        states = [
            engine.state(engine.load, cached_tokens.get(engine.incarnation, 0))
            for engine in self.engines.values()
            if engine.load is not None and (engine.member.can_constrain or not is_constrained)
        ]
        choose = partial(choose_pair, states, num_tokens, fingerprint=fingerprint)
        clear = self.suspects.keep_clear(avoid)
        try:
            prefill, decode = choose(avoid=clear)
        except Unavailable:
            if clear == avoid:
                raise
            prefill, decode = choose(avoid=avoid)
        return Route(
            ChosenEngine(self.engines[prefill], cached_tokens.get(prefill, 0)),
            ChosenEngine(self.engines[decode], cached_tokens.get(decode, 0)),
        )

    def why_not_ready(self) -> str:
        """What is missing before any request can be served; empty if nothing is."""
        try:
            self.choose(1, avoid=Avoid(), fingerprint=None)
        except Unavailable as error:
            return error.message
        return ""

    def lacks_constraints(self) -> Role | None:
        """A role of which engines are linked, and none takes constraints."""
        for role in Role:
            members = [e.member for e in self.engines.values() if e.member.role is role]
            if members and not any(member.can_constrain for member in members):
                return role
        return None

    def predicted_prefill_s(self, num_tokens: int, cached_tokens: Mapping[str, int]) -> float:
        """How long until a prompt's first token, at the engine that would have it soonest.

        0 where nothing is ahead of it, or nothing is known of an engine's speed.
        """
        waits_s = []
        for engine in self.engines.values():
            if engine.member.role is not Role.PREFILL or not engine.is_ready:
                continue
            ahead, speed = engine.tokens_ahead, engine.speed.tokens_per_s
            own = num_tokens - cached_tokens.get(engine.incarnation, 0)
            waits_s.append((ahead + own) / speed if ahead and speed else 0.0)
        return min(waits_s, default=0.0)

    def limits(self, base: ModelLimits) -> ModelLimits:
        """`base` narrowed to what the linked engines can do."""
        engines = list(self.engines.values())
        by_role = {role: [e for e in engines if e.member.role is role] for role in Role}
        prefill, decode = by_role[Role.PREFILL], by_role[Role.DECODE]
        lens = (e.member.max_model_len for e in engines)
        return ModelLimits(
            model=base.model,
            vocab_size=base.vocab_size,
            max_model_len=min(lens, default=base.max_model_len),
            max_prompt_tokens=max((e.pool_tokens for e in prefill), default=None),
            max_total_tokens=max((e.pool_tokens for e in decode), default=None),
        )
