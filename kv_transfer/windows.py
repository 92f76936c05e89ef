"""The open windows of one puller: carries out its four transport effects, answers with events.

Opening takes time and may hang for a second, so it happens on a thread of its own; a decode step
never waits for it. Called from the engine's thread; `post` is called from others.

    OpenWindow ──► thread: connect ──► post(WindowOpened | WindowFailed)
    StartPull  ──► window's thread ──► post(PullEnded)
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..core.errors import HandoffFailed
from .events import (
    CancelPull,
    CloseWindow,
    OpenWindow,
    PullEnded,
    StartPull,
    WindowFailed,
    WindowOpened,
)
from .transport import PoolWindow, PullHandle, PullOutcome, Transport, open_window

_log = logging.getLogger(__name__)

WindowEffect: TypeAlias = OpenWindow | CloseWindow | StartPull | CancelPull
WindowEvent: TypeAlias = WindowOpened | WindowFailed | PullEnded


@dataclass(slots=True)
class _Slot:
    """What was asked for one source; `window` is None while it is being opened."""

    link: int
    window: PoolWindow | None = None


class Windows:
    """Windows onto sources by incarnation, and the pulls in flight through them."""

    def __init__(
        self, transports: Sequence[Transport], post: Callable[[WindowEvent], None]
    ) -> None:
        self._transports = transports
        self._post = post
        self._lock = threading.Lock()  # slots and pulls are touched from the windows' threads
        self._slots: dict[str, _Slot] = {}
        self._pulls: dict[tuple[str, int], PullHandle] = {}  # (transfer_id, seq)

    def apply(self, effect: WindowEffect) -> None:
        """Carry out one effect; returns at once."""
        match effect:
            case OpenWindow(incarnation, link):
                self._open(incarnation, link)
            case CloseWindow(incarnation):
                self._close(incarnation)
            case StartPull():
                self._start_pull(effect)
            case CancelPull(transfer_id):
                self._cancel(transfer_id)

    def links(self) -> list[tuple[str, str, float]]:
        """(incarnation, transport, GB/s) of every open window."""
        with self._lock:
            return [
                (incarnation, slot.window.transport, slot.window.gbytes_per_s)
                for incarnation, slot in self._slots.items()
                if slot.window is not None
            ]

    def close(self) -> None:
        """Close all and wait until the pulls in flight have reported."""
        with self._lock:
            slots, self._slots = list(self._slots.values()), {}
        windows = [slot.window for slot in slots if slot.window is not None]
        for window in windows:
            window.close()
        for window in windows:
            window.join()

    def _open(self, incarnation: str, link: int) -> None:
        with self._lock:
            slot = self._slots[incarnation] = _Slot(link)
        name = f"kv-open-{incarnation[:8]}"
        connect = threading.Thread(
            target=self._connect, args=(incarnation, slot), name=name, daemon=True
        )
        connect.start()

    def _connect(self, incarnation: str, slot: _Slot) -> None:
        try:
            window = open_window(self._transports, incarnation)
        except HandoffFailed as error:
            self._post(WindowFailed(incarnation, slot.link, error))
            return
        with self._lock:
            is_wanted = self._slots.get(incarnation) is slot
            if is_wanted:
                slot.window = window
        if not is_wanted:
            window.close()
            return
        speed = f"{window.gbytes_per_s:.1f} GB/s"
        _log.info("pulling from %s over %s, %s", incarnation, window.transport, speed)
        self._post(WindowOpened(incarnation, slot.link))

    def _close(self, incarnation: str) -> None:
        with self._lock:
            slot = self._slots.pop(incarnation, None)
        if slot is not None and slot.window is not None:
            slot.window.close()

    def _start_pull(self, pull: StartPull) -> None:
        def on_done(outcome: PullOutcome) -> None:
            with self._lock:  # not before start_pull's handle is filed below
                del self._pulls[pull.transfer_id, pull.seq]
            self._post(PullEnded(pull.transfer_id, pull.seq, outcome))

        with self._lock:
            window = self._slots[pull.incarnation].window
            assert window is not None, "a pull through a window that is not open"
            handle = window.start_pull(pull.pairs, on_done)
            self._pulls[pull.transfer_id, pull.seq] = handle

    def _cancel(self, transfer_id: str) -> None:
        with self._lock:
            handles = [h for (owner, _), h in self._pulls.items() if owner == transfer_id]
        for handle in handles:
            handle.cancel()
