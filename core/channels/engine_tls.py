"""Mutual TLS of an engine process: its files and names, contexts that follow renewed files, and
pumps: threads that encrypt and decrypt for the thread that uses a connection.

    owner ◄── plain bytes, a socket pair ──► pump's thread ◄── TLS ──► the other host

Only the pump's thread uses the TLS object, and the owner never waits for encryption. When one side
ends, so does the other, after the data sent before.

Files are read at each connection, so renewed ones take effect from then on; while they are invalid,
as between the writing of a chain and of its key, the previous contents are used. Knows no role: the
caller knows which certificates the names stand for.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 64 << 10  # at least a TLS record: none stays in the TLS object, where poll sees none
_RECORD_BYTES = 16 << 10
_MAX_HELD_BYTES = 1 << 20  # buffered per direction: beyond, nothing more is read for it

_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

_running: set[threading.Thread] = set()  # pumps of this process

WrapSocket = Callable[[socket.socket], socket.socket]  # e.g. into TLS; raises OSError


@dataclass(frozen=True, slots=True)
class Secured:
    """A TLS connection. `names`: the DNS names in the other end's certificate."""

    connection: ssl.SSLSocket
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class EngineTls:
    """This process's certificate, and the DNS names that others' certificates must have."""

    ca: str
    chain: str
    key: str
    gateway_name: str
    prefill_name: str
    decode_name: str

    @property
    def engine_names(self) -> frozenset[str]:
        """Any engine may pull from any other."""
        return frozenset((self.prefill_name, self.decode_name))

    def accept(self) -> Callable[[socket.socket], Secured]:
        """For accepted connections: raises OSError unless the other end is of this cluster."""
        contexts = TlsContexts(self.ca, self.chain, self.key, ssl.PROTOCOL_TLS_SERVER)

        def secure(connection: socket.socket) -> Secured:
            secured = contexts.newest().wrap_socket(connection, server_side=True)
            return Secured(secured, _names(secured))

        return secure

    def source_wrap(self) -> WrapSocket:
        """For a source: raises OSError unless the other end is an engine of this cluster."""
        accept = self.accept()

        def wrap(connection: socket.socket) -> socket.socket:
            secured = accept(connection)
            self._require_engine(secured.connection, secured.names)
            return secured.connection

        return wrap

    def puller_wrap(self) -> Callable[[socket.socket], ssl.SSLSocket]:
        """For a puller: raises OSError unless the other end is an engine of this cluster."""
        contexts = TlsContexts(self.ca, self.chain, self.key, ssl.PROTOCOL_TLS_CLIENT)

        def wrap(connection: socket.socket) -> ssl.SSLSocket:
            context = contexts.newest()
            context.check_hostname = False  # one of two names: checked below
            secured = context.wrap_socket(connection)
            self._require_engine(secured, _names(secured))
            return secured

        return wrap

    def _require_engine(self, connection: ssl.SSLSocket, names: frozenset[str]) -> None:
        if names.isdisjoint(self.engine_names):
            connection.close()
            wanted = " or ".join(sorted(self.engine_names))
            raise ConnectionError(f"the certificate is not that of {wanted}")


def _names(connection: ssl.SSLSocket) -> frozenset[str]:
    """The DNS names in the other end's certificate. Raises OSError if the other end is gone."""
    try:
        found = (connection.getpeercert() or {}).get("subjectAltName", ())
    except (OSError, ValueError) as error:
        connection.close()
        raise ConnectionError("the other end hung up") from error
    return frozenset(str(each[1]) for each in found if each[0] == "DNS")


class TlsContexts:
    """The TLS contexts of accepting or of dialling ends. Any thread may use them."""

    def __init__(self, ca: str, chain: str, key: str, protocol: int) -> None:
        self._ca, self._chain, self._key = ca, chain, key
        self._protocol = protocol
        self._lock = threading.Lock()
        self._last: ssl.SSLContext | None = None
        with contextlib.suppress(OSError):  # the files may be valid when a connection is made
            self._last = self._load()

    def newest(self) -> ssl.SSLContext:
        """A context of the files, or of their last valid contents; raises OSError."""
        with self._lock:
            try:
                self._last = self._load()
            except OSError as error:
                if self._last is None:
                    raise
                _log.error(
                    "%s, %s: %s; the previous ones stay in use", self._chain, self._key, error
                )
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


def plain_end(secured: ssl.SSLSocket) -> socket.socket:
    """The socket to use instead of `secured`, which a pump owns from now on. Raises OSError."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=_pump, args=(secured, theirs), name="tls", daemon=True)
    _running.add(thread)
    try:
        thread.start()
    except RuntimeError as error:
        _running.discard(thread)
        ours.close()
        theirs.close()
        raise OSError(str(error)) from error
    return ours


def wait_for_pumps(timeout_s: float) -> None:
    """Before the process ends: wait until what owners sent before they closed is encrypted and
    sent."""
    until_s = time.monotonic() + timeout_s
    for thread in list(_running):
        if thread.is_alive():
            thread.join(max(0.0, until_s - time.monotonic()))


@dataclass(slots=True)
class _End:
    """One side of a pump: its socket, and what is still to be written to it.

    The process's other threads get the interpreter at each call of a socket, and give it back late:
    there are no more calls than it takes.
    """

    socket: socket.socket
    unsent: bytearray = field(default_factory=bytearray)
    is_over: bool = False  # it was read to its end
    events: int = 0  # that it is polled for

    def reads_for(self, other: _End) -> bool:
        """Whether more can be read for the other side."""
        return not self.is_over and len(other.unsent) < _MAX_HELD_BYTES

    def read_for(self, other: _End) -> None:
        """Read what has arrived; after less than a record, poll reports if there is more."""
        num_read = _RECORD_BYTES
        while num_read >= _RECORD_BYTES and self.reads_for(other):
            try:
                data = self.socket.recv(_CHUNK_BYTES)
            except _NOT_NOW:
                return
            except OSError:  # closed by its owner with unread data, or without close_notify
                data = b""
            num_read, self.is_over = len(data), not data
            other.unsent += data

    def write(self) -> None:
        """Write what it takes. Data for a side that cannot be written to is dropped, as that side's
        end is read next."""
        try:
            while self.unsent:
                with memoryview(self.unsent) as held, held[:_CHUNK_BYTES] as part:
                    num_sent = self.socket.send(part)
                del self.unsent[:num_sent]
        except _NOT_NOW:
            return
        except OSError:
            self.unsent.clear()

    def watch(self, poll: select.poll, other: _End) -> None:
        """Poll for what can be done; if that is nothing, not at all: poll reports a hang-up of any
        registered socket."""
        events = self.reads_for(other) * select.POLLIN | bool(self.unsent) * select.POLLOUT
        if events and events != self.events:
            poll.register(self.socket, events)
        elif self.events and not events:
            poll.unregister(self.socket)
        self.events = events


def _pump(secured: ssl.SSLSocket, plain: socket.socket) -> None:
    """Pass data on in both directions until one side ends; what it sent before still arrives."""
    tls, owner, poll = _End(secured), _End(plain), select.poll()
    try:
        secured.setblocking(False)
        plain.setblocking(False)
        while not ((tls.is_over and not owner.unsent) or (owner.is_over and not tls.unsent)):
            tls.watch(poll, owner)
            owner.watch(poll, tls)
            ready = [fd for fd, _ in poll.poll()]
            if secured.fileno() in ready:
                tls.read_for(owner)
            if plain.fileno() in ready:
                owner.read_for(tls)
            owner.write()
            tls.write()
    finally:
        secured.close()
        plain.close()
        _running.discard(threading.current_thread())
