"""Frames (frames.py) between two authenticated processes.

any thread ── send ──► frames ──► socket      `Channel` never blocks: it buffers what the socket
one thread ◄─ receive ─ frames ◄── socket     does not take; an empty frame is a sign of life
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque

from google.protobuf.message import Message

from .frames import (
    CHUNK_BYTES,
    LENGTH_BYTES,
    MAX_UNSENT_BYTES,
    FrameBuffer,
    decode_length,
    encode_payload,
)


class ChannelBroken(Exception):
    """The channel cannot be used any more; the text is the reason."""


class Channel:
    """`receive`, `fileno` and `close` belong to one thread; any thread may call the rest."""

    def __init__(self, sock: socket.socket, max_unsent_bytes: int = MAX_UNSENT_BYTES) -> None:
        """Owns the connected socket. `max_unsent_bytes`: limit of the send buffer."""
        sock.setblocking(False)
        self._socket = sock
        self._frames = FrameBuffer()
        self._max_unsent_bytes = max_unsent_bytes
        self._sending = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._num_unsent_bytes = 0
        self._received_s: float | None = None  # when the last frame arrived
        self.is_closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` must be called once the socket has room."""
        return bool(self._unsent)

    def send(self, payload: bytes) -> None:
        """Send a frame, buffering what the socket does not take. Raises ChannelBroken."""
        frame = memoryview(encode_payload(payload))
        with self._sending:
            self._num_unsent_bytes += len(frame)
            self._unsent.append(frame)
            self._flush()
            if self._num_unsent_bytes > self._max_unsent_bytes:
                raise ChannelBroken("the other side does not read its messages")

    def flush(self) -> None:
        """Send buffered bytes until the socket takes no more. Raises ChannelBroken."""
        with self._sending:
            self._flush()

    def _flush(self) -> None:
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
            raise ChannelBroken(f"the other side cannot be reached: {error}") from error

    def end_sending(self, until_s: float) -> None:
        """Send what is buffered until `until_s` (monotonic), blocking, then shut down the sending
        side.
        """
        with self._sending, contextlib.suppress(OSError, ChannelBroken):
            if self.is_closed:
                return
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            while self._unsent and (left_s := until_s - time.monotonic()) > 0:
                poll.poll(1000 * left_s)
                self._flush()
            self._socket.shutdown(socket.SHUT_WR)

    def receive(self) -> tuple[list[bytes], bool]:
        """The payloads of all frames that have arrived, and whether the stream has ended. Raises
        BrokenStream.
        """
        is_open = self._frames.take_in(self._socket)
        self._received_s = time.monotonic()
        return list(filter(None, self._frames.take())), not is_open

    def discard(self) -> bool:
        """Drop what has arrived; returns whether the stream is still open."""
        try:
            return bool(self._socket.recv(CHUNK_BYTES, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def is_silent(self, seconds: float) -> bool:
        """Whether the other side has sent at least once, but nothing for so long. Unread data
        counts as sent.
        """
        if self._received_s is None or time.monotonic() - self._received_s < seconds:
            return False
        with self._sending:
            if self.is_closed:
                return False
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            return not poll.poll(0)

    def restart_silence(self) -> None:
        """Measure the silence from now: this process itself was suspended."""
        if self._received_s is not None:
            self._received_s = time.monotonic()

    def close(self) -> None:
        """The other side sees the end of the stream."""
        self.is_closed = True
        with self._sending, contextlib.suppress(OSError):
            self._socket.close()


class FrameSocket:
    """An engine process's stream to its supervisor: one thread receives, any thread sends."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames = FrameBuffer()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Raises ConnectionError when the other side is gone."""
        frame = encode_payload(message.SerializeToString())
        with self._sending:
            self._socket.sendall(frame)

    def has_room(self) -> bool:
        """Whether a frame of some ten KB can be sent without blocking. True if the other side is
        gone: `send` then raises."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        return bool(poll.poll(0))

    def receive(self) -> bytes | None:
        """Wait for the first message, and read no more than that; None at the end of the stream.
        Raises BrokenStream."""
        length = self._read(LENGTH_BYTES)
        return None if length is None else self._read(decode_length(length))

    def _read(self, num_bytes: int) -> bytes | None:
        """Wait for so many bytes; None if the stream ends before."""
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while len(received) < num_bytes:
                # Less than asked for if a signal arrives in the meantime.
                data = self._socket.recv(num_bytes - len(received), socket.MSG_WAITALL)
                if not data:
                    return None
                received += data
            return received
        return None

    def receive_ready(self) -> tuple[list[bytes], bool]:
        """All messages that have arrived, and whether the stream has ended. Raises BrokenStream."""
        is_open = self._frames.take_in(self._socket)
        return self._frames.take(), not is_open

    def end(self) -> None:
        """Both sides' readers see the end of the stream, also one blocked in `receive`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
