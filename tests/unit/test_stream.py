"""Deadlines for what a peer does beside its connection."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from baton.core.errors import HandoffFailed
from baton.kv_transfer.stream import Stream


@pytest.fixture
def ends() -> Iterator[tuple[Stream, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    stream = Stream(ours)
    yield stream, theirs
    stream.close()
    theirs.close()


def test_it_lasts_while_the_peer_is_there_whatever_it_says(
    ends: tuple[Stream, socket.socket],
) -> None:
    stream, theirs = ends
    deadline = stream.watched(5.0)
    theirs.sendall(b"not read yet")
    time.sleep(0.02)
    assert 4 < deadline.remaining_s() <= 5


def test_it_passes(ends: tuple[Stream, socket.socket]) -> None:
    deadline = ends[0].watched(0.01)
    time.sleep(0.02)
    with pytest.raises(HandoffFailed, match="too long"):
        deadline.remaining_s()


@pytest.mark.parametrize("who", ["peer", "peer, with words unread", "another thread of ours"])
def test_it_ends_when_either_end_hangs_up(ends: tuple[Stream, socket.socket], who: str) -> None:
    stream, theirs = ends
    deadline = stream.watched(5.0)
    if "ours" in who:
        stream.hang_up()
    else:
        if "words" in who:
            theirs.sendall(b"not read")
        theirs.close()
    until_s = time.monotonic() + 1
    with pytest.raises(HandoffFailed, match="hung up"):
        while time.monotonic() < until_s:
            deadline.remaining_s()
