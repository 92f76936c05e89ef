"""The gateway's generating endpoints for an engine in this process, on a private Unix socket: the
responses to a batch's lines are byte for byte those of a server."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from aiohttp import web

from ..core.config import GatewayConfig
from ..core.engine_config import EngineConfig
from ..core.ports import Clock
from ..core.process.event_loop import interruptible
from ..core.process.runtime_folder import RuntimeFolder
from ..gateway.http.chat import chat
from ..gateway.http.chat.chat_model import CHAT_MODEL, ChatModel
from ..gateway.http.generate import completions
from ..gateway.http.protocol.app_state import APP_STATE, CALLER, AppState
from ..gateway.http.protocol.body import BODIES, Bodies
from ..gateway.http.protocol.errors import Handler, answering
from ..gateway.http.protocol.event_stream import BURST, Burst
from ..gateway.http.turns import responses
from ..gateway.http.turns.response_store import ResponseStore
from ..gateway.http.turns.responses import RESPONSE_STORE
from ..gateway.security.caller import INFER, Caller
from .local_calls import LocalCalls

_BACKLOG = 4096  # many lines connect at once
_CALLER = Caller("", frozenset({INFER}), "batch")


@web.middleware
async def _as_nobody(request: web.Request, handler: Handler) -> web.StreamResponse:
    request[CALLER] = _CALLER
    return await handler(request)


def batch_app(calls: LocalCalls, config: GatewayConfig) -> web.Application:
    """The endpoints for a batch's lines; responses are not stored for later lines."""
    app = web.Application(middlewares=[answering, _as_nobody])
    app[APP_STATE] = cast(AppState, SimpleNamespace(door=calls))
    app[BURST] = Burst()
    app[BODIES] = Bodies()
    app[CHAT_MODEL] = ChatModel.load(calls.model, config.tool_call_parser, config.reasoning_parser)
    app[RESPONSE_STORE] = ResponseStore(Clock(), 0, 0.0)
    for routes in (completions.ROUTES, chat.ROUTES, responses.ROUTES):
        app.add_routes(routes)
    return app


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[Path]:
    """Serve on a Unix socket, whose path it yields, until the block ends."""
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
    await runner.setup()
    with RuntimeFolder.make("baton-batch-") as folder:
        path = folder.path / "http"
        try:
            await web.UnixSite(runner, str(path), backlog=_BACKLOG).start()
            yield path
        finally:
            await runner.cleanup()


@asynccontextmanager
async def local_endpoints(engine: EngineConfig) -> AsyncIterator[Path]:
    """Load a model and serve it on a Unix socket, whose path it yields, until the block ends.
    Raises StartupFailed."""
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
