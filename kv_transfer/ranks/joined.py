"""One window of several: KV heads that lie on several ranks, of the source or of this engine.

    start_pull ─► a pull by each, of the same blocks ─► done when all have reported

All copies of a pull go to the same blocks, to other heads of them. Knows no transport.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...core.errors import HandoffFailed
from ..window.head_ranges import HeadPiece
from ..window.network_address import RemotePool
from ..window.transport import (
    BlockPairs,
    PoolWindow,
    PullHandle,
    PullOutcome,
    Transport,
    open_window,
    worst,
)


@dataclass(frozen=True, slots=True)
class SourcePiece:
    """A pool of a source, the piece of its blocks to pull, and how it is reached from afar."""

    pool: str
    piece: HeadPiece
    remote: RemotePool | None = None


def open_pieces(transports: Sequence[Transport], pieces: Sequence[SourcePiece]) -> PoolWindow:
    """A window for all pieces; raises HandoffFailed if one of them cannot be had."""
    windows: list[PoolWindow] = []
    try:
        for each in pieces:
            windows.append(open_window(transports, each.pool, each.piece, each.remote))
    except HandoffFailed:
        for window in windows:
            window.close()
        raise
    if len(windows) == 1:
        return windows[0]
    return JoinedWindow(windows, min(window.gbytes_per_s for window in windows))


class JoinedWindow(PoolWindow):
    """Windows onto one source. `gbytes_per_s`: of all together."""

    def __init__(self, windows: Sequence[PoolWindow], gbytes_per_s: float) -> None:
        self._windows = windows
        self._gbytes_per_s = gbytes_per_s
        self._transport = "+".join(sorted({window.transport for window in windows}))

    @property
    def transport(self) -> str:
        return self._transport

    @property
    def gbytes_per_s(self) -> float:
        return self._gbytes_per_s

    @property
    def num_steps(self) -> int | None:
        """A source has one count for all its ranks."""
        return self._windows[0].num_steps

    def start_pull(self, pairs: BlockPairs, on_done: Callable[[PullOutcome], None]) -> PullHandle:
        pull = JoinedPull(len(self._windows), on_done)
        for window in self._windows:
            pull.add(window.start_pull(pairs, pull.ended))
        return pull

    def close(self) -> None:
        for window in self._windows:
            window.close()


class JoinedPull:
    """`num_parts` pulls as one: done with the last of them, as the worst of them."""

    def __init__(self, num_parts: int, on_done: Callable[[PullOutcome], None]) -> None:
        self._num_parts = num_parts
        self._on_done = on_done
        self._lock = threading.Lock()
        self._outcomes: list[PullOutcome] = []
        self._handles: list[PullHandle] = []

    def add(self, handle: PullHandle) -> None:
        """A part to hurry to its end when this is cancelled; it may have ended."""
        self._handles.append(handle)

    def ended(self, outcome: PullOutcome) -> None:
        """A part has ended; from any thread."""
        with self._lock:
            self._outcomes.append(outcome)
            is_last = len(self._outcomes) == self._num_parts
        if is_last:
            self._on_done(worst(self._outcomes))

    def cancel(self) -> None:
        for handle in self._handles:
            handle.cancel()
