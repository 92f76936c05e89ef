"""All routes of the HTTP front, and its server. A route that is not listed here does not exist."""

from __future__ import annotations

import asyncio

from aiohttp import web

from ...cluster.tls import CertificateFiles
from ...core.errors import StartupFailed
from ...core.ports import Clock
from . import login, lora_adapters, openapi, server_info, tokenization
from .chat import chat
from .chat.chat_model import CHAT_MODEL, ChatModel
from .dashboard.routes import add_dashboard, feed_of
from .generate import completions
from .protocol.access import ACCESS, Access, check_access
from .protocol.app_state import APP_STATE, AppState
from .protocol.body import BODIES, Bodies
from .protocol.connections import MAX_HEADER_BYTES, MAX_URL_BYTES, Connections
from .protocol.errors import answering, echo_request_id
from .protocol.event_stream import BURST, Burst
from .turns import messages, responses
from .turns.response_store import ResponseStore
from .turns.responses import RESPONSE_STORE

_LAST_WRITE_S = 0.2
_BACKLOG = 1024
_CONNECTION_OPTIONS = {
    "access_log": None,
    "auto_decompress": False,  # compressed bodies are refused unread
    "max_line_size": MAX_URL_BYTES,
    "max_field_size": MAX_HEADER_BYTES,
    "lingering_time": 2.0,
}

ROUTE_GROUPS: tuple[web.RouteTableDef, ...] = (
    server_info.ROUTES,
    lora_adapters.ROUTES,
    completions.ROUTES,
    chat.ROUTES,
    responses.ROUTES,
    messages.ROUTES,
    tokenization.ROUTES,
    openapi.ROUTES,
    login.ROUTES,
)  # fmt: skip


def build_app(parts: AppState, access: Access) -> web.Application:
    """The application; groups of routes take `parts` from it."""
    app = web.Application(middlewares=[answering, check_access])
    app[APP_STATE] = parts
    app[BURST] = Burst()
    app[ACCESS] = access
    app[BODIES] = Bodies()
    config = parts.config
    app[CHAT_MODEL] = ChatModel.load(
        parts.door.model, config.tool_call_parser, config.reasoning_parser
    )
    app[RESPONSE_STORE] = ResponseStore(
        Clock(), config.response_store_mib << 20, config.response_store_s
    )
    app.on_response_prepare.append(echo_request_id)
    for routes in ROUTE_GROUPS:
        app.add_routes(routes)
    add_dashboard(app, feed_of(parts, Clock()))
    return app


class HttpServer:
    """The server of the HTTP front. `start` binds; `port` and `own_port` are known after it.

    `shares_port`: `port` is shared with other gateways; `own_port`: a second port, never shared.
    """

    def __init__(
        self,
        app: web.Application,
        host: str,
        port: int,
        certificate: CertificateFiles | None = None,
        *,
        shares_port: bool = False,
        own_port: int | None = None,
    ) -> None:
        self._runner = web.AppRunner(
            app,
            shutdown_timeout=_LAST_WRITE_S,
            handler_cancellation=True,  # a client that disconnects frees its KV blocks
        )
        self._on_refused = app[APP_STATE].telemetry.exporter.connection_refused
        self._host = host
        self._shares_port = shares_port
        self._tls = None if certificate is None else certificate.http_context()
        self._servers: list[asyncio.Server] = []
        self.port = port
        self.own_port = own_port

    async def start(self) -> None:
        """Listen. Raises StartupFailed if the port is taken or the host is not ours."""
        await self._runner.setup()
        assert self._runner.server is not None, "it was set up"
        connections = Connections(
            self._runner.server, _CONNECTION_OPTIONS, self._on_refused, self._tls
        )
        try:
            self.port = await self._listen(connections, self.port, "--http-port", self._shares_port)
            if self.own_port is not None:
                self.own_port = await self._listen(connections, self.own_port, "--own-http-port")
        except StartupFailed:
            await self.stop()
            raise

    async def _listen(
        self, connections: Connections, port: int, flag: str, is_shared: bool = False
    ) -> int:
        """Returns the port that was bound."""
        try:
            server = await asyncio.get_running_loop().create_server(
                connections, self._host, port, backlog=_BACKLOG, reuse_port=is_shared or None
            )
        except OSError as error:
            raise StartupFailed(
                f"the gateway cannot listen on {self._host}:{port} (HTTP)",
                hint=f"the port is taken or the address is not this host's: another {flag} "
                "(0 takes a free one) or --host",
            ) from error
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close; open connections are cut off after a moment for their last write."""
        for server in self._servers:
            server.close()
        await self._runner.cleanup()
