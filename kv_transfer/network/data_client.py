"""The puller's end of a data connection: authenticates, requests blocks and receives verdicts.

Owns one connection. Its user decides which blocks to request, where they go, and what to do when
the connection breaks (ConnectionBroken).
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from ...core.channels.engine_tls import WrapSocket
from ...core.channels.handshake import CHALLENGE_BYTES, Dialer
from ...core.errors import HandoffFailed, Unauthenticated
from ..export.pool_address import PoolDescription
from ..window.block_pairs import Generations, Ids
from ..window.block_pieces import BlockCut
from ..window.network_address import RemotePool
from ..window.transport import PullOutcome
from . import data_wire as wire
from .stream import SILENCE_S, ConnectionBroken, Deadline, Recovery, Stream

_SPARE_S = 5.0  # for blocks that come without a silence, over what they take at the slowest rate:
_SLOWEST_BYTES_PER_S = 1e6


def seconds_for(num_bytes: int) -> float:
    """The longest that receiving `num_bytes` may take."""
    return _SPARE_S + num_bytes / _SLOWEST_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class DataClient:
    """A connection that the source has accepted. All methods raise HandoffFailed, after which the
    connection cannot be used."""

    stream: Stream
    mode: wire.Mode
    description: PoolDescription

    def request(self, ids: Ids, generations: Generations) -> PullOutcome | None:
        """Request blocks. None: the source sends them, and then a verdict. Otherwise the verdict,
        without blocks."""
        deadline = Deadline(SILENCE_S)
        self.stream.write(wire.pack_request(ids, generations), deadline)
        refusal = self._receive_outcome(deadline) if self.mode.sends_begin else None
        if refusal is PullOutcome.OK:
            raise HandoffFailed("the source sent its result before the blocks")
        return refusal

    def verdict(self) -> PullOutcome:
        """The source's verdict on all blocks that were received."""
        outcome = self._receive_outcome(Deadline(SILENCE_S))
        if outcome is None:
            raise HandoffFailed("the source announced the blocks twice")
        return outcome

    def _receive_outcome(self, deadline: Deadline) -> PullOutcome | None:
        frame = self._frame(deadline)
        if isinstance(frame, wire.DataFrame):
            raise HandoffFailed("the source did not send its result")
        return frame

    def receive_data(self, target: memoryview, deadline: Deadline) -> bool:
        """Fill `target` from data frames. Returns False if any of them was damaged."""
        is_intact, num_bytes = True, 0
        while num_bytes < len(target):
            frame = self._frame(deadline)
            if not isinstance(frame, wire.DataFrame):
                raise HandoffFailed("the source sent less than was requested")
            part = target[num_bytes : num_bytes + frame.num_bytes]
            if len(part) < frame.num_bytes:
                raise HandoffFailed("the source sent more than was requested")
            self.stream.read_into(part, deadline)
            is_intact &= wire.checksum(part) == frame.crc
            num_bytes += frame.num_bytes
        return is_intact

    def _frame(self, deadline: Deadline) -> wire.DataFrame | PullOutcome | None:
        return wire.unpack_frame(self.stream.read(wire.FRAME_BYTES, deadline))

    def close(self) -> None:
        self.stream.close()


def connect(
    source: RemotePool,
    cut: BlockCut | None,
    mode: wire.Mode = wire.Mode.BYTES,
    wrap: WrapSocket = lambda connection: connection,
    pair_id: bytes = b"",
    deadline: Deadline | None = None,
) -> DataClient:
    """Connect to this pool; without `cut` only for its description.

    `pair_id`: the id that `mode` needs. Takes at most `SILENCE_S`.

    Raises ConnectionBroken, or HandoffFailed if nothing listens there or it does not know the key.
    """
    deadline = deadline or Deadline(SILENCE_S)
    try:
        raw = socket.create_connection((source.host, source.port), deadline.remaining_s())
    except (ConnectionResetError, ConnectionAbortedError) as error:
        raise ConnectionBroken(f"{source.address} closed it: {error}") from error
    except OSError as error:
        raise HandoffFailed(f"no source at {source.address}: {error}") from error
    stream = Stream(raw)
    try:
        stream.wrap(wrap, deadline)
        terms = wire.pack_terms(mode, cut, pair_id)
        description = _introduce(stream, source, terms, deadline)
        description.require(source.name, None if cut is None else cut.source_block_bytes)
        return DataClient(stream, mode, description)
    except HandoffFailed:
        stream.close()
        raise


def describe_remote(
    source: RemotePool, wrap: WrapSocket = lambda connection: connection
) -> PoolDescription:
    """Like `pool_address.describe`, over a network."""
    recovery = Recovery()
    while True:
        try:
            client = connect(source, None, wrap=wrap, deadline=recovery.deadline)
        except ConnectionBroken as error:
            recovery.pause(error)
        else:
            client.close()
            return client.description


def _introduce(
    stream: Stream, source: RemotePool, terms: bytes, deadline: Deadline
) -> PoolDescription:
    names = {"dialer": source.puller, "listener": source.name, "address": source.address}
    ours = Dialer(source.key, wire.PURPOSE, **names)
    stream.write(ours.opening, deadline)
    try:
        answer = ours.answer(bytes(stream.read(CHALLENGE_BYTES, deadline)), terms)
    except Unauthenticated as error:
        raise HandoffFailed(f"the source at {source.address}: {error.message}") from error
    stream.write(answer + terms, deadline)
    length = wire.unpack_length(stream.read(wire.LENGTH_BYTES, deadline))
    return PoolDescription.unpack(bytes(stream.read(length, deadline)))
