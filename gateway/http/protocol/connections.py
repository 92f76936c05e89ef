"""The limits on connections of the HTTP front, and the answer to bytes that are not HTTP.

    accepted ── HEAD_S for the handshake, over TLS, and HEAD_S for the first head, else closed
             ── then requests, at most IDLE_S apart
    none of the bytes waiting for the client taken for UNREAD_S: closed, by the kernel
    a connection beyond the limit: 503 and closed, whatever the request; over TLS only a few at
                                   once do the handshake for this, the others are closed
    FIN while the client waits for an answer: HalfClosed          FIN otherwise: closed
Knows no route: the content of a request is checked later.

Is a client still there that closed its direction of the connection while it waits for an answer?

    FIN ── our bytes ──┬─ taken: the client still reads (shutdown(SHUT_WR)), and gets its answer
                       └─ RST: it closed the socket, or is gone; its request is cancelled
The two look alike until bytes are sent, so a probe is sent: an interim response before the answer's
head, a comment in a stream of events. Other answers that have begun are being sent anyway.
asyncio no longer reads from such a connection, so the socket's state is polled for the RST.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import Any, cast

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from ....core.errors import Unavailable
from ....core.process import descriptors
from .app_state import STREAM
from .errors import Refusal, error_response, error_text

log = logging.getLogger(__name__)

HEAD_S = 10.0  # from the connection to the end of its first request's head
IDLE_S = 75.0  # from an answer to the end of the next head: longer than proxies keep connections
UNREAD_S = 60.0  # in which a client must take some of the bytes waiting for it
MAX_CONNECTIONS = 8192
MAX_HEAD_BYTES = 64 << 10  # of all headers
MAX_HEADER_BYTES = 8190  # of one header
MAX_URL_BYTES = 8189  # a different number, since the parser's error names only the exceeded limit
_LOG_EVERY_S = 10.0
_LEAVING_S, _MAX_LEAVING = 0.25, 16
_REFUSED_S = 1.0  # of a refused connection over TLS, with its handshake
_TOO_MANY = "Too many headers received"  # aiohttp has no exception class for it
_FIRST_LOOK_S, _LOOK_S = 0.01, 0.05
_PROBE_LOOKS = 20  # looks between two probes: a half-closed client may still go away
_TCP_CLOSE = 7  # tcpi_state, the first byte of the kernel's struct tcp_info
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b"3\r\n:\n\n\r\n"  # a comment of server-sent events, as an HTTP chunk


def _refused() -> bytes:
    body = error_text(Unavailable("too many connections are open here")).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        f"Content-Length: {len(body)}\r\nServer: baton\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


_REFUSED = _refused()  # the same for every request, which is not read


class Connections:
    """The protocol factory of one listening socket; `options`: aiohttp's, for each connection.

    `on_refused` is called for each connection beyond the limit. `tls`: None for plain text.
    """

    def __init__(
        self,
        server: web.Server,
        options: dict[str, Any],
        on_refused: Callable[[], None] = lambda: None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._server = server
        self._tls = tls
        self._options = options
        self._on_refused = on_refused
        self._max = min(MAX_CONNECTIONS, descriptors.for_http())
        self._num_refused = 0
        self._logs_again_s = 0.0
        self._open: set[object] = set()  # those with a place
        self.leaving: set[object] = set()  # refused ones that are not closed yet

    def __call__(self) -> asyncio.BaseProtocol:
        connection = _Connection(self, self._server, self._options)
        return connection if self._tls is None else _OverTls(self, connection, self._tls)

    def take(self, connection: object, descriptor: int) -> bool:
        """Give a connection a place, until `forget`; False if there is none."""
        if len(self._open) >= self._max or descriptors.is_among_last(descriptor):
            self._on_refused()
            self._num_refused += 1
            self._log_refused()
            return False
        self._open.add(connection)
        return True

    def may_leave(self, connection: object) -> bool:
        """Whether a refused connection may stay open for a moment, until `forget`: its client gets
        an answer."""
        if len(self.leaving) >= _MAX_LEAVING:
            return False
        self.leaving.add(connection)
        return True

    def forget(self, connection: object) -> None:
        """The connection is closed."""
        self._open.discard(connection)
        self.leaving.discard(connection)

    def _log_refused(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s < self._logs_again_s:
            return
        self._logs_again_s = now_s + _LOG_EVERY_S
        log.warning(
            "HTTP connections are refused, %d so far: %d are open, of %d that there may be, and "
            "this process may open %d files and sockets in all (ulimit -n)",
            *(self._num_refused, len(self._open), self._max, descriptors.limit()),
        )


class _OverTls(SSLProtocol):
    """The TLS layer below a connection, which takes the connection's place before the handshake:
    asyncio and uvloop, given the context, would report the connection only after it."""

    def __init__(
        self, connections: Connections, connection: _Connection, context: ssl.SSLContext
    ) -> None:
        handshake: dict[str, Any] = {"waiter": None, "ssl_handshake_timeout": HEAD_S}
        loop = asyncio.get_running_loop()
        super().__init__(loop, connection, context, server_side=True, **handshake)
        self._connections, self._connection = connections, connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        abort = cast(asyncio.Transport, transport).abort
        if not self._connections.take(self, transport.get_extra_info("socket").fileno()):
            if not self._connections.may_leave(self):
                abort()
                return
            self._connection.is_refused = True
            asyncio.get_running_loop().call_later(_REFUSED_S, abort)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.forget(self)
        super().connection_lost(exc)


class _Connection(web.RequestHandler):
    """The connection of one client. `is_refused`: the TLS layer found no place for it."""

    __slots__ = ("_connections", "_half_closed", "_head_timer", "is_refused")

    def __init__(
        self, connections: Connections, server: web.Server, options: dict[str, Any]
    ) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, keepalive_timeout=IDLE_S, **options)
        self._connections = connections
        self.is_refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._half_closed: HalfClosed | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        plain = transport.get_extra_info("socket")
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD_S))
        if self.ssl_context is not None:  # _OverTls has asked for the place
            has_place = not self.is_refused
        else:
            has_place = self._connections.take(self, plain.fileno())
        loop = asyncio.get_running_loop()
        if has_place:
            self._head_timer = loop.call_later(HEAD_S, self._close_silent)
            return
        stream = cast(asyncio.Transport, transport)
        stream.write(_REFUSED)
        if stream.can_write_eof():
            with contextlib.suppress(OSError):  # the client has gone already
                stream.write_eof()
        if not self._connections.may_leave(self):
            self.force_close()
            return
        # Closing now, with unread input, would reset the connection, and the answer would be lost.
        self.close()
        self._head_timer = loop.call_later(_LEAVING_S, self.force_close)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        if self._half_closed is not None:
            self._half_closed.stop()
            self._half_closed = None  # it refers to this connection
        self._connections.forget(self)
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether to keep our direction open; asyncio closes it otherwise, and with TLS always."""
        is_leaving = self in self._connections.leaving
        if is_leaving or self._waiter is not None or self.ssl_context is not None:
            return False
        if self.transport is None:
            return False
        if self._half_closed is None:  # uvloop calls this twice
            self._half_closed = HalfClosed(self.transport, self._probe)
        return True

    def _probe(self) -> bytes | None:
        """The probe to send before the rest of the answer; None: there will be no answer."""
        request = self._current_request
        if request is None:
            return b"" if self._waiter is None else None
        if not request.content.is_eof() or request.version < HttpVersion11:
            return None  # the request's body will never end, or no probe can be sent
        if not request.writer.output_size:
            return _INTERIM
        return b"" if request.get(STREAM) is None else _COMMENT

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
        """An error in our usual form, without the client's bytes or a trace. Closes."""
        if isinstance(exc, BadHttpMessage):
            log.info("a client's bytes are no HTTP request: %s", type(exc).__name__)
            refusal = _refusal(exc)
        else:
            log.error("an HTTP answer failed by a bug", exc_info=exc)
            refusal = Refusal(status, "internal", "internal error", is_fatal=True)
        if request.writer.output_size > 0:  # an answer has begun: the connection can only be closed
            raise ConnectionError("the answer was cut off")
        response = error_response(refusal)
        response.headers["Server"] = "baton"
        return response


