"""A FIN while a response is pending: a half-closed client gets its response, a closed one is
detected.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from baton.gateway.http.protocol.app_state import STREAM
from baton.gateway.http.protocol.connections import Connections

_NOTICED_S = 0.25
_HEAD = b"POST /%s HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"


class Server:
    """`whole` and `stream` respond once `go` is set, a stream after its first event."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.began = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.port = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse()
        if request.path == "/stream":
            response.enable_chunked_encoding()
            await response.prepare(request)
            request[STREAM] = response
            await response.write(b"data: 1\n\n")
        self.began.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if request.path == "/whole":
            return web.Response(text="done")
        await response.write(b"data: 2\n\n")
        return response

    async def connect(self, path: bytes, body: bytes = b"{}") -> socket.socket:
        """A socket that has sent a request; if its body is complete, the handler has started."""
        plain = socket.create_connection(("127.0.0.1", self.port))
        plain.setblocking(False)
        plain.sendall(_HEAD % path + body)
        if len(body) == 2:
            await self.began.wait()
        return plain


@asynccontextmanager
async def running() -> AsyncIterator[Server]:
    served = Server()
    app = web.Application()
    app.router.add_post("/{path}", served.answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    loop = asyncio.get_running_loop()
    assert runner.server is not None
    listening = await loop.create_server(Connections(runner.server, {}), "127.0.0.1", 0)
    served.port = listening.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        served.go.set()
        listening.close()
        await runner.cleanup()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with running() as served:
        yield served


async def read_to_end(plain: socket.socket) -> bytes:
    loop, parts = asyncio.get_running_loop(), []
    async with asyncio.timeout(5):
        while part := await loop.sock_recv(plain, 65536):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    ("path", "end"), [(b"whole", b"\r\n\r\ndone"), (b"stream", b"data: 2\n\n\r\n0\r\n\r\n")]
)
@pytest.mark.parametrize("is_early", [False, True])
async def test_who_half_closes_is_answered(
    server: Server, path: bytes, end: bytes, is_early: bool
) -> None:
    with (
        await server.connect(path)
        if not is_early
        else socket.create_connection(("127.0.0.1", server.port)) as plain
    ):
        plain.setblocking(False)
        if is_early:  # the FIN comes with the request
            plain.sendall(_HEAD % path + b"{}")
        plain.shutdown(socket.SHUT_WR)
        await server.began.wait()
        await asyncio.sleep(0.1)  # time for a poll or two
        server.go.set()
        answer = await read_to_end(plain)
    assert b"HTTP/1.1 200 OK" in answer and answer.endswith(end), answer


async def test_several_requests_before_the_fin_are_all_answered(server: Server) -> None:
    server.go.set()
    with await server.connect(b"whole", b"{}") as plain:
        plain.sendall((_HEAD % b"whole" + b"{}") * 3)
        plain.shutdown(socket.SHUT_WR)
        assert (await read_to_end(plain)).count(b"done") == 4


@pytest.mark.parametrize("path", [b"whole", b"stream"])
@pytest.mark.parametrize("how", ["close", "reset", "half_close_first"])
async def test_who_went_away_is_noticed(server: Server, path: bytes, how: str) -> None:
    """A closed connection is detected without any token being written."""
    plain = await server.connect(path)
    await asyncio.sleep(0)
    if path == b"stream":
        await asyncio.get_running_loop().sock_recv(plain, 65536)  # else closing sends RST
    if how == "reset":
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "half_close_first":
        plain.shutdown(socket.SHUT_WR)
        await asyncio.sleep(0.1)  # the unread interim response makes closing a reset
    left_s = time.monotonic()
    plain.close()
    async with asyncio.timeout(2):
        await server.cancelled.wait()
    assert time.monotonic() - left_s < _NOTICED_S


async def test_a_body_that_will_not_come_is_not_waited_for(server: Server) -> None:
    with await server.connect(b"whole", b"{") as plain:
        plain.shutdown(socket.SHUT_WR)
        left_s = time.monotonic()
        assert await read_to_end(plain) == b""
    assert time.monotonic() - left_s < _NOTICED_S


async def test_an_idle_connection_is_closed_by_a_fin(server: Server) -> None:
    server.go.set()
    with await server.connect(b"whole") as plain:
        plain.shutdown(socket.SHUT_WR)
        await read_to_end(plain)


@pytest.mark.parametrize("path", [b"whole", b"stream"])
def test_the_same_on_the_faster_loop(path: bytes) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def answered_and_noticed() -> None:
        async with running() as server:
            with await server.connect(path) as plain:
                plain.shutdown(socket.SHUT_WR)
                await asyncio.sleep(0.1)
                server.go.set()
                answer = await read_to_end(plain)
            assert answer.count(b"HTTP/1.1 200 OK") == 1, answer
            assert answer.count(b"100 Continue") + answer.count(b"\n:\n") == 1, answer
            server.go.clear()
            server.began.clear()
            (await server.connect(path)).close()
            async with asyncio.timeout(2):
                await server.cancelled.wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(answered_and_noticed())
