"""The source's end of `shm` and `cuda_ipc`: a thread that hands the pool's memory to pullers.

Passes a description and file descriptors to processes of the same user that hold a puller's key,
and nothing else; who pulls which block is not its business.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence

from ...core.channels.accept_thread import AcceptThread, Newcomers
from ...core.channels.handshake import ANSWER_BYTES, OPENING_BYTES, Listener, Opening
from ...core.channels.same_host import require_same_user, socket_address
from ...core.errors import HandoffFailed, StartupFailed, Unauthenticated
from ..window.network_address import pair_key
from .pool_address import ADDRESS, PURPOSE, PoolDescription

_log = logging.getLogger(__name__)
_BACKLOG = 64
_TIMEOUT_S = 1.0  # for each message


class PoolExporter:
    """Serves until `close`. What is described and the descriptors must stay open as long."""

    def __init__(self, description: PoolDescription, fds: Sequence[int], key: bytes) -> None:
        """`key`: what pullers' keys are made from. Raises StartupFailed if the incarnation is
        exported already."""
        assert len(fds) == description.num_fds
        self._incarnation = description.incarnation
        self._packed = description.pack()
        self._fds = list(fds)
        self._key = key
        self._newcomers = Newcomers()
        # SEQPACKET: each message arrives as one or not at all, descriptors with it.
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(socket_address(description.incarnation))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise StartupFailed(f"cannot export the KV pool: {error}") from error
        self._accepting = AcceptThread(listener, "kv-exporter", self._newcomers, self._hand_over)

    def close(self) -> None:
        """Stop serving. Mappings that pullers hold stay valid."""
        self._accepting.close()
        self._newcomers.close(_TIMEOUT_S)

    def _hand_over(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(_TIMEOUT_S)
            try:
                require_same_user(connection)
                theirs = Listener(self._key_of, (PURPOSE,), (ADDRESS,))
                connection.send(theirs.challenge(connection.recv(OPENING_BYTES)))
                theirs.check(connection.recv(ANSWER_BYTES))
                socket.send_fds(connection, [self._packed], self._fds)
            except (OSError, HandoffFailed, Unauthenticated) as error:
                _log.warning("the KV pool was not passed to a peer: %s", error)

    def _key_of(self, opening: Opening) -> bytes | None:
        is_ours = opening.listener == self._incarnation
        return pair_key(self._key, opening.dialer) if is_ours else None
