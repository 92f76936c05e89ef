"""Calls on an engine in this process: the request handling of a gateway, without a network.

    GenerateRequest ─► prepare: checked, tokenised ─► running: sessions ─► engine ─┐
                         chunks ◄─ text, stop strings ◄─ sessions ◄─ step's tokens ┘
The engine's steps run on the same event loop as everything else; other tasks run between two
steps. Knows neither users' types nor files.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from ..core.config import GatewayConfig
from ..core.engine_config import EngineConfig
from ..core.errors import BatonError, Cancelled, EngineFailed, InvalidRequest, StartupFailed
from ..core.ports import Clock, Entropy
from ..core.process.collector import settle
from ..core.request.request import Request, Ticket, TokenLogprobs
from ..engine.local import LocalEngine
from ..engine.scheduling.outputs import FinishedBeam, StepOutput, TokenOutput
from ..gateway.admission.loop_pacing import LoopPacing
from ..gateway.request.engine_link import Avoid, Demand, EngineOutput, Route
from ..gateway.request.output_chunk import OutputChunk, merged
from ..gateway.request.session import Session
from ..gateway.request.session_table import sessions_of
from ..gateway.request.setbacks import SessionLimits
from ..gateway.security.caller import INFER, Caller
from ..gateway.telemetry.calls.call_record import CallRecord
from ..gateway.text.special_tokens import Spans
from ..gateway.validation.served_model import ModelLimits, ServedModel
from ..gateway.validation.validation import ValidatedRequest, validated
from ..proto.v1 import inference_pb2

log = logging.getLogger(__name__)

_LIMITS = SessionLimits(max_attempts=1)  # there is no other engine to try
_NAME = "local"
_OURS = Caller("", frozenset({INFER}), "offline")
_LOOK_S = 0.0004  # poll interval for a completed step, while the next one runs


# Tokens of a sample that are passed to its session together: none is read before the sample ends.
# Samples have different `turn`s, so that not all are processed after the same step.
_TOGETHER = 64


@dataclass(slots=True)
class _Sample:
    """A session, and the tokens that have not been passed to it yet."""

    session: Session
    turn: int  # tokens are passed at positions equal to it modulo _TOGETHER
    has_scores: bool
    may_wait: bool  # not with scores, which are passed per token, nor with stops
    token_ids: list[int] = field(default_factory=list)


def _look() -> bool:
    """Called while a step runs on the device: copies to host memory proceed between two calls."""
    time.sleep(_LOOK_S)
    return False


class LocalCall:
    """A running call: collects the outputs of its samples. `chunks` may be iterated once."""

    def __init__(self, record: CallRecord) -> None:
        self.record = record
        self._parts: list[list[OutputChunk]] = [[] for _ in range(record.request.options.n)]
        self._ended: asyncio.Queue[OutputChunk | BatonError] = asyncio.Queue()

    def emit(self, chunk: OutputChunk) -> bool:
        """See ChunkSink."""
        parts = self._parts[chunk.sample_index]
        parts.append(chunk)
        if chunk.result is not None:
            self._ended.put_nowait(merged(parts))
        return True

    def fail(self, error: BatonError) -> None:
        self._ended.put_nowait(error)

    async def chunks(self) -> AsyncIterator[OutputChunk]:
        """One chunk per sample with its whole output, in order of completion. Raises the first
        error."""
        for _ in self._parts:
            if isinstance(found := await self._ended.get(), BatonError):
                raise found
            yield found


class LocalCalls:
    """Use from the event loop on which `begin` is called."""

    reported_s = math.inf  # the engine is in this process

    def __init__(self, local: LocalEngine, model: ServedModel) -> None:
        self.model = model
        self._local = local
        self._clock, self._entropy = Clock(), Entropy()
        self._samples: dict[str, _Sample] = {}
        self._turn = 0  # of the newest sample
        self._refused: list[EngineOutput] = []
        self._has_news = asyncio.Event()
        self._broken: BatonError | None = None
        self._stepping: asyncio.Task[None] | None = None
        self._unsettle: Callable[[], object] = lambda: None
        self.arrivals, self.large_bodies = LoopPacing(), asyncio.Lock()
        engine_limits = local.engine.limits
        num_pool_tokens = engine_limits.capacity * engine_limits.block_size
        self.limits: ModelLimits = dataclasses.replace(
            model.limits,
            max_model_len=engine_limits.max_model_len,
            max_prompt_tokens=num_pool_tokens,
            max_total_tokens=num_pool_tokens,
        )

    @classmethod
    def load(
        cls, engine: EngineConfig, front: GatewayConfig, report: Callable[[str], None]
    ) -> LocalCalls:
        """Load the tokenizer, and the model on all ranks; raises StartupFailed."""
        if engine.tbt_target_ms is not None:
            raise StartupFailed("tbt_target_ms has no effect without a server")
        model = ServedModel.load(front)
        try:
            return cls(LocalEngine.load(engine, report), model)
        except BaseException:
            model.close()
            raise

    def begin(self) -> None:
        """Start running steps, until `stop`."""
        self._unsettle = settle(keeps_all=False)  # the heap also has the caller's objects
        self._stepping = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop running steps."""
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.wait([self._stepping])

    def close(self) -> None:
        """End the other ranks and release all memory, after `stop`: no step may run any more."""
        self._unsettle()
        self._local.close()
        self.model.close()

    async def prepare(
        self, wire: inference_pb2.GenerateRequest, special_at: Spans | None = None
    ) -> ValidatedRequest:
        """Check and tokenise; `special_at`: see Tokenizer.encode. Raises ModelNotFound,
        InvalidRequest kin."""
        _OURS.check_model(wire.model, self.model.limits.model)
        request = await validated(
            wire,
            self.limits,
            self.model.tokenizer,
            drawn_seed=self._entropy.new_seed(),
            special_at=special_at,
        )
        if (form := request.sampling.constraint) is not None:
            await self.model.constraints.check(form)
        return request

    @contextmanager
    def running(self, request: ValidatedRequest, caller: Caller = _OURS) -> Iterator[LocalCall]:
        """Run a request on the engine; cancelled when the block ends. Raises EngineFailed if the
        engine has failed."""
        if self._broken is not None:
            raise self._broken
        record = CallRecord(
            call_id="",
            request=request,
            caller=caller,
            model=self.model.limits.model,
            arrived_s=self._clock.monotonic_s(),
            arrived_unix_ns=self._clock.unix_ns(),
        )
        call = LocalCall(record)
        sessions = self._make_sessions(call)
        record.call_id = sessions[0].call_id
        try:
            sessions[0].try_dispatch()  # for all samples
            self._has_news.set()
            yield call
        finally:
            for session in sessions:
                session.cancel(Cancelled("the call was abandoned"))
                self._samples.pop(session.request_id, None)

    def _make_sessions(self, call: LocalCall) -> list[Session]:
        sessions = sessions_of(
            call.record.request,
            self.model.tokenizer,
            call,
            self._clock,
            self._entropy,
            arrived_unix_ns=call.record.arrived_unix_ns,
            deadline_s=math.inf,
            router=self,
            limits=_LIMITS,
        )
        for session in sessions:
            self._turn = (self._turn + 1) % _TOGETHER
            has_scores = session.request.sampling.logprobs is not None
            may_wait = not (has_scores or session.request.sampling.stop)
            self._samples[session.request_id] = _Sample(session, self._turn, has_scores, may_wait)
        return sessions

    # --- the part of FrontDoor that generating endpoints use --------------------------------------

    is_draining = False

    @property
    def constraint_refusal(self) -> str | None:
        """Why no output can be constrained, or None."""
        return self.model.constraints.refusal

    @asynccontextmanager
    async def generate(
        self,
        wire: inference_pb2.GenerateRequest,
        caller: Caller,
        *,
        special_at: Spans | None = None,
        **traces: str,
    ) -> AsyncIterator[LocalCall]:
        """Prepare and run a request. Raises InvalidRequest kin, EngineFailed."""
        with self.running(await self.prepare(wire, special_at), caller) as call:
            yield call

    # --- the engine, as sessions use it -----------------------------------------------------------

    incarnation = name = fingerprint = _NAME

    def choose(self, demand: Demand, *, avoid: Avoid, fingerprint: str | None) -> Route:
        """A route to the one engine, for prefill and decode."""
        return Route(self, self)

    def dispatch(
        self, request: Request, route: Route, ticket: Ticket | None, deadline_remaining_s: float
    ) -> None:
        try:
            self._local.engine.add(request)
        except InvalidRequest as error:
            outputs = (request, *request.forks)
            self._refused += [EngineOutput(r.request_id, r.attempt, error=error) for r in outputs]

    def cancel(self, request_id: str, attempt: int) -> None:
        self._local.engine.abort(f"{request_id}/{attempt}")

    # --- steps ------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Run steps while there is work, until cancelled. A failed step ends all calls."""
        engine = self._local.engine
        try:
            while True:
                refused, self._refused = self._refused, []
                for output in refused:
                    self._take(output)
                if engine.has_work:
                    self._deliver(engine.step(_look))
                    await asyncio.sleep(0)
                else:
                    self._has_news.clear()
                    await self._has_news.wait()
        except Exception as error:  # no call would ever complete without this loop
            log.exception("the engine failed")
            self._broken = error if isinstance(error, BatonError) else EngineFailed(str(error))
            for sample in [*self._samples.values()]:
                sample.session.cancel(self._broken)

    def _deliver(self, step: StepOutput) -> None:
        for key, num_cached in step.started.items():
            self._take(_output(key, cached_tokens=num_cached))
        for scores in step.prompt_logprobs:
            self._take(
                _output(
                    scores.key,
                    first_prompt_index=scores.first_index,
                    prompt_logprobs=scores.logprobs,
                )
            )
        for token in step.tokens:
            self._take_token(token)
        for beam in step.beams:
            self._take_beam(beam)
        for key, error in step.failed:
            self._take(_output(key, error=error))

    def _take_token(self, token: TokenOutput) -> None:
        key, index, token_id, logprob, finish_reason, top = token
        request_id, _, attempt = key.partition("/")
        sample = self._samples.get(request_id)
        if sample is None:
            return
        sample.token_ids.append(token_id)
        if finish_reason is None and sample.may_wait and index % _TOGETHER != sample.turn:
            return
        token_ids, sample.token_ids = tuple(sample.token_ids), []
        self._take(
            EngineOutput(
                request_id,
                int(attempt),
                index + 1 - len(token_ids),
                token_ids,
                finish_reason,
                logprobs=(TokenLogprobs(logprob, top),) if sample.has_scores else (),
            )
        )

    def _take_beam(self, beam: FinishedBeam) -> None:
        sample = self._samples.get(beam.key.partition("/")[0])
        has_scores = sample is not None and sample.has_scores
        self._take(
            _output(
                beam.key,
                token_ids=beam.token_ids,
                finish_reason=beam.finish_reason,
                logprobs=beam.logprobs if has_scores else (),
            )
        )

    def _take(self, output: EngineOutput) -> None:
        sample = self._samples.get(output.request_id)
        if sample is not None:
            sample.session.engine_output(_NAME, output)
            if sample.session.is_over:
                del self._samples[output.request_id]


def _output(key: str, **fields: object) -> EngineOutput:
    request_id, _, attempt = key.partition("/")
    return EngineOutput(request_id, int(attempt), **fields)  # type: ignore[arg-type]
