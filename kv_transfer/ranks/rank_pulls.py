"""Windows and copies of a rank other than 0, and rank 0's orders about them as bytes.

    open      MessagePack: its pieces     aside, since it takes time ─► answer: Opened
    pull      | window: uint64 | source ids: int64 [n] | ours: int64 [n] | generations: uint64 [n] |
                                          the window's thread copies ─► answer: the outcome
    cancel    | the pull's order: uint64 |
    close     | window: uint64 |          a window's number is that of the order to open it

Both ends are of one engine.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from ...core.errors import HandoffFailed
from ...engine.parallel.rank_channel import MessageKind, RankChannel, RankMessage
from ..window.transport import BlockPairs, PoolWindow, PullHandle, PullOutcome, Transport
from .joined import SourcePiece, open_pieces

_NUMBER = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Opened:
    """What a rank answers: its window stands, or `error` is why not."""

    error: str = ""
    gbytes_per_s: float = 0.0

    def require(self, rank: int) -> None:
        """Raises HandoffFailed if the window does not stand."""
        if self.error:
            raise HandoffFailed(f"rank {rank}: {self.error}")


def pack_number(number: int) -> bytes:
    return _NUMBER.pack(number)


def unpack_number(packed: memoryview) -> int:
    number: int = _NUMBER.unpack_from(packed)[0]
    return number


def pack_pull(window: int, pairs: BlockPairs) -> bytes:
    return b"".join((_NUMBER.pack(window), pairs.ids.tobytes(), pairs.generations.tobytes()))


def unpack_pull(packed: memoryview) -> tuple[int, BlockPairs]:
    """The window and the pairs, which lie in a copy of their own."""
    rows = np.frombuffer(packed[_NUMBER.size :], np.int64).reshape(3, -1).copy()
    return unpack_number(packed), BlockPairs(rows[:2], rows[2].view(np.uint64))


class RankPulls:
    """All windows of one rank, by the numbers of the orders that opened them.

    Belongs to the thread that receives the orders; answers go out from whichever thread has them.
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
                self._answer(order, msgspec.msgpack.encode(Opened(error.message)))
                return
            with self._lock:
                self._windows[order] = window
            self._answer(order, msgspec.msgpack.encode(Opened("", window.gbytes_per_s)))

        threading.Thread(target=connect, name="connect-window", daemon=True).start()

    def pull(self, message: RankMessage) -> None:
        number, pairs = unpack_pull(message.payload)
        order = message.order

        def ended(outcome: PullOutcome) -> None:
            with self._lock:
                del self._pulls[order]
            self._answer(order, outcome.value.encode())

        with self._lock:  # so that it is known before it ends
            self._pulls[order] = self._windows[number].start_pull(pairs, ended)

    def cancel(self, message: RankMessage) -> None:
        """Hurry a pull to its end; it may have ended."""
        with self._lock:
            handle = self._pulls.get(unpack_number(message.payload))
        if handle is not None:
            handle.cancel()

    def close(self, message: RankMessage) -> None:
        """Start no more pulls; a window that never stood is no error."""
        with self._lock:
            window = self._windows.pop(unpack_number(message.payload), None)
        if window is not None:
            window.close()

    def _answer(self, order: int, payload: bytes) -> None:
        self._channel.send(MessageKind.ANSWER, payload, order=order)
