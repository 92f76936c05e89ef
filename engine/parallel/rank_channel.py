"""Messages between rank 0 and the other ranks of an engine, over one socket pair each, or one TCP
connection to a rank of another host.

    | kind, order: uint32 | length: uint64 | payload |      perhaps with file descriptors

File descriptors are not sent to another host. An order has a number, which its answer carries; 0:
a message without an answer. Both ends belong to one engine and one user. Owns the framing; the
payloads are defined by the senders.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass

_HEADER = struct.Struct("<IIQ")
_MAX_FDS = 4
COUNTS = struct.Struct("<QQ")  # messages that a rank has handled, bytes that it has loaded
_CUT_OFF = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


class MessageKind(enum.IntEnum):
    """The kind of a message, which defines its payload."""

    # rank 0 to the others
    CONFIGURE = 1  # JSON; answered with the rank's memory handle once the weights are loaded
    CONNECT = 2  # all ranks are loaded: their handles, msgpack
    STEP = 3  # parallel_runner.py
    COPY_BLOCKS = 4  # int64 [2, pairs]
    EXPORT_POOL = 5  # MessagePack, with the generation page
    OPEN_WINDOW = 6  # MessagePack: the pool that the rank will pull from
    PULL = 7  # kv_transfer/ranks/ranked.py
    CANCEL_PULL = 8
    CLOSE_WINDOW = 9
    HOST_MEMORY = 10  # ranked_copies.py
    COPY_HOST = 11
    ADAPTER = 12  # ranked_adapters.py
    DRAFT = 15  # the same payload as STEP
    GENERATIONS = 16  # int64 ids [n], uint64 [n]; kv_transfer/ranks/mirrored_generations.py
    # the others to rank 0
    ANSWER = 20
    LINE = 21  # text for people
    FAILED = 22  # JSON: the error that ends the rank
    RESULT = 24  # of a step, see pipeline_runner.py
    TAKEN = 25  # COUNTS, a few times a second


@dataclass(frozen=True, slots=True)
class RankMessage:
    """One message; the receiver closes `fds`."""

    kind: MessageKind
    order: int
    payload: memoryview
    fds: tuple[int, ...] = ()


class RankChannel:
    """One end of a channel: one thread receives, any thread sends. `host`: the host of the other
    end; empty: this host."""

    def __init__(self, sock: socket.socket, host: str = "") -> None:
        self.host = host
        self._socket = sock
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def set_timeout(self, timeout_s: float) -> None:
        """Let `send` raise TimeoutError once the other end has not read for `timeout_s`."""
        self._socket.settimeout(timeout_s)

    def send(
        self, kind: MessageKind, payload: bytes = b"", *, order: int = 0, fds: Sequence[int] = ()
    ) -> None:
        """Raises OSError if the other end has closed or does not read."""
        header = _HEADER.pack(kind, order, len(payload))
        with self._sending:
            if fds and not self.host:
                # The header is far smaller than the buffer: it goes out whole or not at all.
                socket.send_fds(self._socket, [header], list(fds))
                self._socket.sendall(payload)
            else:
                self._socket.sendall(header + payload)

    def answer(self, order: int, payload: bytes) -> None:
        """Send the answer to `order` to rank 0, from any thread; raises as `send`."""
        self.send(MessageKind.ANSWER, payload, order=order)

    def receive(self) -> RankMessage | None:
        """Wait for the next message; None if the other end has closed."""
        try:
            header, fds, _, _ = socket.recv_fds(
                self._socket, _HEADER.size, _MAX_FDS, socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC
            )
            whole = bytearray(_HEADER.size)
            whole[: len(header)] = header
            if not (header and self._fill(memoryview(whole)[len(header) :])):
                return None
            kind, order, length = _HEADER.unpack(whole)
            payload = bytearray(length)
            if not self._fill(memoryview(payload)):
                return None
        except OSError as error:
            if not (isinstance(error, ConnectionError) or error.errno in _CUT_OFF):
                raise
            return None
        return RankMessage(MessageKind(kind), order, memoryview(payload), tuple(fds))

    def _fill(self, rest: memoryview) -> bool:
        """Receive until `rest` is full; False if the stream ends before."""
        while rest:
            count = self._socket.recv_into(rest)
            if count == 0:
                return False
            rest = rest[count:]
        return True

    def close(self) -> None:
        """Ends the `receive` of both ends, also one that is blocked."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
