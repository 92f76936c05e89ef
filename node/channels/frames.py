"""Protobuf frames between a node's supervisor and its engine processes.

    | length: 4 bytes, little-endian | protobuf message |

The supervisor uses the asyncio side; the engine process waits while it starts, and from then on
takes what has come.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import deque

from google.protobuf.message import Message

from ...core.channels.framing import LENGTH_BYTES, FrameBuffer, decode_length, encode_payload


def encode(message: Message) -> bytes:
    """One frame."""
    return encode_payload(message.SerializeToString())


class FrameSocket:
    """The engine process's side: one thread receives, any thread sends."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames = FrameBuffer()
        self._payloads: deque[bytes] = deque()  # received, and nobody has asked for them yet
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Raises ConnectionError when the other side is gone."""
        frame = encode(message)
        with self._sending:
            self._socket.sendall(frame)

    def receive(self) -> bytes | None:
        """The next message's bytes, or None when the stream is over. Raises BrokenStream."""
        while not self._payloads:
            self._payloads.extend(self._frames.take())
            if not self._payloads and not self._frames.wait_for_more(self._socket):
                return None
        return self._payloads.popleft()

    def receive_ready(self) -> tuple[list[bytes], bool]:
        """All messages that have come, and whether the stream is over. Raises BrokenStream."""
        is_open = self._frames.take_in(self._socket)
        payloads = [*self._payloads, *self._frames.take()]
        self._payloads.clear()
        return payloads, not is_open

    def end(self) -> None:
        """Both sides' readers find the stream over; the one blocked in `receive` here too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The asyncio side of `FrameSocket.receive`. A write that failed ends the stream as well."""
    try:
        length = decode_length(await reader.readexactly(LENGTH_BYTES))
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
