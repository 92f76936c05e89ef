"""One connection between two processes of one host: frames, and never a wait.

Knows no peer and no message: who is at the other end, and what is said, is its owner's business.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque

from .framing import MAX_CHUNKS, FrameBuffer, encode_payload


class ChannelBroken(Exception):
    """The channel is of no more use; the text says why."""


class DirectChannel:
    """Belongs to one thread."""

    def __init__(self, sock: socket.socket, max_frame_bytes: int, max_unsent_bytes: int) -> None:
        """Owns the connected socket.

        `max_frame_bytes`: how long a frame of the other side may be; `max_unsent_bytes`: how much
        is kept for a side that does not read.
        """
        sock.setblocking(False)
        self._socket = sock
        self._frames = FrameBuffer(max_frame_bytes)
        self._max_unsent_bytes = max_unsent_bytes
        self._unsent: deque[memoryview] = deque()
        self._num_unsent_bytes = 0
        self.is_closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` should be called once there is room to write."""
        return bool(self._unsent)

    def allow(self, max_frame_bytes: int, max_unsent_bytes: int) -> None:
        """As in `__init__`, from now on."""
        self._frames.max_bytes = max_frame_bytes
        self._max_unsent_bytes = max_unsent_bytes

    def send(self, payload: bytes) -> None:
        """Send a frame, or keep what the other side does not take yet. Raises ChannelBroken."""
        frame = memoryview(encode_payload(payload))
        self._num_unsent_bytes += len(frame)
        self._unsent.append(frame)
        self.flush()
        if self._num_unsent_bytes > self._max_unsent_bytes:
            raise ChannelBroken("the other side does not read")

    def flush(self) -> None:
        """Send what was kept, as far as the other side takes it. Raises ChannelBroken."""
        try:
            while self._unsent:
                num_sent = self._socket.send(self._unsent[0])
                self._num_unsent_bytes -= num_sent
                rest = self._unsent.popleft()[num_sent:]
                if rest:
                    self._unsent.appendleft(rest)
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelBroken(f"the other side cannot be told: {error}") from error

    def receive(self, max_chunks: int = MAX_CHUNKS) -> tuple[list[bytes], bool]:
        """The payloads of all frames that have come, and whether that was the last of it.

        `max_chunks`: of 64 KiB, read at once. Raises BrokenStream: what comes is no frame.
        """
        is_open = self._frames.take_in(self._socket, max_chunks)
        return self._frames.take(), not is_open

    def close(self) -> None:
        """The other side finds it over."""
        self.is_closed = True
        with contextlib.suppress(OSError):
            self._socket.close()
