"""Frames of a byte stream between two processes: a length, 4 bytes little-endian, then a payload.

A frame that is cut off by the end of the stream is an end like any other: whoever wrote it is gone.
Knows no message.
"""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size
MAX_FRAME_BYTES = 64 << 20  # the longest prompt is a few MiB; more is a broken stream
_CHUNK_BYTES = 64 << 10
MAX_CHUNKS = 64  # read at once: others wait


class BrokenStream(ConnectionError):
    """A length that no frame has: the two sides do not speak the same language."""


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
    """Bytes of a stream as they come, cut into frames of at most `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        self._received = bytearray()

    def take_in(self, sock: socket.socket, max_chunks: int = MAX_CHUNKS) -> bool:
        """Read what has come, without waiting, at most so many times 64 KiB; False: the stream is
        over."""
        for _ in range(max_chunks):
            try:
                data = sock.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self._received += data
            if len(data) < _CHUNK_BYTES:
                break
        return True

    def wait_for_more(self, sock: socket.socket) -> bool:
        """Read what comes next; False: the stream is over."""
        try:
            data = sock.recv(_CHUNK_BYTES)
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
            end = first + decode_length(received, start, self.max_bytes)
            if len(received) < end:
                break
            payloads.append(bytes(received[first:end]))
            start = end
        del received[:start]
        return payloads
