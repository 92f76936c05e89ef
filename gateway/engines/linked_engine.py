"""One linked engine: its last heartbeat, and the requests that this gateway has dispatched to it.

Owns the account of these (engine_account.py). Knows no other engine, no grpc and no directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...core.membership import Member, Role
from ...core.ports import Clock
from ...core.request.request import PrefixSource, Request, Ticket
from ...core.request.token_ids import salted
from ...proto.v1 import node_pb2
from ..request.engine_link import EngineOutput, PlainToken, Route
from ..request.session_table import SessionTable
from .engine_account import EngineAccount
from .engine_connection import EngineConnection
from .reported_load import MANY_DECODES, ReportedLoad

_RESERVED_BLOCKS = 2  # padding and canary
MEASURED_ROWS = 256  # the step cost covers prompts once a step had so many rows


@dataclass(slots=True)
class LinkedEngine:
    """Implements `engine_link.EngineLink` for one engine. `welcome`: its settings, and the TBT
    promise that it was started with, if any; `sessions`: the gateway's, which get its outputs."""

    member: Member
    outbox: EngineConnection
    load: ReportedLoad
    welcome: node_pb2.Welcome = field(default_factory=node_pb2.Welcome)
    clock: Clock = field(default_factory=Clock)
    sessions: SessionTable | None = None
    account: EngineAccount = field(init=False)
    incarnation: str = field(init=False)
    name: str = field(init=False)
    fingerprint: str = field(init=False)
    # From the last heartbeat, as `load`.
    reported_s: float = field(init=False)  # when it came
    is_measured: bool = field(init=False)  # whether its step cost covers prompts
    most_decodes: int = field(init=False)  # that a step may have and keep the promise
    reported_state: tuple[object, ...] = field(init=False)  # the first fields of its EngineState

    def __post_init__(self) -> None:
        self.account = EngineAccount(self.clock, self.welcome.max_num_seqs)
        self.incarnation, self.name = self.member.incarnation, self.member.name
        self.fingerprint = self.member.fingerprint
        self.receive_heartbeat(self.load)

    @property
    def takes_prompts(self) -> bool:
        """Whether it computes prompts: for decode engines, or for its own decodes."""
        return self.load.takes_whole or self.member.role is Role.PREFILL

    @property
    def is_ready(self) -> bool:
        return not self.load.is_draining

    def receive_heartbeat(self, load: ReportedLoad) -> None:
        """Take over a heartbeat, and reconcile the account with it."""
        self.load, self.reported_s = load, self.clock.monotonic_s()
        self.is_measured = load.max_rows >= MEASURED_ROWS
        self.account.heartbeat(load)
        target_s, member = load.tbt_target_s, self.member
        self.most_decodes = MANY_DECODES if target_s is None else load.decodes_within(target_s)
        self.reported_state = (
            *(self.incarnation, member.role, self.fingerprint, member.block_size),
            *(load.free_blocks, load.credit_blocks, load.is_draining),
            *(load.links, load.link_gbytes_per_s, load.takes_whole),
        )

    def dispatch(
        self, request: Request, route: Route, ticket: Ticket | None, deadline_remaining_s: float
    ) -> None:
        """See EngineLink. Only the prefill engine of the route gets its fetch."""
        num_tokens, caller_id = request.num_known_tokens, request.caller_id
        token_ids, size = request.prompt_token_ids, self.member.block_size
        keys = [(name, request.attempt) for name in (request.request_id, *request.fork_ids)]
        if route.prefill is self:
            found_tokens = route.cached_tokens[0]
            if (fetch := route.fetch) is not None:
                found_tokens = fetch.num_tokens
                source = PrefixSource(fetch.source, found_tokens // size, fetch.limit_s)
                request = replace(request, prefix_source=source)
            in_flight = None
            if len(token_ids) >= size:  # else it is in no cache
                salt = salted(request.cache_salt, request.adapter_digest)
                in_flight = self.account.prompts.sent(
                    self.incarnation, self.fingerprint, salt, token_ids, size
                )
            self.account.sent_prompt(keys, caller_id, num_tokens, found_tokens, in_flight)
        if route.decode is self:
            num_left = request.sampling.max_tokens - len(request.output_token_ids)
            num_new = num_tokens - route.cached_tokens[1]
            num_blocks = self.blocks_for(num_new, num_left, request.num_sequences)
            self.account.sent_decodes(keys, caller_id, num_blocks)
        self.outbox.dispatch(request, ticket, deadline_remaining_s)

    def cancel(self, request_id: str, attempt: int) -> None:
        self.account.ended((request_id, attempt))
        self.outbox.cancel(request_id, attempt)

    def receive(self, outputs: Sequence[EngineOutput], tokens: Sequence[PlainToken] = ()) -> None:
        """Pass a step's outputs to their sessions, after the account has settled what they end."""
        self.account.settle(outputs)
        if self.sessions is not None:
            self.sessions.engine_step(self.incarnation, outputs, tokens)

    def blocks_for(self, num_tokens: int, max_output_tokens: int, num_sequences: int) -> int:
        """KV blocks for `num_sequences` samples of one prompt, with the expected growth of each."""
        size, num_growth = self.member.block_size, max_output_tokens
        if 0 < self.load.output_tokens < num_growth:
            num_growth = self.load.output_tokens
        return -(-num_tokens // size) + num_sequences * -(-(num_growth + 1) // size)

    @property
    def pool_blocks(self) -> int:
        """Blocks that requests can use."""
        return self.member.num_blocks - _RESERVED_BLOCKS

    @property
    def pool_tokens(self) -> int:
        """Tokens whose KV fits an empty pool."""
        return self.pool_blocks * self.member.block_size
