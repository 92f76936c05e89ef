"""What connections of the HTTP front may cost, and how bytes that are no HTTP are answered.

    accepted ── HEAD_S to say what it wants, else closed ── requests, IDLE_S apart at most
    one of more than there may be: closed at once
Knows no route: what stands in a request is judged behind this.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from .errors import Refusal, error_response

log = logging.getLogger(__name__)

HEAD_S = 10.0  # from the connection to the end of its first request's head
IDLE_S = 75.0  # from an answer to the end of the next head: longer than proxies keep connections
MAX_CONNECTIONS = 8192
_TOO_MANY = "Too many headers received"  # aiohttp has no class of its own for it


def max_connections() -> int:
    """Half of the files that this process may open: the other half is for everything else."""
    return min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class Connections:
    """The protocol factory of one listening socket; `options` are aiohttp's, of each connection."""

    def __init__(self, server: web.Server, options: dict[str, Any]) -> None:
        self._server = server
        self._options = options
        self._max = max_connections()
        self.num_open = 0

    def __call__(self) -> asyncio.Protocol:
        return _Connection(self, self._server, self._options)

    def take(self) -> bool:
        """Whether one more may be open. If so, give it back."""
        if self.num_open >= self._max:
            log.warning("%d connections are open: more are closed at once", self.num_open)
            return False
        self.num_open += 1
        return True

    def give_back(self) -> None:
        self.num_open -= 1


class _Connection(web.RequestHandler):
    """One client's."""

    __slots__ = ("_connections", "_head_timer", "_is_taken")

    def __init__(
        self, connections: Connections, server: web.Server, options: dict[str, Any]
    ) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, keepalive_timeout=IDLE_S, **options)
        self._connections = connections
        self._is_taken = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._is_taken = self._connections.take()
        if self._is_taken:
            loop = asyncio.get_running_loop()
            self._head_timer = loop.call_later(HEAD_S, self._close_silent)
        else:
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        if self._is_taken:
            self._is_taken = False
            self._connections.give_back()
        super().connection_lost(exc)

    def _close_silent(self) -> None:
        if not self._request_count:
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Like all our errors, and without the sender's bytes or a trace. Closes."""
        if isinstance(exc, BadHttpMessage):
            is_long = isinstance(exc, LineTooLong) or exc.message == _TOO_MANY
            log.info("a client's bytes are no HTTP request: %s", type(exc).__name__)
            refusal = (
                Refusal(431, "headers_too_large", "the request's head is too large", is_fatal=True)
                if is_long
                else Refusal(400, "bad_http", "these bytes are no HTTP request", is_fatal=True)
            )
        else:
            log.error("an HTTP answer failed by a bug", exc_info=exc)
            refusal = Refusal(status, "internal", "internal error", is_fatal=True)
        if request.writer.output_size > 0:  # an answer has begun: all that is left is to close
            raise ConnectionError("the answer was cut off")
        response = error_response(refusal)
        response.headers["Server"] = "baton"
        return response
