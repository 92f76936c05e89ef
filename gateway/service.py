"""The public gRPC service: from a client's call to a session, and back to its stream.

Owns validation order, deadlines, cancellation and the translation of errors to gRPC statuses.
Decides nothing about engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import grpc

from ..core.errors import BatonError, Cancelled, Unavailable
from ..core.membership import Member
from ..core.ports import Clock, Entropy
from ..core.timeline import Event, Stamp
from ..proto.v1 import inference_pb2, inference_pb2_grpc
from .chunk_queue import ChunkQueue
from .cluster_view import ClusterView
from .engine_table import EngineTable
from .prompt_router import PromptRouter, route_prompt
from .sampling_validation import check_token_ids
from .served_model import ServedModel
from .session import GATEWAY, Session, SessionLimits
from .sessions import SessionTable
from .text_stream import TextStream
from .validation import (
    ValidatedRequest,
    check_model,
    check_request,
    complete_request,
)
from .wire import chunk_to_wire

log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]
_LAST_WRITE_S = 0.25  # how long a failed stream may take to deliver what waits

ERROR_CODE = "baton-error-code"
ERROR_PARAM = "baton-error-param"


@asynccontextmanager
async def _answering(context: _Context) -> AsyncIterator[None]:
    """End the call with a typed error's status; no trace or path of ours reaches the caller."""
    try:
        yield
    except BatonError as error:
        await _abort(context, error)
    except Exception:
        log.exception("a call failed by a bug")
        await _abort(context, BatonError("internal error"))


async def _abort(context: _Context, error: BatonError) -> None:
    metadata = [(ERROR_CODE, error.code)]
    if error.param:
        metadata.append((ERROR_PARAM, error.param))
    status = grpc.StatusCode[error.grpc_status]
    await context.abort(status, error.message, tuple(metadata))


