"""The inbox of the engine loop: items of other threads and sockets in one queue."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from baton.node.channels.inbox import Inbox


@pytest.fixture
def inbox() -> Iterator[Inbox[str]]:
    inbox: Inbox[str] = Inbox()
    yield inbox
    inbox.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_items_come_in_order_and_once(inbox: Inbox[str]) -> None:
    for item in "abc":
        inbox.put(item)
    assert inbox.receive(math.inf) == ["a", "b", "c"]
    assert inbox.receive(0) == []
    inbox.put("d")
    assert inbox.receive(1.0) == ["d"]


@pytest.mark.parametrize("timeout_s", [0.0002, 0.005, 0.05])
def test_wait_is_neither_shorter_nor_much_longer(inbox: Inbox[str], timeout_s: float) -> None:
    def wait_s() -> float:
        began_s = time.monotonic()
        assert inbox.receive(timeout_s) == []
        return time.monotonic() - began_s

    shortest_s = wait_s()
    for _ in range(99):  # on a busy machine most waits are longer
        if shortest_s < timeout_s + 0.002:
            break
        shortest_s = min(shortest_s, wait_s())
    assert timeout_s <= shortest_s < timeout_s + 0.002


def test_other_threads_wake_it(inbox: Inbox[str]) -> None:
    threads = [threading.Thread(target=inbox.put, args=(f"{n}",)) for n in range(20)]
    for thread in threads:
        thread.start()
    items: list[str] = []
    while len(items) < 20:
        got = inbox.receive(5.0)
        assert got
        items += got
    assert sorted(items, key=int) == [f"{n}" for n in range(20)]
    for thread in threads:
        thread.join()


def test_sockets_are_read_until_they_are_forgotten(
    inbox: Inbox[str], pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    inbox.watch(ours, lambda: [ours.recv(1).decode()])
    theirs.send(b"ab")
    assert inbox.receive(1.0) == ["a"]
    inbox.put("x")
    assert sorted(inbox.receive(1.0)) == ["b", "x"]
    theirs.send(b"c")
    inbox.unwatch(ours)
    assert inbox.receive(0.01) == []


def test_room_to_write_counts_only_while_it_is_wanted(
    inbox: Inbox[str], pair: tuple[socket.socket, socket.socket]
) -> None:
    inbox.watch(pair[0], lambda: ["ready"])
    assert inbox.receive(0) == []
    inbox.watch_writes(pair[0], True)
    assert inbox.receive(0) == ["ready"]
    inbox.watch_writes(pair[0], False)
    assert inbox.receive(0) == []
