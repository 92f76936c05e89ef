"""The gateway's endpoints that generate, over the engine of this process: a private Unix socket in
place of a port, so that lines of a batch are answered as a server answers them, byte for byte."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from aiohttp import web

from ..core.config import GatewayConfig
from ..core.engine_config import EngineConfig
from ..core.ports import SystemClock
from ..core.process.event_loop import interruptible
from ..gateway.admission.admission import LoopPacing
from ..gateway.http.chat import chat
from ..gateway.http.chat.chat_model import CHAT_MODEL, ChatModel
from ..gateway.http.generate import completions
from ..gateway.http.protocol.app_state import APP_STATE, CALLER, AppState
from ..gateway.http.protocol.errors import Handler, answering
from ..gateway.http.protocol.event_stream import BURST, Burst
from ..gateway.http.turns import responses
from ..gateway.http.turns.response_store import ResponseStore
from ..gateway.http.turns.responses import RESPONSE_STORE
from ..gateway.security.tenancy import INFER, Caller
from ..gateway.text.special_tokens import Spans
from ..gateway.validation.served_model import ServedModel
from ..gateway.validation.validation import ModelLimits
from ..proto.v1 import inference_pb2
from .local_calls import LocalCall, LocalCalls

_BACKLOG = 4096  # lines begin all at once
_CALLER = Caller("", frozenset({INFER}), "batch")


@dataclass(eq=False)
class _Door:
    """What the endpoints use of a FrontDoor."""

    _calls: LocalCalls
    is_draining: bool = False
    arrivals: LoopPacing = field(default_factory=LoopPacing)
    large_bodies: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def model(self) -> ServedModel:
        return self._calls.model

    @property
    def limits(self) -> ModelLimits:
        return self._calls.limits

    @property
    def constraint_refusal(self) -> str | None:
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
        call = self._calls.start(await self._calls.prepare(wire, special_at))
        try:
            yield call
        finally:
            self._calls.forget(call)


@dataclass(frozen=True, slots=True)
class _State:
    door: _Door


@web.middleware
async def _as_nobody(request: web.Request, handler: Handler) -> web.StreamResponse:
    request[CALLER] = _CALLER
    return await handler(request)


def batch_app(calls: LocalCalls, config: GatewayConfig) -> web.Application:
    """The endpoints of a batch's lines; responses are kept for no later line."""
    app = web.Application(middlewares=[answering, _as_nobody])
    app[APP_STATE] = cast(AppState, cast(Any, _State(_Door(calls))))
    app[BURST] = Burst()
    app[CHAT_MODEL] = ChatModel.load(calls.model, config.tool_call_parser, config.reasoning_parser)
    app[RESPONSE_STORE] = ResponseStore(SystemClock(), max_bytes=0, ttl_s=0.0)
    for routes in (completions.ROUTES, chat.ROUTES, responses.ROUTES):
        app.add_routes(routes)
    return app


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[Path]:
    """Answer on the Unix socket that it yields, for as long as the block lasts."""
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
    await runner.setup()
    with tempfile.TemporaryDirectory(prefix="baton-batch-") as folder:
        path = Path(folder) / "http"
        try:
            await web.UnixSite(runner, str(path), backlog=_BACKLOG).start()
            yield path
        finally:
            await runner.cleanup()


@asynccontextmanager
async def local_endpoints(engine: EngineConfig) -> AsyncIterator[Path]:
    """The same over a model that is loaded here, for as long as the block lasts. Raises
    StartupFailed."""
    front = GatewayConfig(model=engine.model, served_model_name=engine.served_model_name)
    with interruptible():
        calls = LocalCalls.load(
            engine, front, lambda line: print(line, file=sys.stderr, flush=True)
        )
    try:
        calls.begin()
        async with serving(batch_app(calls, front)) as path:
            yield path
    finally:
        await calls.stop()
        calls.close()
