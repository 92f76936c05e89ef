"""Windows and copies of a rank other than 0: what ranked.py orders is done here and reported.

    open    aside, since it takes time ─► answer     pull ─► the window's thread copies ─► answer

Belongs to the thread that receives the orders; answers go out from whichever thread has them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ...core.errors import HandoffFailed
from ...engine.parallel.rank_channel import MessageKind, RankChannel, RankMessage
from ..window.transport import PoolWindow, PullHandle, PullOutcome, Transport
from .joined import open_pieces
from .rank_messages import Opened, unpack_number, unpack_open, unpack_pull


class RankPulls:
    """All windows of one rank, by the numbers of the orders that opened them."""

    def __init__(self, transports: Sequence[Transport], channel: RankChannel) -> None:
        self._transports = transports
        self._channel = channel
        self._lock = threading.Lock()
        self._windows: dict[int, PoolWindow] = {}
        self._pulls: dict[int, PullHandle] = {}

    def open(self, message: RankMessage) -> None:
        pieces, order = unpack_open(message.payload), message.order

        def connect() -> None:
            try:
                window = open_pieces(self._transports, pieces)
            except HandoffFailed as error:
                self._answer(order, Opened(error.message).pack())
                return
            with self._lock:
                self._windows[order] = window
            self._answer(order, Opened("", window.gbytes_per_s).pack())

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
