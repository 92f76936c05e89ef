"""Length-prefixed protobuf frames between a node's supervisor and its engine processes.

    | length: 4 bytes, little-endian | protobuf message |

The engine process uses the blocking side, the supervisor the asyncio side. A frame that is cut off
by the end of the stream is an end like any other: whoever wrote it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading

from google.protobuf.message import Message

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20  # the longest prompt is a few MiB; more is a broken stream
MAX_RELAYED_BYTES = MAX_FRAME_BYTES - 4096  # of a message from outside: its frame names the sender


class BrokenStream(ConnectionError):
    """A length that no frame has: the two sides do not speak the same language."""


def encode(message: Message) -> bytes:
    """One frame."""
    payload = message.SerializeToString()
    assert len(payload) <= MAX_FRAME_BYTES, f"a frame of {len(payload)} bytes"
    return _LENGTH.pack(len(payload)) + payload


def _decode_length(header: bytes) -> int:
    length: int = _LENGTH.unpack(header)[0]
    if length > MAX_FRAME_BYTES:
        raise BrokenStream(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES}")
    return length


class FrameSocket:
    """The blocking side: one thread receives, any thread sends."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = sock.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Raises ConnectionError when the other side is gone."""
        frame = encode(message)
        with self._sending:
            self._socket.sendall(frame)

    def receive(self) -> bytes | None:
        """The next message's bytes, or None when the stream is over. Raises BrokenStream."""
        try:
            header = self._reader.read(_LENGTH.size)
            if len(header) < _LENGTH.size:
                return None
            length = _decode_length(header)
            payload = self._reader.read(length)
        except ConnectionResetError:
            return None
        return payload if len(payload) == length else None

    def end(self) -> None:
        """Both sides' readers find the stream over; the one blocked in `receive` here too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._reader.close()
        self._socket.close()


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The asyncio side of `FrameSocket.receive`."""
    try:
        length = _decode_length(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None
