"""A listening socket and the thread that takes in whoever connects, until it is closed."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

from ..pace import Pace

_log = logging.getLogger(__name__)

_RETRY_S = 0.1  # after accept failed, e.g. for want of file descriptors
MAX_PER_S, BURST = 10, 256  # connections: a crowd takes less than a hundredth of a core


class AcceptThread:
    """Owns `listener`; `admit` gets each connection, on the thread, and must not raise.

    More than `MAX_PER_S` of them wait in the kernel, or are refused there: whoever is admitted
    costs the engine, which shares the interpreter, some of its time.
    """

    def __init__(
        self, listener: socket.socket, name: str, admit: Callable[[socket.socket], None]
    ) -> None:
        self._listener = listener
        self._admit = admit
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take in nobody else; returns when the last `admit` has."""
        self._is_closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        pace = Pace(MAX_PER_S, BURST)
        while not self._is_closing.is_set():
            if (wait_s := pace.wait_s()) and not self._is_closing.wait(wait_s):
                continue
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._is_closing.wait(_RETRY_S):
                    _log.warning("%s cannot accept: %s", self._thread.name, error)
                continue
            pace.take()
            self._admit(connection)
