"""TLS beside the thread that uses a connection: a thread of its own encrypts and decrypts.

    owner ◄── plain bytes, a socket pair ──► pump's thread ◄── TLS ──► the other host

One thread alone touches the TLS object, and the owner waits for no encryption. The end of either
side is the end of the other, behind what came before it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time

_CHUNK_BYTES = 64 << 10
_MAX_HELD_BYTES = 1 << 20  # of a direction: its reader is behind, nothing more is read for it

_running: set[threading.Thread] = set()  # pumps of this process


def plain_end(secured: ssl.SSLSocket) -> socket.socket:
    """What to use instead of `secured`, which belongs to the pump from now on. Raises OSError."""
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
    """Before the process ends: until all that owners had sent when they ended is on its way."""
    until_s = time.monotonic() + timeout_s
    for thread in list(_running):
        if thread.is_alive():
            thread.join(max(0.0, until_s - time.monotonic()))


class _Pump:
    """Belongs to its thread. What one side sent before its end still reaches the other, and what
    cannot reach a side any more is dropped: that side's end is about to be read.
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
        """Until there is something to do; False: never again."""
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
            except OSError:  # e.g. an end without a goodbye
                data = b""
            self._is_secured_over = not data
            self._to_plain += data

    def _read_plain(self) -> None:
        while not self._is_plain_over and len(self._to_secured) < _MAX_HELD_BYTES:
            try:
                data = self._plain.recv(_CHUNK_BYTES)
            except BlockingIOError:
                return
            except OSError:  # its owner closed it with something unread
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
    """An end that hung up is reported as long as it is watched at all."""
    if events := reads * select.POLLIN | writes * select.POLLOUT:
        poll.register(end, events)
    else:
        with contextlib.suppress(KeyError):
            poll.unregister(end)
