"""The listening sockets of an engine that a test simulates, with the listener's handshake.

The test handles everything after the handshake.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress

from baton.core.channels.addresses import HOST_ID_BYTES, socket_address
from baton.core.channels.admission import GATEWAY, SOCKET, THIS_HOST
from baton.core.channels.frames import LENGTH_BYTES, decode_length, encode_payload
from baton.core.channels.handshake import ANSWER_BYTES, OPENING_BYTES, Listener
from baton.core.errors import Unauthenticated

HOST = "127.0.0.1"
ANOTHER_HOST = "0" * 2 * HOST_ID_BYTES  # of engines that are reached by TCP although they run here


class EngineConnection:
    """The connection of a gateway, after the handshake."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, *payloads: bytes) -> None:
        """Send each payload as a frame, all in one write."""
        self.writer.write(b"".join(map(encode_payload, payloads)))

    async def receive(self) -> bytes:
        """The payload of the next frame. Raises asyncio.IncompleteReadError at the end, OSError."""
        length = decode_length(await self.reader.readexactly(LENGTH_BYTES))
        return await self.reader.readexactly(length)


Serve = Callable[[EngineConnection], Awaitable[None]]


class EngineDoor:
    """`serve` gets every gateway's connection, which ends when it returns.

    `refusal`: unless empty, sent to every gateway instead.
    """

    def __init__(
        self, incarnation: str, key: bytes, serve: Serve, tls: ssl.SSLContext | None = None
    ) -> None:
        self.refusal = ""
        self._incarnation, self._key = incarnation, key
        self._serve = serve
        self._tls = tls
        self._address = THIS_HOST
        self._server: asyncio.Server | None = None
        self._serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def listen(self, port: int = 0) -> int:
        """Listen on a TCP port, any free one if it is 0; returns the port."""
        self._server = await asyncio.start_server(self._accept, HOST, port, ssl=self._tls)
        port = self._server.sockets[0].getsockname()[1]
        self._address = f"{HOST}:{port}"
        return port

    async def listen_here(self) -> None:
        """Listen on the unix socket of an engine of this host."""
        local = socket.socket(socket.AF_UNIX)
        local.bind(socket_address(self._incarnation, SOCKET))
        self._server = await asyncio.start_unix_server(self._accept, sock=local)

    async def close(self) -> None:
        """Accept no more connections and break all existing ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        serving = dict(self._serving)
        for task, writer in serving.items():
            writer.transport.abort()
            task.cancel()
        if serving:
            await asyncio.wait(serving)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving[task] = writer
        connection = EngineConnection(reader, writer)
        try:
            with suppress(OSError, asyncio.IncompleteReadError, Unauthenticated):
                await self._handshake(connection)
                if not self.refusal:
                    await self._serve(connection)
                await writer.drain()
        except asyncio.CancelledError:
            pass  # by `close`; asyncio's server would log it
        finally:
            del self._serving[task]
            writer.close()

    async def _handshake(self, connection: EngineConnection) -> None:
        listener = Listener(
            lambda opening: self._key if opening.listener == self._incarnation else None,
            (GATEWAY,),
            (self._address,),
        )
        reader, writer = connection.reader, connection.writer
        writer.write(listener.challenge(await reader.readexactly(OPENING_BYTES)))
        listener.check(await reader.readexactly(ANSWER_BYTES))
        connection.send(self.refusal.encode())
