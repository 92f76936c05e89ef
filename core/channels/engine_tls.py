"""Mutual TLS of an engine process: paths and names that it is given, contexts made anew.

Files are read at each connection, so that renewed ones count from then on; while they cannot be
used, as between the writing of a chain and of its key, what was read before stays. Knows no role:
whoever gives the names knows which certificates they stand for.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass

_log = logging.getLogger(__name__)

WrapSocket = Callable[[socket.socket], socket.socket]  # e.g. into TLS; raises OSError


@dataclass(frozen=True, slots=True)
class Secured:
    """A TLS connection. `names`: the DNS names in the other end's certificate."""

    connection: ssl.SSLSocket
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class EngineTls:
    """This process's certificate, and what others' must have (DNS names)."""

    ca: str
    chain: str
    key: str
    gateway_name: str
    source_name: str
    puller_name: str

    def accept(self) -> Callable[[socket.socket], Secured]:
        """For ends that were connected to: raises OSError unless the other is of this cluster."""
        contexts = TlsContexts(self.ca, self.chain, self.key, ssl.PROTOCOL_TLS_SERVER)

        def secure(connection: socket.socket) -> Secured:
            secured = contexts.newest().wrap_socket(connection, server_side=True)
            names = (secured.getpeercert() or {}).get("subjectAltName", ())
            return Secured(secured, frozenset(str(each[1]) for each in names if each[0] == "DNS"))

        return secure

    def source_wrap(self) -> WrapSocket:
        """For a source's ends: raises OSError unless the other end is a puller of this cluster."""
        accept = self.accept()

        def wrap(connection: socket.socket) -> socket.socket:
            secured = accept(connection)
            if self.puller_name not in secured.names:
                secured.connection.close()
                raise ConnectionError(f"the certificate is not that of {self.puller_name}")
            return secured.connection

        return wrap

    def puller_wrap(self) -> Callable[[socket.socket], ssl.SSLSocket]:
        """For a puller's ends: raises OSError unless the other end is a source of this cluster."""
        contexts = TlsContexts(self.ca, self.chain, self.key, ssl.PROTOCOL_TLS_CLIENT)

        def wrap(connection: socket.socket) -> ssl.SSLSocket:
            return contexts.newest().wrap_socket(connection, server_hostname=self.source_name)

        return wrap


class TlsContexts:
    """Of one kind of end. For any thread."""

    def __init__(self, ca: str, chain: str, key: str, protocol: int) -> None:
        self._ca, self._chain, self._key = ca, chain, key
        self._protocol = protocol
        self._lock = threading.Lock()
        self._last: ssl.SSLContext | None = None
        with contextlib.suppress(OSError):  # they may be good when a connection is made
            self._last = self._load()

    def newest(self) -> ssl.SSLContext:
        """Of the files, or of what they held when they were last good; raises OSError."""
        with self._lock:
            try:
                self._last = self._load()
            except OSError as error:
                if self._last is None:
                    raise
                _log.error("%s, %s: %s; those before stay", self._chain, self._key, error)
            return self._last

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(self._protocol)
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._chain, self._key, password=_no_password)
        context.load_verify_locations(self._ca)
        return context


def _no_password() -> str:
    """An encrypted key must not prompt on the terminal."""
    raise OSError("the key is encrypted")
