"""A pull by all ranks of an engine: each reads its heads from the source's ranks that have them.

    connect     which heads lie where? ─► each rank opens its windows ─► one window of all
    start_pull  rank 0 sends an order to the others, copies its own part ─► done when all reported

The KV heads that one rank needs may lie on several ranks of the source: then it opens a window onto
each, and each copies other heads of the same blocks. Each rank checks its own copies by the
source's page of generations, and the worst outcome counts. Rank 0's orders as bytes:

    open      MessagePack: its pieces     on another thread ─► reply: Opened
    pull      | window: uint64 | source ids: int64 [n] | ours: int64 [n] | generations: uint64 [n] |
                                          the window's thread copies ─► reply: the outcome
    cancel    | the pull's order: uint64 |
    close     | window: uint64 |          a window's number is that of the order to open it

Knows no transport by name.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from ...core.channels.engine_tls import WrapSocket
from ...core.errors import EngineFailed, HandoffFailed
from ...engine.parallel.rank_channel import MessageKind, RankChannel, RankMessage
from ...engine.parallel.rank_group import RankGroup
from ..export.pool_address import PoolPart, describe
from ..network.data_client import describe_remote
from ..protocol.events import OpenWindow
from ..window.block_pairs import BlockPairs
from ..window.block_pieces import BlockPiece, pieces_of
from ..window.network_address import RemotePool
from ..window.transport import PoolWindow, PullHandle, PullOutcome, Transport, open_window, worst

_NUMBER = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class SourcePiece:
    """One rank's pool of a source, and the piece of its blocks to pull."""

    pool: RemotePool
    piece: BlockPiece


def open_pieces(transports: Sequence[Transport], pieces: Sequence[SourcePiece]) -> PoolWindow:
    """Open one window for all pieces. Raises HandoffFailed if one of them cannot be opened."""
    windows: list[PoolWindow] = []
    try:
        for each in pieces:
            windows.append(open_window(transports, each.pool, each.piece))
    except HandoffFailed:
        for window in windows:
            window.close()
        raise
    if len(windows) == 1:
        return windows[0]
    return JoinedWindow(windows, min(window.gbytes_per_s for window in windows))


class JoinedWindow(PoolWindow):
    """Several windows onto one source as one. `gbytes_per_s`: of all together."""

    def __init__(self, windows: Sequence[PoolWindow], gbytes_per_s: float) -> None:
        self._windows = windows
        self.gbytes_per_s = gbytes_per_s
        self.transport = "+".join(sorted({window.transport for window in windows}))

    @property
    def num_steps(self) -> int | None:
        """From one of this process's windows: a source has one count for all its ranks."""
        return self._windows[-1].num_steps

    def start_pull(self, pairs: BlockPairs, on_done: Callable[[PullOutcome], None]) -> PullHandle:
        pull = JoinedPull(len(self._windows), on_done)
        for window in self._windows:
            pull.handles.append(window.start_pull(pairs, pull.ended))
        return pull

    def close(self) -> None:
        for window in self._windows:
            window.close()


class JoinedPull:
    """`num_parts` pulls as one: it ends with the last of them, with the worst outcome."""

    def __init__(self, num_parts: int, on_done: Callable[[PullOutcome], None]) -> None:
        self._num_parts = num_parts
        self._on_done = on_done
        self._lock = threading.Lock()
        self._outcomes: list[PullOutcome] = []
        self.handles: list[PullHandle] = []  # of the parts, which may have ended

    def ended(self, outcome: PullOutcome) -> None:
        """A part has ended. Any thread may call it."""
        with self._lock:
            self._outcomes.append(outcome)
            is_last = len(self._outcomes) == self._num_parts
        if is_last:
            self._on_done(worst(self._outcomes))

    def cancel(self) -> None:
        for handle in self.handles:
            handle.cancel()


@dataclass(frozen=True, slots=True)
class Opened:
    """A rank's reply: its window is open, or `error` is why not."""

    error: str = ""
    gbytes_per_s: float = 0.0


# Created at import: msgspec crashes when two threads use a type for the first time.
_opened_decoder = msgspec.msgpack.Decoder(Opened)


def unpack_number(packed: memoryview) -> int:
    number: int = _NUMBER.unpack_from(packed)[0]
    return number


def pack_pull(window: int, pairs: BlockPairs) -> bytes:
    return b"".join((_NUMBER.pack(window), pairs.ids.tobytes(), pairs.generations.tobytes()))


def unpack_pull(packed: memoryview) -> tuple[int, BlockPairs]:
    """Returns the window's number and a copy of the pairs."""
    rows = np.frombuffer(packed[_NUMBER.size :], np.int64).reshape(3, -1).copy()
    return unpack_number(packed), BlockPairs(rows[:2], rows[2].view(np.uint64))


