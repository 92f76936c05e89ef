"""Frames between two processes: a length of 4 bytes, little-endian, then the payload.

A stream that ends inside a frame counts as a normal end: its sender is gone. Knows no peer and no
message.
"""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size
MAX_FRAME_BYTES = 64 << 20  # the longest prompt has a few MiB; more means a broken stream
CHUNK_BYTES = 64 << 10
MAX_CHUNKS = 64  # read at once, while other streams wait
MAX_UNSENT_BYTES = 4 * MAX_FRAME_BYTES  # many long prompts; a peer that hangs is noticed before


class BrokenStream(ConnectionError):
    """A frame length that is too large: the peer uses another protocol."""


def encode_payload(payload: bytes) -> bytes:
    """The frame of a serialized message."""
    assert len(payload) <= MAX_FRAME_BYTES, f"a frame of {len(payload)} bytes"
    return _LENGTH.pack(len(payload)) + payload


def decode_length(
    received: bytes | bytearray, start: int = 0, max_bytes: int = MAX_FRAME_BYTES
) -> int:
    """The length of the payload of the frame at `start`. Raises BrokenStream."""
    length: int = _LENGTH.unpack_from(received, start)[0]
    if length > max_bytes:
        raise BrokenStream(f"a frame of {length} bytes; at most {max_bytes}")
    return length


class FrameBuffer:
    """The received bytes of a stream, cut into frames."""

    def __init__(self) -> None:
        self._received = bytearray()

    def take_in(self, sock: socket.socket) -> bool:
        """Read the received bytes without waiting, at most MAX_CHUNKS; False at the end of the
        stream."""
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

    def cut(self, data: bytes) -> list[bytes]:
        """Add `data`; return the payloads that are complete, without empty ones. Raises
        BrokenStream."""
        self._received += data
        return list(filter(None, self.take()))

    def take(self) -> list[bytes]:
        """Remove all complete frames and return their payloads. Raises BrokenStream."""
        received, payloads, start = self._received, [], 0
        while len(received) - start >= LENGTH_BYTES:
            first = start + LENGTH_BYTES
            end = first + decode_length(received, start)
            if len(received) < end:
                break
            payloads.append(bytes(received[first:end]))
            start = end
        del received[:start]
        return payloads
