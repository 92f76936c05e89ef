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
from dataclasses import dataclass

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 64 << 10
_MAX_HELD_BYTES = 1 << 20  # buffered per direction: beyond, nothing more is read for it

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
    thread = threading.Thread(target=_Pump(secured, theirs).run, name="tls", daemon=True)
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


class _Pump:
    """Used by its thread only. Data that one side sent before its end is still sent to the other;
    data for a side that cannot be written to is dropped, as that side's end is read next.
    """

    def __init__(self, secured: ssl.SSLSocket, plain: socket.socket) -> None:
        self._secured, self._plain = secured, plain
        secured.setblocking(False)
        plain.setblocking(False)
        self._to_plain, self._to_secured = bytearray(), bytearray()
        self._is_plain_over, self._is_secured_over = False, False

    def run(self) -> None:
        try:
            poll = select.poll()
            while self._wait(poll):
                self._read_secured()
                self._read_plain()
                self._write_plain()
                self._write_secured()
        finally:
            self._secured.close()
            self._plain.close()
            _running.discard(threading.current_thread())

    def _wait(self, poll: select.poll) -> bool:
        """Wait for something to do; False: there is nothing left to do."""
        if self._is_secured_over and not self._to_plain:
            return False
        if self._is_plain_over and not self._to_secured:
            return False
        reads_secured = not self._is_secured_over and len(self._to_plain) < _MAX_HELD_BYTES
        reads_plain = not self._is_plain_over and len(self._to_secured) < _MAX_HELD_BYTES
        _watch(poll, self._secured, reads_secured, bool(self._to_secured))
        _watch(poll, self._plain, reads_plain, bool(self._to_plain))
        if not (reads_secured and self._secured.pending()):
            poll.poll()
        return True

    def _read_secured(self) -> None:
        while not self._is_secured_over and len(self._to_plain) < _MAX_HELD_BYTES:
            try:
                data = self._secured.recv(_CHUNK_BYTES)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except OSError:  # e.g. an end without close_notify
                data = b""
            self._is_secured_over = not data
            self._to_plain += data

    def _read_plain(self) -> None:
        while not self._is_plain_over and len(self._to_secured) < _MAX_HELD_BYTES:
            try:
                data = self._plain.recv(_CHUNK_BYTES)
            except BlockingIOError:
                return
            except OSError:  # its owner closed it with unread data
                data = b""
            self._is_plain_over = not data
            self._to_secured += data

    def _write_plain(self) -> None:
        try:
            while self._to_plain:
                del self._to_plain[: self._plain.send(self._to_plain)]
        except BlockingIOError:
            return
        except OSError:
            self._to_plain.clear()

    def _write_secured(self) -> None:
        try:
            while self._to_secured:
                with memoryview(self._to_secured) as held, held[:_CHUNK_BYTES] as part:
                    sent = self._secured.send(part)
                del self._to_secured[:sent]
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError:
            self._to_secured.clear()


def _watch(poll: select.poll, end: socket.socket, reads: bool, writes: bool) -> None:
    """Poll `end` for these events; if there are none, not at all: poll reports a hang-up of any
    registered socket."""
    if events := reads * select.POLLIN | writes * select.POLLOUT:
        poll.register(end, events)
    else:
        with contextlib.suppress(KeyError):
            poll.unregister(end)
