"""Frames over a socket pair: both sides, ends, and invalid frames."""

from __future__ import annotations

import asyncio
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from baton.core.channels.channel import FrameSocket
from baton.core.channels.frames import MAX_FRAME_BYTES, BrokenStream, encode_payload
from baton.node.supervisor.engine_handle import read_frame
from baton.proto.v1 import engine_pb2

MESSAGE = engine_pb2.EngineInput(configure="{}" * 1000)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_messages_arrive_in_order(pair: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = FrameSocket(pair[0]), FrameSocket(pair[1])
    sender.send(MESSAGE)
    sender.send(engine_pb2.EngineInput())  # an empty payload is a message too
    assert receiver.receive() == MESSAGE.SerializeToString()
    assert receiver.receive() == b""
    sender.close()
    assert receiver.receive() is None
    receiver.close()


def test_who_sends_where_there_is_room_never_waits(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    sender, receiver = FrameSocket(pair[0]), FrameSocket(pair[1])
    num_sent = 0
    while sender.has_room():
        sender.send(MESSAGE)
        num_sent += 1
    assert num_sent > 10
    sender.send(MESSAGE)  # the last message is sent in spite of the backlog
    for _ in range(num_sent + 1):
        receiver.receive()
    assert sender.has_room()
    receiver.close()
    assert sender.has_room(), "whoever sends finds out that nobody is there"
    with pytest.raises(ConnectionError):
        sender.send(MESSAGE)


@pytest.mark.parametrize("num_bytes", [0, 3, 4, 100])
def test_frame_that_is_cut_off_is_an_end(
    pair: tuple[socket.socket, socket.socket], num_bytes: int
) -> None:
    pair[0].sendall(encode_payload(MESSAGE.SerializeToString())[:num_bytes])
    pair[0].close()
    receiver = FrameSocket(pair[1])
    assert receiver.receive() is None
    receiver.close()


def test_a_signal_within_a_frame_is_no_end(pair: tuple[socket.socket, socket.socket]) -> None:
    """As when the process is suspended while it waits for the rest."""
    frame, receiver = encode_payload(MESSAGE.SerializeToString()), FrameSocket(pair[1])
    reader = threading.get_ident()

    def send() -> None:
        pair[0].sendall(frame[:100])
        time.sleep(0.1)  # the reader waits for the rest
        signal.pthread_kill(reader, signal.SIGUSR1)
        time.sleep(0.1)
        pair[0].sendall(frame[100:])

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    sending = threading.Thread(target=send)
    sending.start()
    try:
        assert receiver.receive() == MESSAGE.SerializeToString()
    finally:
        sending.join()
        signal.signal(signal.SIGUSR1, before)
    receiver.close()


def test_absurd_length_breaks_the_stream(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(struct.pack("<I", MAX_FRAME_BYTES + 1))
    receiver = FrameSocket(pair[1])
    with pytest.raises(BrokenStream):
        receiver.receive()
    receiver.close()


async def test_asyncio_side_reads_the_same(pair: tuple[socket.socket, socket.socket]) -> None:
    sender = FrameSocket(pair[0])
    sender.send(MESSAGE)
    pair[0].sendall(encode_payload(MESSAGE.SerializeToString())[:7])
    sender.close()
    reader, writer = await asyncio.open_connection(sock=pair[1])
    assert await read_frame(reader) == MESSAGE.SerializeToString()
    assert await read_frame(reader) is None
    writer.close()
    await writer.wait_closed()


async def test_a_write_that_fails_ends_the_stream(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """An engine that ends while the supervisor writes to it causes no error in the supervisor."""
    reader, writer = await asyncio.open_connection(sock=pair[1])
    pair[0].close()
    for _ in range(100):
        writer.write(encode_payload(MESSAGE.SerializeToString()))
    assert await read_frame(reader) is None
    reader.set_exception(BrokenPipeError())
    assert await read_frame(reader) is None
    writer.close()
