"""How a channel begins: the handshake on a connected socket, then the listener's decision.

    dialer                                     listener
      │ ── opening ────────────────────────►     │
      │ ◄──────────────────────── challenge ──   │
      │ ── answer ─────────────────────────►     │
      │ ◄── a frame: empty, or the refusal ───   │   to an authenticated dialer

Every wait has a timeout. Calls block, so they need a thread of their own.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress

from ..errors import NodeLost, PermissionDenied
from .addresses import host_and_port, require_same_user, socket_address
from .frames import LENGTH_BYTES, decode_length, encode_payload
from .handshake import ANSWER_BYTES, CHALLENGE_BYTES, OPENING_BYTES, Dialer, Listener, Opening

GATEWAY, PULLER = b"gateway", b"puller"  # purposes
SOCKET, THIS_HOST = "engine", "this host"  # of unix sockets: part of the name, address
ADMIT_S = 2.0  # how long a handshake may take

# A connection whose sent data is not acknowledged for this time is broken. To the kernel, a
# receiver with a full buffer looks the same: an engine may not read for seconds while long prompts
# arrive. Engines send each other little, and must detect a loss soon.
LOST_S = 1.2
GATEWAY_LOST_S = 5.0
MAX_REFUSAL_BYTES = 4096
_TCP_OPTIONS = (
    (socket.TCP_NODELAY, 1),
    (socket.TCP_KEEPIDLE, 1),
    (socket.TCP_KEEPINTVL, 1),
)

Secure = Callable[[socket.socket], socket.socket]  # begins TLS; raises OSError


def tune(connection: socket.socket, purpose: bytes) -> None:
    """Let a TCP connection send at once, and detect in time that its other end is gone."""
    lost_s = GATEWAY_LOST_S if purpose == GATEWAY else LOST_S
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (*_TCP_OPTIONS, (socket.TCP_USER_TIMEOUT, round(lost_s * 1000))):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def dial(
    purpose: bytes,
    key: bytes,
    *,
    dialer: str,
    listener: str,
    address: str | None,
    secure: Secure | None = None,
) -> socket.socket:
    """A connection that the engine `listener` has accepted: over its unix socket, or at `address`
    (host:port), there with TLS if `secure` is given.

    Raises OSError, NodeLost, Unauthenticated, PermissionDenied (refused by the listener),
    HandoffFailed (another user listens there).
    """
    connection = _connect(listener, address)
    try:
        if address is not None:
            tune(connection, purpose)
        if secure is not None and address is not None:
            connection = secure(connection)
        there = address or THIS_HOST
        ours = Dialer(key, purpose, dialer=dialer, listener=listener, address=there)
        _introduce(connection, ours)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(incarnation: str, address: str | None) -> socket.socket:
    if address is not None:
        try:
            return socket.create_connection(host_and_port(address), ADMIT_S)
        except ValueError as error:  # not a host name
            raise OSError(f"{address} is no address: {error}") from error
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(ADMIT_S)
        connection.connect(socket_address(incarnation, SOCKET))
        require_same_user(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _introduce(connection: socket.socket, ours: Dialer) -> None:
    until_s = time.monotonic() + ADMIT_S
    try:
        connection.sendall(ours.opening)
        connection.sendall(ours.answer(_read(connection, CHALLENGE_BYTES, until_s)))
        refusal = read_frame(connection, until_s, MAX_REFUSAL_BYTES)
    except OSError as error:
        raise NodeLost(f"the connection broke during the handshake: {error}") from error
    check_verdict(refusal)


def check_verdict(refusal: bytes) -> None:
    """Raises PermissionDenied unless the listener's frame is empty."""
    if refusal:
        raise PermissionDenied(refusal.decode("utf-8", "replace"))


def admit(connection: socket.socket, listener: Listener) -> Opening:
    """The listener's part: returns the verified opening; `accept` or `refuse` must follow.

    Raises OSError, Unauthenticated.
    """
    until_s = time.monotonic() + ADMIT_S
    connection.sendall(listener.challenge(_read(connection, OPENING_BYTES, until_s)))
    return listener.check(_read(connection, ANSWER_BYTES, until_s))


def accept(connection: socket.socket) -> None:
    """Raises OSError."""
    connection.sendall(encode_payload(b""))


def refuse(connection: socket.socket, reason: str) -> None:
    """Send an authenticated dialer the reason why it is refused."""
    with suppress(OSError):
        connection.sendall(encode_payload(reason.encode()[:MAX_REFUSAL_BYTES]))


def read_frame(connection: socket.socket, until_s: float, max_bytes: int) -> bytes:
    """Read one frame's payload, and no byte after it. Raises OSError."""
    length = decode_length(_read(connection, LENGTH_BYTES, until_s), 0, max_bytes)
    return _read(connection, length, until_s)


def _read(connection: socket.socket, num_bytes: int, until_s: float) -> bytes:
    """Raises OSError if the connection breaks, ends, or takes too long."""
    data = b""
    while len(data) < num_bytes:
        connection.settimeout(max(0.001, until_s - time.monotonic()))
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise ConnectionError("the other end hung up")
        data += part
    return data
