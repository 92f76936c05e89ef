"""The source's end of data connections: a port on which linked pullers read one rank's pool.

    accept ─► opening, proof: within 2 s ─► requests: (judge ─► begin) ─► send ─► judge ─► verdict

A connection that does not authenticate in time is closed, the oldest first when there are many, so
that connections without a key cannot keep a puller out. The outlets send the blocks.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from ...core.channels.accept_thread import AcceptThread, Newcomers
from ...core.channels.engine_tls import WrapSocket
from ...core.channels.handshake import ANSWER_BYTES, OPENING_BYTES, Listener
from ...core.errors import HandoffFailed, StartupFailed, Unauthenticated
from ...engine.kv.block_pool import PADDING_BLOCK
from ...engine.kv.generations import GenerationsReader
from ..export.pool_address import PoolDescription
from ..window.block_pairs import Ids
from ..window.block_pieces import BlockCut
from ..window.network_address import keys_of
from ..window.transport import PullOutcome
from . import data_wire as wire
from .stream import Deadline, Stream

_log = logging.getLogger(__name__)

OPENING_S = 2.0
_MAX_PULLERS = 256
_CLOSE_S = 3.0
_REQUEST_S = 2.0  # for the rest of a request that has begun
_BACKLOG = 1024


class Outlet(Protocol):
    """Sends blocks to one puller."""

    def send(self, block_ids: Ids) -> None:
        """Send the pieces of these blocks, which may repeat.

        Returns when the pool is not read for them any more. Raises HandoffFailed: the puller's
        connection must end.
        """

    def close(self) -> None: ...


# Arguments: an authenticated puller's connection, its piece of the blocks, the id that its mode
# needs. Raises HandoffFailed.
MakeOutlet = Callable[[Stream, BlockCut, bytes], Outlet]


@dataclass(frozen=True, slots=True)
class ServedPool:
    """What a rank serves: its pool, the generations, the key that pullers' keys derive from."""

    description: PoolDescription
    generations: GenerationsReader
    key: bytes


class DataServer:
    """Serves one rank's pool at `port` until `close`."""

    def __init__(
        self,
        host: str,
        names: Sequence[str],
        outlets: Mapping[wire.Mode, MakeOutlet],
        wrap: WrapSocket = lambda connection: connection,
    ) -> None:
        """Listen at `host`, on a port that the system chooses. `names`: the host names that pullers
        dial to reach it.

        Raises StartupFailed if there is no such host.
        """
        self._outlets = outlets
        self._wrap = wrap
        self._lock = threading.Lock()
        self._newcomers = Newcomers()
        self._pullers: set[Stream] = set()
        self._is_closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise StartupFailed(f"cannot listen for pullers at {host}: {error}") from error
        self.port: int = self._listener.getsockname()[1]
        self._addresses = [f"{name}:{self.port}" for name in names]

    def start(self, pool: ServedPool) -> None:
        """Begin to serve `pool`, whose description has the ports of all ranks."""
        serve = partial(self._serve, pool)
        self._accepting = AcceptThread(self._listener, "kv-data", self._newcomers, serve)

    def close(self) -> None:
        """Close all connections, and wait for a moment until nothing is sent any more."""
        self._accepting.close()
        with self._lock:
            self._is_closed = True
            for stream in self._pullers:
                stream.hang_up()
        self._newcomers.close(_CLOSE_S)

    def _serve(self, pool: ServedPool, connection: socket.socket) -> None:
        """The thread of one connection."""
        stream = Stream(connection)
        try:
            mode, outlet = self._open(pool, stream)
            try:
                while True:
                    _serve_request(pool, stream, mode, outlet)
            finally:
                outlet.close()
        except (HandoffFailed, Unauthenticated) as error:
            _log.info("a puller's connection ended: %s", error.message)
        except Exception:
            # Only this puller's connection ends.
            _log.exception("a puller's connection broke")
        finally:
            with self._lock:
                self._pullers.discard(stream)
            stream.close()

    def _open(self, pool: ServedPool, stream: Stream) -> tuple[wire.Mode, Outlet]:
        """Authenticate the puller and open its outlet. Raises HandoffFailed, Unauthenticated."""
        deadline = Deadline(OPENING_S)
        stream.wrap(self._wrap, deadline)
        key_of = keys_of(pool.description.incarnation, pool.key)
        theirs = Listener(key_of, (wire.PURPOSE,), self._addresses)
        opening = bytes(stream.read(OPENING_BYTES, deadline))
        stream.write(theirs.challenge(opening), deadline)
        answer = bytes(stream.read(ANSWER_BYTES, deadline))
        terms = bytes(stream.read(wire.TERMS_BYTES, deadline))
        theirs.check(answer, terms)
        mode, cut, pair_id = wire.unpack_terms(terms, pool.description.block_bytes)
        if mode not in self._outlets:
            raise HandoffFailed(f"there is no {mode.name} here")
        self._newcomers.proven()
        with self._lock:
            if self._is_closed:
                raise HandoffFailed("the port is closed")
            if len(self._pullers) >= _MAX_PULLERS:
                raise HandoffFailed("there are too many pullers")
            self._pullers.add(stream)
        packed = pool.description.pack()
        stream.write(wire.pack_length(len(packed)) + packed, deadline)
        if cut is None:
            raise HandoffFailed("it requested only the description")
        return mode, self._outlets[mode](stream, cut, pair_id)


def _serve_request(pool: ServedPool, stream: Stream, mode: wire.Mode, outlet: Outlet) -> None:
    """Wait for one request and serve it. Raises HandoffFailed when the puller is gone."""
    head = stream.read(1, Deadline(None))
    deadline = Deadline(_REQUEST_S)
    head += stream.read(wire.REQUEST_BYTES - 1, deadline)
    num_blocks, crc = wire.unpack_request(head)
    body = stream.read(num_blocks * wire.BYTES_PER_BLOCK, deadline)
    ids, announced = wire.unpack_body(body, num_blocks, crc)
    if ids.view(np.uint64).max() >= pool.description.num_blocks:  # or below zero
        raise HandoffFailed("it requests a block outside the pool")
    is_current = pool.generations.match(ids, announced)
    if is_current:
        if mode.sends_begin:
            stream.write(wire.pack_begin(), Deadline(_REQUEST_S))
        outlet.send(ids)
        is_current = pool.generations.match(ids, announced)
    elif not mode.sends_begin:
        outlet.send(np.full_like(ids, PADDING_BLOCK))  # the puller receives as many blocks
    verdict = PullOutcome.OK if is_current else PullOutcome.STALE
    stream.write(wire.pack_end(verdict), Deadline(_REQUEST_S))
