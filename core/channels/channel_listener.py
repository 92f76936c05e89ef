"""An engine's listening sockets: a unix one for processes of its user, a port for other hosts.

    accept ─► thread of its own, 2 s: (TLS) ─► handshake ─► check ─► accepted ─► `on_channel`

Connections not authenticated in time are closed; if there are too many, the oldest first. None of
this runs on the thread that uses the channels. Knows no message.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from ..errors import BatonError, StartupFailed
from .accept_thread import AcceptThread, Newcomers
from .addresses import require_same_user, socket_address
from .admission import ADMIT_S, SOCKET, THIS_HOST, accept, admit, refuse, tune
from .channel import Channel
from .engine_tls import Secured, plain_end
from .handshake import Listener, Opening

log = logging.getLogger(__name__)

_BACKLOG = 64

OnChannel = Callable[[Opening, Channel], None]


@dataclass(frozen=True, slots=True)
class AcceptPolicy:
    """Which dialers are accepted.

    `keys`: by key id; a dialer must hold one of them. `check` gets an authenticated opening and the
    DNS names in the dialer's certificate, None on this host or without TLS; it raises BatonError,
    and may block for a second.
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
        policy: AcceptPolicy,
        secure: Callable[[socket.socket], Secured] | None = None,
    ) -> None:
        """Listen at `host`, on any free port if `port` is 0; `addresses` returns, for a port, the
        addresses that others dial. `secure` begins TLS and raises OSError. Raises StartupFailed.
        """
        self._incarnation = incarnation
        self._policy = policy
        self._secure = secure
        self._lock = threading.Lock()
        self._newcomers = Newcomers()
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
        """Pass every channel to `on_channel`, which is called on other threads."""

        def accepting(listener: socket.socket, name: str, *, is_local: bool) -> AcceptThread:
            serve = partial(self._admit, on_channel, is_local)
            return AcceptThread(listener, name, self._newcomers, serve)

        self._accepting = [
            accepting(self._local, "channels of this host", is_local=True),
            accepting(self._remote, "channels of other hosts", is_local=False),
        ]

    def close(self) -> None:
        """Accept no more connections, nor pending ones; existing channels stay open."""
        with self._lock:
            self._is_closed = True
        self._newcomers.close(0.0)
        for accepting in self._accepting:
            accepting.close()
        if not self._accepting:
            self._local.close()
            self._remote.close()

    def _admit(self, on_channel: OnChannel, is_local: bool, connection: socket.socket) -> None:
        names = None
        try:
            connection.settimeout(ADMIT_S)
            if is_local:
                require_same_user(connection)
            elif self._secure is not None:
                secured = self._secure(connection)
                connection, names = secured.connection, secured.names
            opening = self._handshake(connection, names, is_local)
            if isinstance(connection, ssl.SSLSocket):
                connection = plain_end(connection)
        except (OSError, BatonError) as error:
            log.debug("refused a channel: %s", error)
            connection.close()
            return
        channel = Channel(connection)
        with self._lock:  # once `close` has returned, no channel is passed on
            if not self._is_closed:
                on_channel(opening, channel)
                return
        channel.close()

    def _handshake(
        self, connection: socket.socket, names: frozenset[str] | None, is_local: bool
    ) -> Opening:
        """Raises OSError, BatonError."""
        addresses = (THIS_HOST,) if is_local else self._addresses
        theirs = Listener(self._key_of, self._policy.purposes, addresses)
        opening = admit(connection, theirs)
        if not is_local:
            tune(connection, opening.purpose)
        self._newcomers.proven()  # before `check`, which may block
        try:
            self._policy.check(opening, names)
        except BatonError as error:
            log.warning("refused a channel: %s", error.message)
            refuse(connection, error.message)
            raise
        accept(connection)
        return opening

    def _key_of(self, opening: Opening) -> bytes | None:
        is_ours = opening.listener == self._incarnation
        return self._policy.keys.get(opening.key_id) if is_ours else None
