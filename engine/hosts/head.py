"""Rank 0 of an engine on several hosts: listens at --master-addr until all ranks have joined.

Hosts may start in any order and wait for each other. A rank that disconnects before all have joined
may join again; a rank that does not belong to this engine is refused with the reason.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...core.channels.accept_thread import AcceptThread, Newcomers
from ...core.channels.admission import ADMIT_S, accept, admit, refuse, tune
from ...core.channels.engine_tls import EngineTls, plain_end
from ...core.channels.handshake import Listener, Opening
from ...core.engine_config import EngineConfig
from ...core.errors import BatonError, PermissionDenied, StartupFailed
from .joining import PURPOSE, id_of, read_request, refusal_of, request_of

log = logging.getLogger(__name__)

_BACKLOG = 64
_LOOK_S = 0.25  # interval of checks for joined ranks that have disconnected


@dataclass(frozen=True, slots=True)
class ClusterTrust:
    """Which ranks may join an engine: a rank must prove one of `keys`, by key id; `flags`: the
    engine's config as given on rank 0's host, before its role adjusts it."""

    role: str
    flags: EngineConfig
    keys: Mapping[bytes, bytes]
    tls: EngineTls | None


@dataclass(frozen=True, slots=True)
class JoinedRank:
    """A joined rank of another host. `host`: the address at which its peers connect to it."""

    connection: socket.socket
    host: str


def gather(trust: ClusterTrust, on_line: Callable[[str], None]) -> dict[int, JoinedRank]:
    """Wait for the ranks of all other hosts. Raises StartupFailed if it cannot listen."""
    with contextlib.closing(_Gathering(trust)) as gathering:
        return gathering.wait(on_line)


class _Gathering:
    """Accepts ranks of other hosts until `close`."""

    def __init__(self, trust: ClusterTrust) -> None:
        self._trust = trust
        config = trust.flags
        assert config.master_addr is not None
        self._ours = request_of(config, trust.role, 0, config.master_addr)
        self._ranks = range(config.ranks_per_host, config.num_ranks)
        self._address = config.master
        self._changed = threading.Condition()
        self._joined: dict[int, JoinedRank] = {}
        self._is_closed = False
        self._secure = None if trust.tls is None else trust.tls.source_wrap()
        address = (config.master_addr, config.master_port)
        family = socket.AF_INET6 if ":" in config.master_addr else socket.AF_INET
        try:
            listener = socket.create_server(address, family=family, backlog=_BACKLOG)
        except OSError as error:
            raise StartupFailed(
                f"--master-addr: cannot listen at {config.master}: {error}",
                hint="an address of this host; or --node-rank, if it is not the first",
            ) from error
        self._newcomers = Newcomers()
        self._accepting = AcceptThread(listener, "other hosts", self._newcomers, self._attend)

    def wait(self, on_line: Callable[[str], None]) -> dict[int, JoinedRank]:
        """Wait until all ranks have joined."""
        reported: list[int] = []
        with self._changed:
            while missing := [rank for rank in self._ranks if rank not in self._joined]:
                if missing != reported:
                    names = ", ".join(map(str, missing))
                    on_line(f"waiting at {self._address} for ranks of other hosts: {names}")
                    reported = missing
                self._changed.wait(_LOOK_S)
                self._drop_ended()
            joined, self._joined = self._joined, {}
            return joined

    def close(self) -> None:
        self._accepting.close()
        self._newcomers.close(0.0)
        with self._changed:
            self._is_closed = True
            for each in self._joined.values():
                each.connection.close()

    def _drop_ended(self) -> None:
        """Drop ranks that have disconnected: no rank sends yet, so only an end is readable."""
        poll = select.poll()
        for each in self._joined.values():
            poll.register(each.connection, select.POLLIN)
        ended = {fd for fd, _ in poll.poll(0)}
        for rank, each in [*self._joined.items()]:
            if each.connection.fileno() in ended:
                log.warning("rank %d on %s disconnected before all ranks joined", rank, each.host)
                del self._joined[rank]
                each.connection.close()

    def _attend(self, connection: socket.socket) -> None:
        """Admit one connection, on its own thread."""
        ends = [connection]  # the last one, of TLS if there is, is used
        try:
            connection.settimeout(ADMIT_S)
            if self._secure is not None:
                ends.append(self._secure(connection))
            opening = admit(ends[-1], Listener(self._key_of, (PURPOSE,), (self._address,)))
            accept(ends[-1])
            self._newcomers.proven()
            self._join(ends[-1], opening)
        except (OSError, BatonError) as error:
            text = error.message if isinstance(error, BatonError) else str(error)
            log.warning("refused a connection to %s: %s", self._address, text)
            if isinstance(error, PermissionDenied):
                refuse(ends[-1], text)
            for end in ends:
                with contextlib.suppress(OSError):
                    end.close()

    def _join(self, connection: socket.socket, opening: Opening) -> None:
        """Let the dialer join if its request fits. Raises OSError, PermissionDenied."""
        request = read_request(connection, opening)
        if refusal := refusal_of(request, self._ours):
            raise PermissionDenied(refusal)
        if request.rank not in self._ranks:
            raise PermissionDenied(f"rank {request.rank} does not belong to another host")
        with self._changed:
            self._drop_ended()
            if self._is_closed:
                raise OSError("all ranks have joined")
            if request.rank in self._joined:
                raise PermissionDenied(
                    f"--node-rank: rank {request.rank} has already joined, from "
                    f"{self._joined[request.rank].host}"
                )
            accept(connection)
            tune(connection, PURPOSE)
            plain = plain_end(connection) if isinstance(connection, ssl.SSLSocket) else connection
            plain.settimeout(None)
            self._joined[request.rank] = JoinedRank(plain, request.host)
            self._changed.notify_all()

    def _key_of(self, opening: Opening) -> bytes | None:
        is_ours = opening.listener == id_of(0)
        return self._trust.keys.get(opening.key_id) if is_ours else None
