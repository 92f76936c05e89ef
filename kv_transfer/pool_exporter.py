"""The source's end of `shm` and `cuda_ipc`: a thread that hands the pool's memory to pullers.

Passes a description and file descriptors to processes of the same user and nothing else; who pulls
which block is not its business.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence

from ..core.errors import HandoffFailed, StartupFailed
from .pool_address import PoolDescription, require_same_user, socket_address

_log = logging.getLogger(__name__)
_BACKLOG = 64
_SEND_TIMEOUT_S = 1.0
_RETRY_S = 0.1  # after accept failed, e.g. for want of file descriptors


class PoolExporter:
    """Serves until `close`. What is described and the descriptors must stay open as long."""

    def __init__(self, description: PoolDescription, fds: Sequence[int]) -> None:
        """Raises StartupFailed if the incarnation is exported already."""
        assert len(fds) == description.num_fds
        self._packed = description.pack()
        self._fds = list(fds)
        self._is_closing = threading.Event()
        # SEQPACKET: description and descriptors arrive as one message or not at all.
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(socket_address(description.incarnation))
            self._listener.listen(_BACKLOG)
        except OSError as error:
            self._listener.close()
            raise StartupFailed(f"cannot export the KV pool: {error}") from error
        self._thread = threading.Thread(target=self._serve, name="kv-exporter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Mappings that pullers hold stay valid."""
        self._is_closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while not self._is_closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._is_closing.wait(_RETRY_S):
                    _log.warning("the KV exporter cannot accept: %s", error)
                continue
            with connection:
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_SEND_TIMEOUT_S)
        try:
            require_same_user(connection)
            socket.send_fds(connection, [self._packed], self._fds)
        except (OSError, HandoffFailed) as error:
            _log.warning("the KV pool was not passed to a peer: %s", error)
