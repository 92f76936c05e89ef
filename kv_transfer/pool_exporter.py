"""The source's end of `shm` and `cuda_ipc`: a thread that hands the pool's memory to pullers.

Passes a description and file descriptors to processes of the same user and nothing else; who pulls
which block is not its business.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence

from ..core.errors import HandoffFailed, StartupFailed
from ..core.same_host import require_same_user, socket_address
from .accept_thread import AcceptThread
from .pool_address import PoolDescription

_log = logging.getLogger(__name__)
_BACKLOG = 64
_SEND_TIMEOUT_S = 1.0


class PoolExporter:
    """Serves until `close`. What is described and the descriptors must stay open as long."""

    def __init__(self, description: PoolDescription, fds: Sequence[int]) -> None:
        """Raises StartupFailed if the incarnation is exported already."""
        assert len(fds) == description.num_fds
        self._packed = description.pack()
        self._fds = list(fds)
        # SEQPACKET: description and descriptors arrive as one message or not at all.
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(socket_address(description.incarnation))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise StartupFailed(f"cannot export the KV pool: {error}") from error
        self._accepting = AcceptThread(listener, "kv-exporter", self._admit)

    def close(self) -> None:
        """Stop serving. Mappings that pullers hold stay valid."""
        self._accepting.close()

    def _admit(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(_SEND_TIMEOUT_S)
            try:
                require_same_user(connection)
                socket.send_fds(connection, [self._packed], self._fds)
            except (OSError, HandoffFailed) as error:
                _log.warning("the KV pool was not passed to a peer: %s", error)