def _ascii(name: str) -> str:
    """A node's name as gRPC metadata can carry it."""
    return name.encode("ascii", "replace").decode()


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """baton.v1.Inference. `is_draining`: set it, and new generations are refused."""

    def __init__(
        self,
        model: ServedModel,
        sessions: SessionTable,
        table: EngineTable,
        view: ClusterView,
        clock: Clock,
        entropy: Entropy,
        session_limits: SessionLimits,
        max_request_s: float,
    ) -> None:
        self.is_draining = False
        self._model = model
        self._sessions = sessions
        self._table = table
        self._view = view
        self._clock = clock
        self._entropy = entropy
        self._session_limits = session_limits
        self._max_request_s = max_request_s

    async def Generate(self, wire: inference_pb2.GenerateRequest, context: _Context) -> None:
        async with _answering(context):
            arrived = Stamp(Event.ARRIVED, self._clock.unix_ns(), GATEWAY)
            deadline_s = self._deadline_s(context)
            if self.is_draining:
                raise Unavailable("this gateway is shutting down")
            self._sessions.admit()
            try:
                request = await self._prepare(wire)
                await self._generate(request, context, arrived, deadline_s)
            finally:
                self._sessions.leave()

    async def Abort(
        self, wire: inference_pb2.AbortRequest, context: _Context
    ) -> inference_pb2.AbortResponse:
        return inference_pb2.AbortResponse(num_aborted=self._sessions.abort(wire.ids))

    async def GetModelInfo(
        self, wire: inference_pb2.GetModelInfoRequest, context: _Context
    ) -> inference_pb2.ModelInfo:
        limits = self._table.limits(self._model.limits)
        members = sorted(self._view.members(), key=lambda m: (m.role.value, m.name, m.incarnation))
        return inference_pb2.ModelInfo(
            model=limits.model,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            eos_token_ids=self._model.eos_token_ids,
            nodes=[self._node_info(member) for member in members],
            version=_version(),
        )

    async def Tokenize(
        self, wire: inference_pb2.TokenizeRequest, context: _Context
    ) -> inference_pb2.TokenizeResponse:
        async with _answering(context):
            check_model(wire.model, self._model.limits)
            ids = await self._model.tokenizer.encode(wire.text)
        return inference_pb2.TokenizeResponse(ids=ids)

    async def Detokenize(
        self, wire: inference_pb2.DetokenizeRequest, context: _Context
    ) -> inference_pb2.DetokenizeResponse:
        async with _answering(context):
            check_model(wire.model, self._model.limits)
            check_token_ids(wire.ids, self._model.limits.vocab_size, "ids")
            text = await self._model.tokenizer.decode(wire.ids)
        return inference_pb2.DetokenizeResponse(text=text)

    def _node_info(self, member: Member) -> inference_pb2.NodeInfo:
        engine = self._table.engines.get(member.incarnation)
        return inference_pb2.NodeInfo(
            name=member.name,
            role=member.role.value,
            incarnation=member.incarnation,
            is_ready=engine is not None and engine.is_ready,
            num_blocks=member.num_blocks,
            block_size=member.block_size,
            links=() if engine is None or engine.load is None else sorted(engine.load.links),
        )

    def _deadline_s(self, context: _Context) -> float:
        """The client's deadline, or ours if it has none or a later one."""
        remaining_s = context.time_remaining()
        allowed_s = self._max_request_s
        return self._clock.monotonic_s() + (
            allowed_s if remaining_s is None else min(remaining_s, allowed_s)
        )

    async def _prepare(self, wire: inference_pb2.GenerateRequest) -> ValidatedRequest:
        limits = self._table.limits(self._model.limits)
        draft = check_request(wire, limits)
        prompt = draft.prompt
        if isinstance(prompt, str):
            prompt = await self._model.tokenizer.encode(prompt)
        return complete_request(draft, prompt, limits, drawn_seed=self._entropy.new_seed())

    async def _generate(
        self, request: ValidatedRequest, context: _Context, arrived: Stamp, deadline_s: float
    ) -> None:
        """Run a session and stream what it brings; whatever ends this call ends the session."""
        router = await route_prompt(self._table, request.prompt_token_ids)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as patience:
                # The write of a stuck reader never ends: after a failure it is left behind.
                queue = ChunkQueue(lambda: patience.reschedule(loop.time() + _LAST_WRITE_S))
                sessions = self._make_sessions(request, router, queue, arrived, deadline_s)
                try:
                    for session in reversed(sessions):  # the first dispatches for all
                        self._sessions.start(session)
                    await _stream(context, sessions[0].call_id, queue, len(sessions))
                finally:
                    for session in sessions:
                        self._sessions.cancel(session, Cancelled("the client went away"))
        except TimeoutError:
            raise queue.error or Cancelled("the stream was ended") from None

    def _make_sessions(
        self,
        request: ValidatedRequest,
        router: PromptRouter,
        queue: ChunkQueue,
        arrived: Stamp,
        deadline_s: float,
    ) -> list[Session]:
        """One for each sample; the first leads the others."""

        def session(sample_index: int, siblings: Sequence[Session] = ()) -> Session:
            detokenizer = self._model.tokenizer.detokenizer(request.prompt_token_ids)
            sampling = request.sampling
            return Session(
                self._entropy.new_id(),
                request,
                deadline_s=deadline_s,
                arrived=arrived,
                text=TextStream(detokenizer, sampling.stop, min_tokens=sampling.min_tokens),
                sink=queue,
                router=router,
                clock=self._clock,
                entropy=self._entropy,
                limits=self._session_limits,
                sample_index=sample_index,
                siblings=siblings,
            )

        siblings = [session(index) for index in range(1, request.num_samples)]
        return [session(0, siblings), *siblings]


async def _stream(context: _Context, call_id: str, queue: ChunkQueue, num_samples: int) -> None:
    """Write chunks until each sample's last; raises the first error."""
    while num_samples:
        chunk = await queue.next()
        if chunk.result is not None:
            context.set_trailing_metadata(
                (
                    ("x-prefill-node", _ascii(chunk.result.prefill_node)),
                    ("x-decode-node", _ascii(chunk.result.decode_node or "")),
                )
            )
        await context.write(chunk_to_wire(call_id, chunk))
        num_samples -= chunk.result is not None


def _version() -> str:
    try:
        return version("baton-serve")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return ""
