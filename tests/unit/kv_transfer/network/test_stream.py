"""Deadlines for a peer's work outside its connection; silence, and connections that break."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from baton.core.errors import HandoffFailed, from_code
from baton.kv_transfer.network.stream import ConnectionBroken, Deadline, Recovery, Stream


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


def test_silence_is_no_broken_connection(ends: tuple[Stream, socket.socket]) -> None:
    """Silence does not count as a broken connection: to reconnect would be to wait again."""
    stream, theirs = ends
    with pytest.raises(HandoffFailed) as caught:
        stream.read(1, Deadline(0.02))
    assert not isinstance(caught.value, ConnectionBroken)
    theirs.close()
    with pytest.raises(ConnectionBroken):
        stream.read(1, Deadline(1.0))


def test_recovery_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    pauses_s = []

    def sleep(seconds: float) -> None:
        nonlocal now_s
        pauses_s.append(seconds)
        now_s += seconds

    monkeypatch.setattr("baton.kv_transfer.network.stream.time.monotonic", lambda: now_s)
    monkeypatch.setattr("baton.kv_transfer.network.stream.time.sleep", sleep)
    recovery, broken = Recovery(), ConnectionBroken("it broke")
    with pytest.raises(ConnectionBroken):
        while True:
            recovery.pause(broken)
    assert pauses_s[:4] == [0.0, 0.005, 0.01, 0.02]
    assert sum(pauses_s) < 1.2


def test_a_broken_connection_is_a_failed_hand_off_to_others() -> None:
    assert ConnectionBroken("x").code == "handoff_failed"
    assert type(from_code("handoff_failed", "x")) is HandoffFailed
