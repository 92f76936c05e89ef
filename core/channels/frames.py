"""Frames between two processes: a length, 4 bytes little-endian, then a payload.

A frame that is cut off by the end of the stream is an end like any other: its sender is gone. Knows
no peer and no message.
"""

from __future__ import annotations

import asyncio
import socket
import struct

_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size
MAX_FRAME_BYTES = 64 << 20  # the longest prompt is a few MiB; more is a broken stream
CHUNK_BYTES = 64 << 10
MAX_CHUNKS = 64  # read at once: others wait
MAX_UNSENT_BYTES = 4 * MAX_FRAME_BYTES  # many long prompts; whoever hangs is noticed earlier


class BrokenStream(ConnectionError):
    """A length that no frame has: the other side has another protocol."""


def encode_payload(payload: bytes) -> bytes:
    """One frame, of a message in its serial form."""
    assert len(payload) <= MAX_FRAME_BYTES, f"a frame of {len(payload)} bytes"
    return _LENGTH.pack(len(payload)) + payload


def decode_length(
    received: bytes | bytearray, start: int = 0, max_bytes: int = MAX_FRAME_BYTES
) -> int:
    """How long the payload behind `start` is. Raises BrokenStream."""
    length: int = _LENGTH.unpack_from(received, start)[0]
    if length > max_bytes:
        raise BrokenStream(f"a frame of {length} bytes; at most {max_bytes}")
    return length


class FrameBuffer:
    """Bytes of a stream as they come, cut into frames."""

    def __init__(self) -> None:
        self._received = bytearray()

    def take_in(self, sock: socket.socket) -> bool:
        """Read what has come, without waiting, at most MAX_CHUNKS; False: the stream is over."""
        for _ in range(MAX_CHUNKS):
            try:
                data = sock.recv(CHUNK_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self._received += data
            if len(data) < CHUNK_BYTES:
                break
        return True

    def wait_for_more(self, sock: socket.socket) -> bool:
        """Read what comes next; False: the stream is over."""
        try:
            data = sock.recv(CHUNK_BYTES)
        except ConnectionResetError:
            return False
        self._received += data
        return bool(data)

    def cut(self, data: bytes) -> list[bytes]:
        """The payloads that are whole with this, but for empty ones. Raises BrokenStream."""
        self._received += data
        return list(filter(None, self.take()))

    def take(self) -> list[bytes]:
        """The payloads of all frames that are here whole, once. Raises BrokenStream."""
        received, payloads, start = self._received, [], 0
        while len(received) - start >= _LENGTH.size:
            first = start + _LENGTH.size
            end = first + decode_length(received, start)
            if len(received) < end:
                break
            payloads.append(bytes(received[first:end]))
            start = end
        del received[:start]
        return payloads


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """`FrameSocket.receive` for asyncio: None when the stream is over, as after a failed write."""
    try:
        length = decode_length(await reader.readexactly(LENGTH_BYTES))
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