def _refusal(error: BadHttpMessage) -> Refusal:
    if isinstance(error, LineTooLong) and str(error.args[1]) == str(MAX_URL_BYTES):
        message = f"the URL is longer than {MAX_URL_BYTES} bytes"
        return Refusal(414, "url_too_long", message, is_fatal=True)
    if isinstance(error, LineTooLong) or error.message == _TOO_MANY:
        return too_large_head()
    return Refusal(400, "bad_http", "these bytes are no HTTP request", is_fatal=True)


def too_large_head() -> Refusal:
    return Refusal(431, "headers_too_large", "the request's head is too large", is_fatal=True)


def check_head(request: web.BaseRequest) -> None:
    """Check what aiohttp does not. Raises Refusal, after which the connection is closed.

    aiohttp would ignore a transfer coding other than chunked, and HTTP/1.0 has none: a proxy in
    front of us might see the request's end at another place than we do.
    """
    if not HttpVersion10 <= request.version <= HttpVersion11:
        raise Refusal(400, "bad_http", "only HTTP/1.1 and HTTP/1.0 are supported", is_fatal=True)
    codings = request.headers.getall("Transfer-Encoding", [])
    is_chunked = [coding.strip().lower() for coding in codings] == ["chunked"]
    if codings and not (is_chunked and request.version == HttpVersion11):
        message = "the only transfer coding is chunked, of HTTP/1.1"
        raise Refusal(400, "bad_http", message, is_fatal=True)
    if sum(len(name) + len(value) for name, value in request.raw_headers) > MAX_HEAD_BYTES:
        raise too_large_head()


class HalfClosed:
    """Watches one connection after the client's FIN, until `stop` or the connection's end."""

    def __init__(self, transport: asyncio.Transport, probe: Callable[[], bytes | None]) -> None:
        self._transport = transport
        self._probe = probe
        self._num_looks = 0
        # A request that came with the FIN is still on its way to its handler.
        self._timer = asyncio.get_running_loop().call_later(_FIRST_LOOK_S, self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        probe = self._probe()
        if probe is None:
            self._transport.close()
            return
        if _was_reset(self._transport):
            self._transport.abort()
            return
        if self._num_looks % _PROBE_LOOKS == 0 and probe:
            self._transport.write(probe)
        self._num_looks += 1
        self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)


def _was_reset(transport: asyncio.Transport) -> bool:
    try:
        info = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    except OSError:
        return True
    return bool(info[0] == _TCP_CLOSE)
