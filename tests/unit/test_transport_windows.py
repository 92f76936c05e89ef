"""Choosing a transport, and the glue that opens windows and pulls through them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from baton.core.errors import HandoffFailed
from baton.engine.block_pool import BlockRef
from baton.kv_transfer.events import (
    CancelPull,
    CloseWindow,
    OpenWindow,
    PullEnded,
    StartPull,
    WindowFailed,
    WindowOpened,
)
from baton.kv_transfer.memory import MemoryPool, MemoryTransport, MemoryWindow
from baton.kv_transfer.transport import BlockPair, PullOutcome, open_window
from baton.kv_transfer.windows import WindowEvent, Windows
from fakes.handoff import SOURCE, ticket

T = ticket(1).transfer_id
PAIRS = (BlockPair(BlockRef(0, 2, 0, None), 3), BlockPair(BlockRef(1, 4, 0, None), 5))
_E = TypeVar("_E", bound=WindowEvent)


class GatedTransport(MemoryTransport):
    """Connects only when the gate is open; hands out its windows to the test."""

    def __init__(self, pool: MemoryPool, sources: dict[str, MemoryPool]) -> None:
        super().__init__(pool, sources)
        self.gate = threading.Event()
        self.gate.set()
        self.windows: list[MemoryWindow] = []

    def connect(self, incarnation: str) -> MemoryWindow:
        assert self.gate.wait(10)
        window = super().connect(incarnation)
        self.windows.append(window)
        return window


class Inbox:
    """Where the answers arrive, in the order of their posting."""

    def __init__(self) -> None:
        self._events: queue.Queue[WindowEvent] = queue.Queue()
        self.post: Callable[[WindowEvent], None] = self._events.put

    def next(self, kind: type[_E]) -> _E:
        event = self._events.get(timeout=10)
        assert isinstance(event, kind)
        return event

    def is_empty(self) -> bool:
        return self._events.empty()


@pytest.fixture
def transport() -> GatedTransport:
    source = MemoryPool(6, 8)
    for block_id in range(6):
        source.block(block_id)[:] = bytes([block_id]) * 8
    return GatedTransport(MemoryPool(6, 8), {SOURCE: source})


def test_copies_what_it_was_told(transport: GatedTransport) -> None:
    inbox = Inbox()
    windows = Windows([transport], inbox.post)
    windows.apply(OpenWindow(SOURCE, 1))
    assert inbox.next(WindowOpened) == WindowOpened(SOURCE, 1)
    assert windows.links() == [(SOURCE, "memory", 1.0)]
    windows.apply(StartPull(T, 0, SOURCE, PAIRS))
    window = transport.windows[0]
    window.pulls[0].finish()
    assert inbox.next(PullEnded) == PullEnded(T, 0, PullOutcome.OK)
    assert bytes(window.destination.block(3)) == b"\2" * 8
    assert bytes(window.destination.block(5)) == b"\4" * 8
    windows.close()
    assert window.is_closed


def test_cancel_reaches_every_pull_of_the_transfer_and_no_other(transport: GatedTransport) -> None:
    inbox = Inbox()
    windows = Windows([transport], inbox.post)
    windows.apply(OpenWindow(SOURCE, 1))
    inbox.next(WindowOpened)
    other = ticket(2).transfer_id
    for transfer_id, seq in ((T, 0), (T, 1), (other, 0)):
        windows.apply(StartPull(transfer_id, seq, SOURCE, PAIRS))
    windows.apply(CancelPull(T))
    windows.apply(CancelPull("f" * 32))
    windows.close()  # waits for the three
    ended = {inbox.next(PullEnded) for _ in range(3)}
    assert ended == {
        PullEnded(T, 0, PullOutcome.CANCELLED),
        PullEnded(T, 1, PullOutcome.CANCELLED),
        PullEnded(other, 0, PullOutcome.OK),
    }


def test_pulls_outlive_the_closing_of_their_window(transport: GatedTransport) -> None:
    inbox = Inbox()
    windows = Windows([transport], inbox.post)
    windows.apply(OpenWindow(SOURCE, 1))
    inbox.next(WindowOpened)
    windows.apply(StartPull(T, 0, SOURCE, PAIRS))
    windows.apply(CloseWindow(SOURCE))
    windows.apply(CloseWindow(SOURCE))
    assert windows.links() == []
    transport.windows[0].pulls[0].finish()
    assert inbox.next(PullEnded).outcome is PullOutcome.OK


def test_a_window_nobody_wants_any_more_is_closed_unannounced(transport: GatedTransport) -> None:
    inbox = Inbox()
    windows = Windows([transport], inbox.post)
    transport.gate.clear()
    windows.apply(OpenWindow(SOURCE, 1))
    windows.apply(CloseWindow(SOURCE))
    windows.apply(OpenWindow(SOURCE, 2))
    transport.gate.set()
    assert inbox.next(WindowOpened) == WindowOpened(SOURCE, 2)
    while len(transport.windows) < 2 or not any(w.is_closed for w in transport.windows):
        threading.Event().wait(0.001)
    assert sorted(window.is_closed for window in transport.windows) == [False, True]
    assert inbox.is_empty()
    windows.close()


def test_a_window_that_cannot_be_opened_is_reported(transport: GatedTransport) -> None:
    inbox = Inbox()
    windows = Windows([transport], inbox.post)
    windows.apply(OpenWindow("6" * 32, 7))
    failed = inbox.next(WindowFailed)
    assert (failed.incarnation, failed.link) == ("6" * 32, 7)
    assert "memory: no pool" in failed.error.message
    windows.apply(CloseWindow("6" * 32))


class Broken:
    def __init__(self, name: str) -> None:
        self.name = name

    def connect(self, incarnation: str) -> MemoryWindow:
        raise HandoffFailed(f"{self.name} is out of order")


def test_the_first_transport_that_connects_is_taken(transport: GatedTransport) -> None:
    assert open_window([Broken("nvlink"), transport], SOURCE) is transport.windows[0]


@pytest.mark.parametrize(
    ("transports", "words"),
    [
        ([Broken("a"), Broken("b")], ["a: a is out of order", "b: b is out of order", SOURCE]),
        ([], ["none is configured"]),
    ],
)
def test_no_transport_names_all_that_were_tried(
    transports: Sequence[Broken], words: list[str]
) -> None:
    with pytest.raises(HandoffFailed) as raised:
        open_window(transports, SOURCE)
    assert all(word in raised.value.message for word in words)
