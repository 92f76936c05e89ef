"""What the gateway knows of every linked engine: its welcome, last heartbeat and own dispatches.

Owns the account of requests that were dispatched and not yet answered, which routing adds to the
heartbeat's load. Knows no grpc and no directory: cluster_view.py tells it what happens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from ..core.membership import Member, Role
from ..core.request import Request, Ticket
from .engine_link import Avoid, EngineOutput, Route, Work
from .routing import EngineState, choose_pair
from .validation import ModelLimits

_RESERVED_BLOCKS = 2  # padding and canary


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


class Outbox(Protocol):
    """Where an engine's messages go; never blocks."""

    def dispatch(
        self, request: Request, work: Work, ticket: Ticket, deadline_remaining_s: float
    ) -> None: ...

    def cancel(self, request_id: str, attempt: int) -> None: ...


@dataclass(slots=True)
class LinkedEngine:
    """One engine behind a live link; what sessions see of it (engine_link.EngineLink)."""

    member: Member
    outbox: Outbox
    load: Load | None = None
    num_dispatched: int = 0
    _unanswered: dict[tuple[str, int], int] = field(default_factory=dict)  # -> prompt tokens

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

    def dispatch(
        self, request: Request, work: Work, ticket: Ticket, deadline_remaining_s: float
    ) -> None:
        self.num_dispatched += 1
        self._unanswered[request.request_id, request.attempt] = request.num_known_tokens
        self.outbox.dispatch(request, work, ticket, deadline_remaining_s)

    def cancel(self, request_id: str, attempt: int) -> None:
        self._unanswered.pop((request_id, attempt), None)
        self.outbox.cancel(request_id, attempt)

    def settle(self, outputs: Iterable[EngineOutput]) -> None:
        """Requests that these outputs answer are in the engine's own count now, or over."""
        for output in outputs:
            if output.token_ids or output.finish_reason is not None or output.error is not None:
                self._unanswered.pop((output.request_id, output.attempt), None)

    def state(self, load: Load) -> EngineState:
        return EngineState(
            incarnation=self.member.incarnation,
            role=self.member.role,
            fingerprint=self.member.fingerprint,
            block_size=self.member.block_size,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            waiting_tokens=load.waiting_tokens,
            free_blocks=load.free_blocks,
            credit_blocks=load.credit_blocks,
            is_draining=load.is_draining,
            links=load.links,
            in_flight_tokens=sum(self._unanswered.values()),
            num_in_flight=len(self._unanswered),
            num_dispatched=self.num_dispatched,
        )

    @property
    def pool_tokens(self) -> int:
        """Tokens whose KV fits the pool when it is empty."""
        return (self.member.num_blocks - _RESERVED_BLOCKS) * self.member.block_size


class EngineTable:
    """All linked engines by incarnation; the `Router` of the sessions."""

    def __init__(self) -> None:
        self.engines: dict[str, LinkedEngine] = {}

    def choose(self, num_tokens: int, *, avoid: Avoid, fingerprint: str | None) -> Route:
        """See engine_link.Router. An engine counts from its first heartbeat on."""
        states = [e.state(e.load) for e in self.engines.values() if e.load is not None]
        prefill, decode = choose_pair(states, num_tokens, avoid=avoid, fingerprint=fingerprint)
        return Route(self.engines[prefill], self.engines[decode])

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
