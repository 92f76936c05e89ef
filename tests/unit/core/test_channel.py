"""A channel over real sockets: frames arrive whole and in order, and senders never wait for a
reader.
"""

from __future__ import annotations

import os
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from baton.core.channels.channel import Channel, ChannelBroken
from baton.core.channels.frames import MAX_FRAME_BYTES, BrokenStream, encode_payload


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the raw socket at its other end."""
    ours, theirs = socket.socketpair()
    with theirs:
        channel = Channel(ours)
        theirs.settimeout(5.0)
        yield channel, theirs
        channel.close()


def receive_all(channel: Channel, *, other: Channel | None = None) -> list[bytes]:
    """All payloads until the other end closes; `other`, if given, sends its backlog meanwhile."""
    payloads: list[bytes] = []
    is_over = False
    while not is_over:
        if other is not None and other.has_unsent:
            other.flush()
        if other is not None and not other.has_unsent:
            other.close()
            other = None
        if not select.select([channel], [], [], 0 if other else 5.0)[0]:
            continue
        got, is_over = channel.receive()
        payloads += got
    return payloads


def test_frames_come_whole_in_order_and_behind_partial_writes(
    ends: tuple[Channel, socket.socket],
) -> None:
    rng = random.Random(1)
    payloads = [rng.randbytes(rng.choice((1, 3, 1000, 70_000, 700_000))) for _ in range(40)]
    channel, theirs = ends
    other = Channel(theirs)
    for payload in payloads:
        channel.send(payload)
    assert channel.has_unsent, "more than a socket holds"
    assert receive_all(other, other=channel) == payloads


def test_a_frame_that_comes_in_pieces_is_one(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    for byte in encode_payload(b"whole"):
        assert channel.receive() == ([], False)
        theirs.sendall(bytes([byte]))
    assert channel.receive() == ([b"whole"], False)
    assert channel.receive() == ([], False)


def test_empty_frames_are_nobodys_business(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    channel.send(b"")
    assert theirs.recv(10) == encode_payload(b"")
    theirs.sendall(encode_payload(b"") + encode_payload(b"x") + encode_payload(b""))
    assert channel.receive() == ([b"x"], False)
    theirs.sendall(encode_payload(b""))
    assert channel.receive() == ([], False)


@pytest.mark.parametrize("num_bytes", [0, 3, 4, 10])
def test_what_came_whole_counts_behind_a_break(
    ends: tuple[Channel, socket.socket], num_bytes: int
) -> None:
    channel, theirs = ends
    whole = encode_payload(b"p" * 20)
    theirs.sendall(whole + whole[:num_bytes])
    theirs.close()
    got, is_over = channel.receive()
    if not is_over:
        assert channel.receive() == ([], True)
    assert got == [b"p" * 20]


def test_what_is_no_frame_is_said(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    theirs.sendall(struct.pack("<I", MAX_FRAME_BYTES + 1))
    with pytest.raises(BrokenStream):
        channel.receive()


def test_no_more_is_read_at_once_than_there_is_time_for(
    ends: tuple[Channel, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.core.channels.frames.MAX_CHUNKS", 1)
    channel, theirs = ends
    theirs.sendall(encode_payload(b"x" * 100_000))
    assert channel.receive() == ([], False)
    assert channel.receive() == ([b"x" * 100_000], False)


def test_two_threads_may_write_at_once(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    other = Channel(theirs)
    started = threading.Barrier(2)

    def write(name: int) -> None:
        started.wait()
        for number in range(2000):
            channel.send(struct.pack("<BI", name, number) + bytes([name]) * (number % 700))

    threads = [threading.Thread(target=write, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(0.01)
    by_name: dict[int, list[int]] = {0: [], 1: []}
    for payload in receive_all(other, other=channel):
        name, number = struct.unpack_from("<BI", payload)
        assert payload[5:] == bytes([name]) * (number % 700), "mixed"
        by_name[name].append(number)
    assert by_name == {0: [*range(2000)], 1: [*range(2000)]}


def test_who_does_not_read_blocks_nobody_and_is_told_of_in_time() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours, max_unsent_bytes=2 << 20)
    with theirs:
        message = b"t" * 100_000
        for _ in range(15):  # more than a socket holds, less than the channel keeps
            channel.send(message)
        assert channel.has_unsent
        with pytest.raises(ChannelBroken, match="does not read"):
            for _ in range(20):
                channel.send(message)
        assert channel._num_unsent_bytes < (2 << 20) + 2 * len(message)
        channel.close()


def test_sending_to_who_is_gone_is_said_and_receiving_ends(
    ends: tuple[Channel, socket.socket],
) -> None:
    channel, theirs = ends
    theirs.close()
    with pytest.raises(ChannelBroken, match="cannot be reached"):
        channel.send(b"x")
    with pytest.raises(ChannelBroken):
        channel.flush()
    assert channel.receive() == ([], True)


def test_close_is_for_good_and_for_both(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    channel.send(b"last")
    num_open = len(os.listdir("/proc/self/fd"))
    channel.close()
    channel.close()
    assert channel.is_closed
    assert len(os.listdir("/proc/self/fd")) == num_open - 1
    assert theirs.recv(100) == encode_payload(b"last")
    assert theirs.recv(100) == b""
    with pytest.raises(ChannelBroken):
        channel.send(b"late")
    channel.end_sending(0.0)


def test_a_close_beside_writers_harms_no_later_descriptor() -> None:
    """A thread that writes to a closing channel does not write to a reused descriptor."""
    for _ in range(50):
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        started = threading.Event()

        def write(channel: Channel = channel, started: threading.Event = started) -> None:
            started.set()
            with pytest.raises(ChannelBroken):
                while True:
                    channel.send(b"x")

        thread = threading.Thread(target=write)
        thread.start()
        started.wait()
        channel.close()
        read, written = os.pipe()
        thread.join()
        os.set_blocking(read, False)
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
        os.close(read)
        os.close(written)
        theirs.close()


def test_the_end_of_sending_is_behind_what_was_sent(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    channel.send(b"why")
    channel.end_sending(0.0)
    assert theirs.recv(100) == encode_payload(b"why")
    assert theirs.recv(100) == b""
    theirs.sendall(encode_payload(b"still heard"))
    assert channel.receive() == ([b"still heard"], False)
    with pytest.raises(ChannelBroken):
        channel.send(b"more")


def test_the_end_of_sending_waits_for_a_reader_that_is_behind_and_not_for_ever() -> None:
    for is_reading in (True, False):
        ours, theirs = socket.socketpair()
        channel, other = Channel(ours), Channel(theirs)
        for _ in range(20):
            channel.send(b"x" * 100_000)
        got: list[bytes] = []
        reader = threading.Thread(target=lambda got=got, o=other: got.extend(receive_all(o)))
        if is_reading:
            reader.start()
        began_s = time.monotonic()
        channel.end_sending(began_s + (10.0 if is_reading else 0.1))
        assert time.monotonic() - began_s < (10.0 if is_reading else 2.0)
        if is_reading:
            reader.join()
            assert got == [b"x" * 100_000] * 20
        channel.close()
        other.close()
