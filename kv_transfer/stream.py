"""A byte stream on which every wait has an end: exact reads and writes by a deadline.

Knows sockets, plain or with TLS, and nothing of what is said.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable

from ..core.errors import HandoffFailed

_FOREVER_S = 365 * 86400.0
_BUFFER_BYTES = 4 << 20  # both ends work while bytes wait here; the kernel may grant less


class Deadline:
    """A moment on the monotonic clock; None is none."""

    def __init__(self, seconds: float | None) -> None:
        self._at_s = time.monotonic() + (_FOREVER_S if seconds is None else seconds)

    def remaining_s(self) -> float:
        """Raises HandoffFailed once it has passed."""
        remaining_s = self._at_s - time.monotonic()
        if remaining_s <= 0:
            raise HandoffFailed("the peer takes too long")
        return remaining_s


class _WatchedDeadline(Deadline):
    """It has passed, too, when the peer has hung up."""

    def __init__(self, seconds: float, fd: int) -> None:
        super().__init__(seconds)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLRDHUP)  # and what is always told: errors

    def remaining_s(self) -> float:
        if self._poll.poll(0):
            raise HandoffFailed("the peer hung up")
        return super().remaining_s()


class Stream:
    """One connection. One thread uses it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)

    def read(self, num_bytes: int, deadline: Deadline) -> bytearray:
        """Exactly so many bytes. Raises HandoffFailed: the end came first, or the deadline."""
        data = bytearray(num_bytes)
        self.read_into(memoryview(data), deadline)
        return data

    def read_into(self, target: memoryview, deadline: Deadline) -> None:
        """Fill `target`; raises as `read`."""
        try:
            while target:
                self._socket.settimeout(deadline.remaining_s())
                count = self._socket.recv_into(target)
                if count == 0:
                    raise HandoffFailed("the peer hung up")
                target = target[count:]
        except TimeoutError:
            raise HandoffFailed("the peer takes too long") from None
        except OSError as error:
            raise HandoffFailed(f"the connection broke: {error}") from error

    def write(self, data: bytes | memoryview, deadline: Deadline) -> None:
        """All of it. Raises HandoffFailed: the peer hung up, or does not read."""
        try:
            self._socket.settimeout(deadline.remaining_s())
            self._socket.sendall(data)
        except TimeoutError:
            raise HandoffFailed("the peer takes too long") from None
        except OSError as error:
            raise HandoffFailed(f"the connection broke: {error}") from error

    def wrap(self, wrapping: Callable[[socket.socket], socket.socket], deadline: Deadline) -> None:
        """Go on inside of what `wrapping` makes of the socket. Raises HandoffFailed."""
        self._socket.settimeout(deadline.remaining_s())
        try:
            self._socket = wrapping(self._socket)
        except OSError as error:
            raise HandoffFailed(f"no TLS with the peer: {error}") from error

    def watched(self, seconds: float) -> Deadline:
        """A deadline for what the peer does beside the connection, while both keep that open."""
        return _WatchedDeadline(seconds, self._socket.fileno())

    def hang_up(self) -> None:
        """End every wait on it, from any thread; who uses it closes it then."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        self._socket.close()
