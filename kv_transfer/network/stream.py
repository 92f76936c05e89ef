"""A byte stream on which every wait is bounded: exact reads and writes by a deadline.

A wait ends early when no byte passes for `SILENCE_S`. Knows sockets, plain or with TLS, but no
message.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator

from ...core.errors import HandoffFailed

SILENCE_S = 1.2  # a peer that sends nothing for so long is lost, as an engine is to gateways
_FIRST_PAUSE_S = 0.005
_FOREVER_S = 365 * 86400.0
_KEEPALIVE = (  # on an idle connection, both ends detect within 5 s that the other is gone
    (socket.TCP_KEEPIDLE, 2),
    (socket.TCP_KEEPINTVL, 1),
    (socket.TCP_KEEPCNT, 3),
)
_BUFFER_BYTES = 4 << 20  # lets both ends work at once; the kernel may grant less


class ConnectionBroken(HandoffFailed):
    """The connection was reset or closed; connecting again may succeed."""


class Deadline:
    """A time on the monotonic clock; None: no deadline."""

    def __init__(self, seconds: float | None) -> None:
        self._at_s = time.monotonic() + (_FOREVER_S if seconds is None else seconds)
        self._silence_s = _FOREVER_S if seconds is None else SILENCE_S

    def remaining_s(self) -> float:
        """Raises HandoffFailed once it has passed."""
        remaining_s = self._at_s - time.monotonic()
        if remaining_s <= 0:
            raise HandoffFailed("the peer takes too long")
        return remaining_s

    def outlasts(self, seconds: float) -> bool:
        """Whether it is more than `seconds` away."""
        return time.monotonic() + seconds < self._at_s

    def patience_s(self) -> float:
        """How long to wait for the next byte to pass. Raises HandoffFailed once it has passed."""
        return min(self.remaining_s(), self._silence_s)


class Recovery:
    """Reconnecting, from a connection's first break to the next progress: when, and for how long.

    The first attempt is immediate, then pauses double. `deadline`: of the attempts.
    """

    def __init__(self) -> None:
        self.deadline: Deadline | None = None
        self._pause_s = 0.0

    def pause(self, error: ConnectionBroken) -> None:
        """The connection broke (again): wait until the next attempt. Raises `error` if the limit
        has passed."""
        if self.deadline is None:
            self.deadline = Deadline(SILENCE_S)
        elif not self.deadline.outlasts(self._pause_s):
            raise error
        time.sleep(self._pause_s)
        self._pause_s = max(_FIRST_PAUSE_S, 2 * self._pause_s)


class _WatchedDeadline(Deadline):
    """Also passes when the peer has closed the connection."""

    def __init__(self, seconds: float, fd: int) -> None:
        super().__init__(seconds)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLRDHUP)  # errors are always reported

    def remaining_s(self) -> float:
        if self._poll.poll(0):
            raise ConnectionBroken("the peer hung up")
        return super().remaining_s()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, TimeoutError) and error.errno is None:  # ours, not the kernel's
            raise HandoffFailed("the peer sends and reads nothing") from None
        raise ConnectionBroken(f"the connection broke: {error}") from error


class Stream:
    """One connection, used by one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)

    def read(self, num_bytes: int, deadline: Deadline) -> bytearray:
        """Read exactly `num_bytes`. Raises ConnectionBroken if the stream ends before, and
        HandoffFailed at the deadline."""
        data = bytearray(num_bytes)
        self.read_into(memoryview(data), deadline)
        return data

    def read_into(self, target: memoryview, deadline: Deadline) -> None:
        """Fill `target`; raises as `read`."""
        with _translated():
            while target:
                self._socket.settimeout(deadline.patience_s())
                count = self._socket.recv_into(target)
                if count == 0:
                    raise ConnectionBroken("the peer hung up")
                target = target[count:]

    def write(self, data: bytes | memoryview, deadline: Deadline) -> None:
        """Write all of `data`. Raises HandoffFailed if the peer is gone or does not read."""
        left = memoryview(data)
        with _translated():
            while left:
                self._socket.settimeout(deadline.patience_s())
                left = left[self._socket.send(left) :]

    def wrap(self, wrapping: Callable[[socket.socket], socket.socket], deadline: Deadline) -> None:
        """Replace the socket by `wrapping` of it, such as TLS. Raises HandoffFailed."""
        self._socket.settimeout(deadline.patience_s())
        try:
            self._socket = wrapping(self._socket)
        except (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError) as error:
            raise ConnectionBroken(f"no TLS with the peer: {error}") from error
        except OSError as error:
            raise HandoffFailed(f"no TLS with the peer: {error}") from error

    def watched(self, seconds: float) -> Deadline:
        """A deadline for what the peer does elsewhere; it also passes when the peer hangs up."""
        return _WatchedDeadline(seconds, self._socket.fileno())

    def hang_up(self) -> None:
        """End every wait on it, from any thread. Its user then closes it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        self._socket.close()
