"""Server-sent events: a stream that begins with its first event, and waits for a slow client.

Headers are sent with the first event, so a call that fails before it gets its own HTTP status.
"""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass

from aiohttp import HttpVersion11, web

from .app_state import STREAM

# Bytes that may be buffered for a client before we notice that it does not read.
_USER_BUFFER_BYTES = 16 << 10
_SOCKET_BUFFER_BYTES = 64 << 10

_quoted = json.encoder.encode_basestring_ascii  # what json.dumps calls for a string
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class Burst:
    """Collects what one turn of the event loop writes to many streams, and writes it at its end.

    A client that reads several streams is woken once: a wake-up costs more than a write. The tokens
    of one engine step are thus written together, after all of them have been processed; several
    steps that were read together become one write to each stream.
    """

    def __init__(self) -> None:
        self._streams: list[EventStream] = []

    def add(self, stream: EventStream) -> None:
        """Schedule the stream's write, which runs before any callback that is scheduled later."""
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._write_all)
        self._streams.append(stream)

    def _write_all(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.write_waiting()


BURST = web.AppKey("burst", Burst)


class EventStream:
    """The response to `request` as a stream of events. Only one task may write at a time."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._burst = request.app[BURST]
        self._response: web.StreamResponse | None = None
        self._chunked: asyncio.Transport | None = None  # for HTTP/1.1 chunks, after the headers
        self._waiting: list[str] = []  # events, until this turn of the loop ends

    async def send(self, events: str) -> None:
        """Write whole events at once, and wait until the client has taken most buffered bytes."""
        if self._response is None:
            self._response = await self._begin()
        await self._response.write(events.encode())
        if self._response.chunked:
            self._chunked = self._transport
        await self._request.writer.drain()

    @property
    def has_room(self) -> bool:
        """Whether `send_now` may be called: the stream has begun, and its reader keeps up."""
        transport = self._chunked
        return (
            transport is not None
            and not transport.is_closing()
            and transport.get_write_buffer_size() < _USER_BUFFER_BYTES
        )

    def send_now(self, events: str) -> None:
        """Write whole events in this turn of the loop. Only after a `send` has returned."""
        if not self._waiting:
            self._burst.add(self)
        self._waiting.append(events)

    def write_waiting(self) -> None:
        """Write the events given to `send_now` as one HTTP chunk."""
        assert self._chunked is not None, "there is room in a stream that has begun"
        data = "".join(self._waiting).encode()
        self._waiting.clear()
        if not self._chunked.is_closing():
            self._chunked.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self) -> web.StreamResponse:
        """End the response, after the last event."""
        assert self._response is not None, "a stream has at least one event"
        await self._response.write_eof()
        return self._response

    async def _begin(self) -> web.StreamResponse:
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client went away")
        self._transport = transport
        transport.set_write_buffer_limits(high=_USER_BUFFER_BYTES)
        plain = transport.get_extra_info("socket")
        if plain is not None:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        response = web.StreamResponse(headers=_HEADERS)
        if self._request.version >= HttpVersion11:
            response.enable_chunked_encoding()
        await response.prepare(self._request)
        self._request[STREAM] = response
        return response


@dataclass(frozen=True, slots=True)
class TextEventTemplate:
    """An event that only adds a text, as most do: its parts before and after the text."""

    before: str
    behind: str

    def of(self, text: str) -> str:
        return f"{self.before}{_quoted(text)}{self.behind}"

    def within(self, head: str, tail: str) -> TextEventTemplate:
        """The same event inside `head` and `tail`."""
        return TextEventTemplate(head + self.before, self.behind + tail)
