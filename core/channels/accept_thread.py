"""A listening socket, the thread that accepts its connections, and a thread for each of them.

accept ─► Newcomers.admit ─► a thread of its own: serve ... proven ...     close: hang up, wait
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from .token_bucket import TokenBucket

_log = logging.getLogger(__name__)

_RETRY_S = 0.1  # after accept failed, e.g. for lack of file descriptors
MAX_PER_S, BURST = 10, 256  # connections: these take less than a hundredth of a core
MAX_PENDING = 64  # unauthenticated connections

Serve = Callable[[socket.socket], None]


class Newcomers:
    """Connections of one server, each served on a thread of its own.

    If too many are unauthenticated, the oldest of these are shut down, so that they do not keep
    others out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        # Unauthenticated ones, as duplicates: `serve` may wrap the connection.
        self._pending: dict[threading.Thread, socket.socket] = {}
        self._is_closed = False

    def admit(self, connection: socket.socket, serve: Serve) -> None:
        """`serve` owns the connection, and must not raise."""
        thread = threading.Thread(
            target=self._run, args=(connection, serve), name="newcomer", daemon=True
        )
        try:
            with self._lock:
                if self._is_closed:
                    raise OSError("the server is closed")
                if len(self._pending) >= MAX_PENDING:
                    with self._pending.pop(next(iter(self._pending))) as eldest:
                        _hang_up(eldest)
                self._pending[thread] = connection.dup()
                thread.start()
                self._threads.add(thread)
        except (OSError, RuntimeError) as error:
            _log.warning("a connection was not admitted: %s", error)
            self._forget(thread)
            connection.close()

    def proven(self) -> None:
        """Called on a connection's thread: it is authenticated, and not shut down for others."""
        self._forget(threading.current_thread())

    def close(self, timeout_s: float) -> None:
        """Shut down all unauthenticated connections; wait at most `timeout_s` for all threads."""
        by_s = time.monotonic() + timeout_s
        with self._lock:
            self._is_closed = True
            for pending in self._pending.values():
                _hang_up(pending)
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, by_s - time.monotonic()))

    def _run(self, connection: socket.socket, serve: Serve) -> None:
        try:
            serve(connection)
        finally:
            self.proven()
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _forget(self, thread: threading.Thread) -> None:
        with self._lock:
            pending = self._pending.pop(thread, None)
        if pending is not None:
            pending.close()


def _hang_up(connection: socket.socket) -> None:
    """Shut it down: its thread reads the end of the stream."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class AcceptThread:
    """Owns `listener`; each connection is served among `newcomers`.

    Those beyond `MAX_PER_S` wait in the kernel, or are refused there: each that is admitted takes
    time from the engine, which shares the interpreter.
    """

    def __init__(
        self, listener: socket.socket, name: str, newcomers: Newcomers, serve: Serve
    ) -> None:
        self._listener = listener
        self._newcomers, self._serve = newcomers, serve
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections."""
        self._is_closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        pace = TokenBucket(BURST, BURST / MAX_PER_S, time.monotonic())
        while not self._is_closing.is_set():
            if (wait_s := pace.wait_s(1, time.monotonic())) and not self._is_closing.wait(wait_s):
                continue
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._is_closing.wait(_RETRY_S):
                    _log.warning("%s cannot accept: %s", self._thread.name, error)
                continue
            pace.spend(1, time.monotonic())
            self._newcomers.admit(connection, self._serve)
