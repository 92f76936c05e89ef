"""Length-prefixed protobuf frames between a node's supervisor and its engine processes.

    | length: 4 bytes, little-endian | protobuf message |

The supervisor uses the asyncio side; the engine process waits while it starts, and from then on
takes what has come. A frame that is cut off by the end of the stream is an end like any other:
whoever wrote it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import deque

from google.protobuf.message import Message

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20  # the longest prompt is a few MiB; more is a broken stream
MAX_RELAYED_BYTES = MAX_FRAME_BYTES - 4096  # of a message from outside: its frame names the sender
_CHUNK_BYTES = 64 << 10
_MAX_CHUNKS = 64  # read at once: others wait


class BrokenStream(ConnectionError):
    """A length that no frame has: the two sides do not speak the same language."""


def encode(message: Message) -> bytes:
    """One frame."""
    return encode_payload(message.SerializeToString())


def encode_payload(payload: bytes) -> bytes:
    """One frame, of a message in its serial form."""
    assert len(payload) <= MAX_FRAME_BYTES, f"a frame of {len(payload)} bytes"
    return _LENGTH.pack(len(payload)) + payload


def _decode_length(
    received: bytes | bytearray, start: int = 0, max_bytes: int = MAX_FRAME_BYTES
) -> int:
    length: int = _LENGTH.unpack_from(received, start)[0]
    if length > max_bytes:
        raise BrokenStream(f"a frame of {length} bytes; at most {max_bytes}")
    return length


class FrameBuffer:
    """Bytes of a stream as they come, cut into frames of at most `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        self._received = bytearray()

    def take_in(self, sock: socket.socket) -> bool:
        """Read what has come, without waiting; False: the stream is over."""
        for _ in range(_MAX_CHUNKS):
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

    def take(self) -> list[bytes]:
        """The payloads of all frames that are here whole, once. Raises BrokenStream."""
        received, payloads, start = self._received, [], 0
        while len(received) - start >= _LENGTH.size:
            first = start + _LENGTH.size
            end = first + _decode_length(received, start, self.max_bytes)
            if len(received) < end:
                break
            payloads.append(bytes(received[first:end]))
            start = end
        del received[:start]
        return payloads


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
    """The asyncio side of `FrameSocket.receive`."""
    try:
        length = _decode_length(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None
