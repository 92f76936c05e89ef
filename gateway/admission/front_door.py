"""The path of a call behind every front (gRPC, HTTP): admit, validate, route, run, record.

    front ── GenerateRequest, Caller ──► FrontDoor.generate ──► RunningCall ── chunks ──► front
Owns the order of the checks, and the lifetime of a call's sessions and its record. A front only
translates: its wire format to a GenerateRequest, chunks to its stream, errors to its statuses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

from ...core.errors import BatonError, Cancelled, DeadlineExceeded, Unavailable, public_error
from ...core.ports import Clock, Entropy
from ...proto.v1 import inference_pb2
from ..adapters.adapter_registry import AdapterRegistry
from ..engines.engine_table import EngineTable
from ..engines.prompt_router import PromptRouter
from ..request.session_table import SessionTable, sessions_of
from ..request.setbacks import SessionLimits, unfinished_run
from ..security.caller import INFER, Caller
from ..security.tenancy import Tenancy, TenantAdmission
from ..telemetry.call_feed import CallFeed
from ..telemetry.calls.call_record import CallRecord
from ..text.special_tokens import Spans
from ..validation.served_model import ModelLimits, ServedModel
from ..validation.validation import ValidatedRequest, validated
from .loop_pacing import LoopPacing
from .queue_limit import QueueLimit
from .running_call import RunningCall

log = logging.getLogger(__name__)

_NOT_READ = "the client has not read all by the request's deadline"
_LAST_WRITE_S = 0.25  # how long a failed stream may take to deliver its queue


@dataclass(eq=False)
class FrontDoor:
    """The service behind all fronts. `is_draining`: new generations are refused.

    `arrivals` spaces new calls: each waits there before its front parses it, and again before it is
    dispatched. `large_bodies`: held while a large body is parsed. `_ends` spaces the ends of calls,
    which do not wait for new ones.
    """

    model: ServedModel
    sessions: SessionTable
    _table: EngineTable
    tenancy: Tenancy
    _clock: Clock
    _entropy: Entropy
    _session_limits: SessionLimits
    _max_request_s: float
    feed: CallFeed
    _queue_limit: QueueLimit
    adapters: AdapterRegistry
    keeps_prompts: bool = False
    is_draining: bool = False
    arrivals: LoopPacing = field(default_factory=LoopPacing)
    large_bodies: asyncio.Lock = field(default_factory=asyncio.Lock)
    _ends: LoopPacing = field(default_factory=LoopPacing)

    @property
    def limits(self) -> ModelLimits:
        """The model's limits, narrowed to those of the linked engines."""
        return self._table.limits(self.model.limits)

    @property
    def constraint_refusal(self) -> str | None:
        """Why no output can be constrained now, or None."""
        role = self._table.lacks_constraints()
        if role is not None:
            return f"no {role.value} node takes constraints: is the extra `structured` installed?"
        return self.model.constraints.refusal

    @asynccontextmanager
    async def generate(
        self,
        wire: inference_pb2.GenerateRequest,
        caller: Caller,
        *,
        timeout_s: float | None = None,
        traceparent: str = "",
        tracestate: str = "",
        special_at: Spans | None = None,
    ) -> AsyncIterator[RunningCall]:
        """Run a call for the duration of the block; leaving the block cancels what still runs.

        `special_at`: see Tokenizer.encode. Raises subclasses of InvalidRequest, ModelNotFound,
        Overloaded, Unavailable before the block, and in it the error that ended the call, even if a
        write to the client hangs.
        """
        arrived_unix_ns, arrived_s = self._clock.unix_ns(), self._clock.monotonic_s()
        allowed_s = self._max_request_s
        deadline_s = arrived_s + (allowed_s if timeout_s is None else min(timeout_s, allowed_s))
        with ExitStack() as stack:
            try:
                if self.is_draining:
                    raise Unavailable("this gateway is shutting down")
                admission = stack.enter_context(self.admitted(caller))
                # A call whose caller's queue is too long already is not even tokenised.
                self._check_wait(caller, deadline_s - arrived_s)
                request = await self._prepare(wire, caller, admission, special_at)
                router, began_s = PromptRouter(self._table, request), self._clock.monotonic_s()
                await router.hash_prompt()
                lookup_s = self._clock.monotonic_s() - began_s
                await self.arrivals.take(has_begun=True)  # else one long turn would delay streams
                # The queue must be that of the moment when the call starts.
                self._check_wait(caller, deadline_s - self._clock.monotonic_s(), router)
            except BatonError as error:
                self.feed.call_refused(caller, error)
                raise
            record = CallRecord(
                call_id="",
                request=request,
                caller=caller,
                model=request.adapter.name if request.adapter else self.model.limits.model,
                arrived_s=arrived_s,
                arrived_unix_ns=arrived_unix_ns,
                lookup_s=lookup_s,
                traceparent=traceparent,
                tracestate=tracestate,
            )
            if self.keeps_prompts:  # as the client sent it, ids as text
                record.prompt = wire.text or str(request.prompt_token_ids.tolist())
            try:
                async with self._running(record, router, deadline_s) as generation:
                    yield generation
            finally:
                if admission is not None:
                    num_outputs = max(record.num_delivered_tokens, record.num_computed_tokens)
                    admission.used_tokens = record.prompt_tokens + num_outputs

    @contextmanager
    def admitted(self, caller: Caller) -> Iterator[TenantAdmission | None]:
        """Admit a call for the duration of the block, before any of it is parsed. Gives None for a
        caller without a tenant, which has no limits.

        Calls that need no engine are admitted too, else long texts would queue without bound.
        Raises PermissionDenied, RateLimited, Overloaded.
        """
        caller.check_scope(INFER)
        with self.tenancy.admitted(caller) if caller.tenant else nullcontext() as admission:
            self.sessions.admit(caller.caller_id)
            try:
                yield admission
            finally:
                self.sessions.leave(caller.caller_id)

    def _check_wait(
        self, caller: Caller, remaining_s: float, router: PromptRouter | None = None
    ) -> None:
        """Refuse a call that would wait too long, by what is known of it so far: see QueueLimit."""
        must_wait = self.sessions.queue.shares or not self._table.has_idle_engine
        if must_wait or remaining_s <= 0:
            num_tokens = 0 if router is None else len(router.request.prompt_token_ids)
            cached = {} if router is None else router.cached(num_tokens)
            self._queue_limit.check(caller.caller_id, num_tokens, cached, remaining_s)

    def check_model(self, caller: Caller, model: str) -> None:
        """Raises ModelNotFound for a model that is not served, or not to this caller."""
        caller.check_model(model, self.model.limits.model, self.adapters.adapters)

    async def _prepare(
        self,
        wire: inference_pb2.GenerateRequest,
        caller: Caller,
        admission: TenantAdmission | None,
        special_at: Spans | None,
    ) -> ValidatedRequest:
        """Validate the request, charge its tenant, and give it the tenant's part of the cache."""
        self.check_model(caller, wire.model)
        request = await validated(
            wire,
            self.limits,
            self.model.tokenizer,
            drawn_seed=self._entropy.new_seed(),
            adapters=self.adapters.adapters,
            special_at=special_at,
        )
        if (constraint := request.sampling.constraint) is not None:
            await self.model.constraints.check(constraint, self.constraint_refusal)
        if admission is not None:
            num_outputs = max(request.options.n, request.sampling.best_of)
            max_output_tokens = num_outputs * request.sampling.max_tokens
            admission.charge(len(request.prompt_token_ids) + max_output_tokens)
        options = request.options
        if caller.tenant or options.cache_salt:
            salt = self.tenancy.cache_salt(caller, options.cache_salt)
            options = replace(options, cache_salt=salt)
        return replace(request, tenant=caller.tenant, caller_id=caller.caller_id, options=options)

    @asynccontextmanager
    async def _running(
        self, record: CallRecord, router: PromptRouter, deadline_s: float
    ) -> AsyncIterator[RunningCall]:
        """Run the sessions of a valid call, and keep its record."""
        try:
            allowed_s = deadline_s - self._clock.monotonic_s() + _LAST_WRITE_S
            async with asyncio.timeout(allowed_s) as patience:
                # A write to a stuck client never ends: it is abandoned after a failure, and after
                # the deadline, which ended sessions no longer watch.
                def hurry() -> None:
                    if not patience.expired():
                        patience.reschedule(asyncio.get_running_loop().time() + _LAST_WRITE_S)

                call = RunningCall(record, self.feed.chunk_delivered, hurry, self._ends)
                sessions = sessions_of(
                    record.request,
                    self.model.tokenizer,
                    call,
                    self._clock,
                    self._entropy,
                    arrived_unix_ns=record.arrived_unix_ns,
                    deadline_s=deadline_s,
                    router=router,
                    limits=self._session_limits,
                    suspects=self._table.suspects,
                )
                record.call_id = sessions[0].call_id
                self.feed.call_began(record)
                try:
                    for session in reversed(sessions):  # the first one dispatches for all
                        self.sessions.start(session)
                    yield call
                except asyncio.CancelledError:
                    if call.error is None and patience.expired():
                        call.error = DeadlineExceeded(_NOT_READ)
                    elif call.error is None:
                        call.client_left()
                    raise
                finally:
                    call.push = None  # it refers to the call
                    for session in sessions:
                        if not session.is_over:
                            self.sessions.cancel(session, Cancelled("the client went away"))
                    record.num_computed_tokens = sum(session.num_outputs for session in sessions)
                    if len(record.results) < record.request.options.n:
                        record.unfinished_run = unfinished_run(sessions[0])
                        record.error = error = call.error or Cancelled("the client went away")
                        if public_error(error) is not error:  # the client is not sent its text
                            log.warning("call %s: %s: %s", record.call_id, error.code, error)
                    self.feed.call_ended(record)
        except TimeoutError:
            raise public_error(call.error or DeadlineExceeded(_NOT_READ)) from None
