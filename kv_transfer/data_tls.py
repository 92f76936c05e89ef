"""Mutual TLS around data connections: paths and names that a process is told, contexts made anew.

Files are read at each connection, so that renewed ones count from then on. Knows no role: who is
told the names knows which certificates they stand for.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DataTls:
    """This process's certificate, and what a source's and a puller's must say (DNS names)."""

    ca: str
    chain: str
    key: str
    source_name: str
    puller_name: str

    def wrap_source(self, connection: socket.socket) -> socket.socket:
        """The source's end. Raises OSError unless the other end is a puller of this cluster."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        wrapped = self._ready(context).wrap_socket(connection, server_side=True)
        names = (wrapped.getpeercert() or {}).get("subjectAltName", ())
        if ("DNS", self.puller_name) not in names:
            wrapped.close()
            raise ConnectionError(f"the certificate is not that of {self.puller_name}")
        return wrapped

    def wrap_puller(self, connection: socket.socket) -> socket.socket:
        """The puller's end. Raises OSError unless the other end is a source of this cluster."""
        context = self._ready(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        return context.wrap_socket(connection, server_hostname=self.source_name)

    def _ready(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.chain, self.key)
        context.load_verify_locations(self.ca)
        return context
