"""Mutual TLS around data connections: paths and names that a process is told, contexts made anew.

Files are read at each connection, so that renewed ones count from then on; while they cannot be
used, as between the writing of a chain and of its key, what was read before stays. Knows no role:
who is told the names knows which certificates they stand for.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from dataclasses import dataclass

from .data_client import WrapSocket

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DataTls:
    """This process's certificate, and what a source's and a puller's must say (DNS names)."""

    ca: str
    chain: str
    key: str
    source_name: str
    puller_name: str

    def source_wrap(self) -> WrapSocket:
        """For a source's ends: raises OSError unless the other end is a puller of this cluster."""
        contexts = _Contexts(self, ssl.PROTOCOL_TLS_SERVER)

        def wrap(connection: socket.socket) -> socket.socket:
            wrapped = contexts.newest().wrap_socket(connection, server_side=True)
            names = (wrapped.getpeercert() or {}).get("subjectAltName", ())
            if ("DNS", self.puller_name) not in names:
                wrapped.close()
                raise ConnectionError(f"the certificate is not that of {self.puller_name}")
            return wrapped

        return wrap

    def puller_wrap(self) -> WrapSocket:
        """For a puller's ends: raises OSError unless the other end is a source of this cluster."""
        contexts = _Contexts(self, ssl.PROTOCOL_TLS_CLIENT)

        def wrap(connection: socket.socket) -> socket.socket:
            return contexts.newest().wrap_socket(connection, server_hostname=self.source_name)

        return wrap


class _Contexts:
    """Of one kind of end. Any thread may ask."""

    def __init__(self, tls: DataTls, protocol: int) -> None:
        self._tls = tls
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
                _log.error("%s, %s: %s; those before stay", self._tls.chain, self._tls.key, error)
            return self._last

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(self._protocol)
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._tls.chain, self._tls.key, password=_no_password)
        context.load_verify_locations(self._tls.ca)
        return context


def _no_password() -> str:
    """An encrypted key must not ask on the terminal."""
    raise OSError("the key is encrypted")