class RankPulls:
    """All windows of one rank, by the numbers of the orders that opened them.

    Used by the thread that receives the orders; replies are sent from the thread that has them.
    """

    def __init__(self, transports: Sequence[Transport], channel: RankChannel) -> None:
        self._transports = transports
        self._channel = channel
        self._lock = threading.Lock()
        self._windows: dict[int, PoolWindow] = {}
        self._pulls: dict[int, PullHandle] = {}

    def open(self, message: RankMessage) -> None:
        pieces = msgspec.msgpack.decode(message.payload, type=list[SourcePiece])
        order = message.order

        def connect() -> None:
            try:
                window = open_pieces(self._transports, pieces)
            except HandoffFailed as error:
                self._channel.answer(order, msgspec.msgpack.encode(Opened(error.message)))
                return
            with self._lock:
                self._windows[order] = window
            self._channel.answer(order, msgspec.msgpack.encode(Opened("", window.gbytes_per_s)))

        threading.Thread(target=connect, name="connect-window", daemon=True).start()

    def pull(self, message: RankMessage) -> None:
        number, pairs = unpack_pull(message.payload)
        order = message.order

        def ended(outcome: PullOutcome) -> None:
            with self._lock:
                del self._pulls[order]
            self._channel.answer(order, outcome.value.encode())

        with self._lock:  # so that it is registered before it ends
            self._pulls[order] = self._windows[number].start_pull(pairs, ended)

    def cancel(self, message: RankMessage) -> None:
        """End a pull as soon as possible; it may have ended."""
        with self._lock:
            handle = self._pulls.get(unpack_number(message.payload))
        if handle is not None:
            handle.cancel()

    def close(self, message: RankMessage) -> None:
        """Start no more pulls. A window that was never open is no error."""
        with self._lock:
            window = self._windows.pop(unpack_number(message.payload), None)
        if window is not None:
            window.close()


@dataclass(frozen=True, slots=True)
class WindowOpener:
    """Opens windows onto sources for all ranks of this engine.

    `_mine`: rank 0's transports, best first. `_parts`: the pools of all ranks. `_followers`: the
    other ranks. `_here`: the id of rank 0's host.
    """

    _mine: Sequence[Transport]
    _parts: Sequence[PoolPart]
    _followers: RankGroup | None
    _here: bytes
    _wrap: WrapSocket = lambda connection: connection

    def open(self, source: OpenWindow) -> PoolWindow:
        """Connect all ranks; blocks as long as that takes. Raises HandoffFailed, EngineFailed."""
        by_rank = self._plan(source)
        mine = open_pieces(self._mine, by_rank[0])
        if self._followers is None:
            return mine
        payloads = [msgspec.msgpack.encode(pieces) for pieces in by_rank[1:]]
        try:
            number, replies = self._followers.order_and_wait(MessageKind.OPEN_WINDOW, payloads)
        except (HandoffFailed, EngineFailed):
            mine.close()
            raise
        answers = [_opened_decoder.decode(reply) for reply in replies]
        speed = sum(each.gbytes_per_s for each in answers)
        others = _FollowersWindow(mine.transport, speed, self._followers, number)
        # In this order: a pull's orders leave before rank 0 begins its own part.
        window = JoinedWindow([others, mine], speed + mine.gbytes_per_s)
        for rank, opened in enumerate(answers, start=1):
            if opened.error:
                window.close()
                raise HandoffFailed(f"rank {rank}: {opened.error}")
        return window

    def _plan(self, source: OpenWindow) -> list[list[SourcePiece]]:
        """For each rank of this engine, the pools of the source that it reads, and their pieces."""
        if source.access is None:
            raise HandoffFailed("the source has not sent how its pools are reached")
        remote = source.access.at(source.incarnation, source.host, self._here, self._parts[0].pool)
        if remote.port:
            described = describe_remote(remote, self._wrap)
        elif remote.is_elsewhere:
            raise HandoffFailed("the source is on another host, and has no port")
        else:
            described = describe(remote)
        theirs = described.parts

        def locate(piece: BlockPiece, mine: PoolPart) -> SourcePiece:
            there = theirs[piece.source_rank]
            pool = remote.of_rank(there.pool, there.host, there.port, is_apart=bool(mine.host))
            return SourcePiece(pool, piece)

        return [
            [locate(piece, mine) for piece in pieces_of(theirs, mine, rank)]
            for rank, mine in enumerate(self._parts)
        ]


@dataclass(slots=True, eq=False)
class _FollowersWindow(PoolWindow):
    """The windows of the other ranks onto a source, which they identify by `_number`."""

    transport: str
    gbytes_per_s: float
    _followers: RankGroup
    _number: int

    def start_pull(self, pairs: BlockPairs, on_done: Callable[[PullOutcome], None]) -> PullHandle:
        def ended(answers: list[bytes]) -> None:
            on_done(worst([PullOutcome(answer.decode()) for answer in answers]))

        message = pack_pull(self._number, pairs)
        order = self._followers.order(MessageKind.PULL, message, ended)
        return _Order(self._followers, order)

    def close(self) -> None:
        self._followers.send(MessageKind.CLOSE_WINDOW, _NUMBER.pack(self._number))


@dataclass(frozen=True, slots=True)
class _Order:
    """The handle of a pull on the other ranks."""

    followers: RankGroup
    number: int

    def cancel(self) -> None:
        self.followers.send(MessageKind.CANCEL_PULL, _NUMBER.pack(self.number))
