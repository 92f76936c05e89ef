"""Where others reach an engine: a unix socket for processes of its user, a port for other hosts.

    accept ─► thread of its own, 2 s: (TLS) ─► handshake ─► may it? ─► accepted ─► `on_channel`

Whoever has not proven itself in time is closed, the eldest first when there are many. Nothing of
this happens on the thread that uses the channels. Knows no message.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from ..errors import BatonError, StartupFailed
from .accept_thread import AcceptThread
from .admission import ADMIT_S, SOCKET, THIS_HOST, accept, admit, refuse, tune
from .channel import Channel
from .engine_tls import Secured
from .handshake import Listener, Opening
from .same_host import require_same_user, socket_address
from .tls_pump import plain_end

log = logging.getLogger(__name__)

MAX_PENDING = 64  # connections that have proven nothing yet
_BACKLOG = 64

OnChannel = Callable[[Opening, Channel], None]


@dataclass(frozen=True, slots=True)
class Admission:
    """Who may have a channel.

    `keys`: by id, one of them must be proven. `check` gets a proven opening and the names of the
    certificate, None on this host or without TLS; it raises BatonError, may wait for a second.
    """

    keys: Mapping[bytes, bytes]
    purposes: Collection[bytes]
    check: Callable[[Opening, frozenset[str] | None], None]


class ChannelListener:
    """Accepts from `start` until `close`."""

    def __init__(
        self,
        incarnation: str,
        host: str,
        port: int,
        addresses: Callable[[int], Collection[str]],
        admission: Admission,
        secure: Callable[[socket.socket], Secured] | None = None,
    ) -> None:
        """Listen at `host`, on any free port if `port` is 0; `addresses` are those that others dial
        for a port. `secure` begins TLS and raises OSError. Raises StartupFailed.
        """
        self._incarnation = incarnation
        self._admission = admission
        self._secure = secure
        self._lock = threading.Lock()
        self._pending: list[_Pending] = []  # the eldest first
        self._local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._local.bind(socket_address(incarnation, SOCKET))
            self._local.listen(_BACKLOG)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._remote = socket.create_server(
                (host, port),
                family=family,
                backlog=_BACKLOG,
                dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
            )
        except OSError as error:
            self._local.close()
            raise StartupFailed(f"an engine cannot listen at {host}:{port}: {error}") from error
        self.port: int = self._remote.getsockname()[1]
        self._addresses = addresses(self.port)
        self._accepting: list[AcceptThread] = []
        self._is_closed = False

    def start(self, on_channel: OnChannel) -> None:
        """Hand every channel to `on_channel`, which is called on other threads."""

        def local(connection: socket.socket) -> None:
            self._begin(connection, on_channel, is_local=True)

        def remote(connection: socket.socket) -> None:
            self._begin(connection, on_channel, is_local=False)

        self._accepting = [
            AcceptThread(self._local, "channels of this host", local),
            AcceptThread(self._remote, "channels of other hosts", remote),
        ]

    def close(self) -> None:
        """Accept nobody else, not even who has come; channels stay their owners'."""
        with self._lock:
            self._is_closed = True
            for pending in self._pending:
                pending.hang_up()
        for accepting in self._accepting:
            accepting.close()
        if not self._accepting:
            self._local.close()
            self._remote.close()

    def _begin(self, connection: socket.socket, on_channel: OnChannel, *, is_local: bool) -> None:
        pending = _Pending(connection, is_local)
        with self._lock:
            if len(self._pending) >= MAX_PENDING:
                self._pending.pop(0).hang_up()
            self._pending.append(pending)
        thread = threading.Thread(target=self._admit, args=(pending, on_channel), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("cannot admit anybody: %s", error)
            self._over(pending)
            connection.close()

    def _admit(self, pending: _Pending, on_channel: OnChannel) -> None:
        try:
            opening = self._handshake(pending)
            connection = pending.connection
            if isinstance(connection, ssl.SSLSocket):
                connection = plain_end(connection)
        except (OSError, BatonError) as error:
            log.debug("refused a channel: %s", error)
            pending.connection.close()
            return
        finally:
            self._over(pending)
        channel = Channel(connection)
        with self._lock:  # `close` returns, and nobody is handed over any more
            if not self._is_closed:
                on_channel(opening, channel)
                return
        channel.close()

    def _over(self, pending: _Pending) -> None:
        """It is no stranger any more, or gone."""
        with self._lock, suppress(ValueError):
            self._pending.remove(pending)

    def _handshake(self, pending: _Pending) -> Opening:
        """Raises OSError, BatonError."""
        names = None
        pending.connection.settimeout(ADMIT_S)
        if pending.is_local:
            require_same_user(pending.connection)
        else:
            if self._secure is not None:
                secured = self._secure(pending.connection)
                pending.connection, names = secured.connection, secured.names
        addresses = (THIS_HOST,) if pending.is_local else self._addresses
        theirs = Listener(self._key_of, self._admission.purposes, addresses)
        opening = admit(pending.connection, theirs)
        if not pending.is_local:
            tune(pending.connection, opening.purpose)
        self._over(pending)  # strangers, however many, do not push out who is waiting for `check`
        try:
            self._admission.check(opening, names)
        except BatonError as error:
            log.warning("refused a channel: %s", error.message)
            refuse(pending.connection, error.message)
            raise
        accept(pending.connection)
        return opening

    def _key_of(self, opening: Opening) -> bytes | None:
        is_ours = opening.listener == self._incarnation
        return self._admission.keys.get(opening.key_id) if is_ours else None


@dataclass(slots=True, eq=False)
class _Pending:
    """A connection whose other end has proven nothing yet."""

    connection: socket.socket  # within TLS, once that has begun
    is_local: bool

    def hang_up(self) -> None:
        """Its thread finds it over. Not by `SSLSocket.shutdown`, which would end the TLS first."""
        with suppress(OSError):
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)
