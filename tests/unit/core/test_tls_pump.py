"""TLS on its own thread: all bytes arrive, ends are detected, nothing blocks and nothing spins."""

from __future__ import annotations

import random
import select
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import pytest

from baton.cli.host.certs import make_certificates
from baton.core.channels import engine_tls
from baton.core.channels.engine_tls import EngineTls, plain_end, wait_for_pumps


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs") / "made"
    make_certificates(folder)
    return folder


def tls_of(certs: Path, role: str) -> EngineTls:
    files = (str(certs / name) for name in ("ca.crt", f"{role}.crt", f"{role}.key"))
    names = (f"{each}.baton.internal" for each in ("gateway", "prefill", "decode"))
    return EngineTls(*files, *names)


@dataclass
class Ends:
    """`plain` is the socket of the pump's owner, `secured` the TLS socket of the other host."""

    plain: socket.socket
    secured: ssl.SSLSocket


@pytest.fixture
def ends(certs: Path) -> Iterator[Ends]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    made: list[ssl.SSLSocket] = []
    accept = tls_of(certs, "prefill").accept()
    thread = threading.Thread(target=lambda: made.append(accept(accepted).connection))
    thread.start()
    secured = tls_of(certs, "decode").puller_wrap()(dialled)
    thread.join()
    secured.settimeout(10.0)
    plain = plain_end(made[0])
    plain.settimeout(10.0)
    yield Ends(plain, secured)
    plain.close()
    secured.close()
    until_s = time.monotonic() + 10
    while engine_tls._running and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not engine_tls._running, "a pump's thread goes on"


def read_all(end: socket.socket, num_bytes: int, rng: random.Random) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = end.recv(rng.choice((1, 10, 1000, 100_000)))
        if not part:
            break
        data += part
    return bytes(data)


@pytest.mark.parametrize("seed", range(3))
def test_all_bytes_pass_both_ways_at_once(ends: Ends, seed: int) -> None:
    rng = random.Random(seed)
    out, back = rng.randbytes(5 << 20), rng.randbytes(4 << 20)
    got: dict[str, bytes] = {}

    def far_end() -> None:
        """Read and write in one thread, as only one at a time may use a TLS object."""
        far = ends.secured
        far.setblocking(False)
        received, view = bytearray(), memoryview(back)
        while len(received) < len(out) or view:
            wanted = ([far], [far] if view else [], [])
            if not far.pending():
                assert any(select.select(*wanted, 10.0)), "stuck"
            with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                received += far.recv(rng.choice((1, 1000, 100_000)))
            with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if view:
                    view = view[far.send(view[:50_000]) :]
        got["far"] = bytes(received)

    far = threading.Thread(target=far_end)
    near = threading.Thread(target=lambda: ends.plain.sendall(out))
    far.start()
    near.start()
    got["near"] = read_all(ends.plain, len(back), random.Random(seed + 100))
    near.join()
    far.join()
    assert got["far"] == out and got["near"] == back


@pytest.mark.parametrize("how", ["close", "goodbye", "reset"])
def test_the_far_end_s_end_comes_behind_what_it_said(ends: Ends, how: str) -> None:
    ends.secured.sendall(b"last words")
    if how == "goodbye":
        ends.secured.setblocking(False)
        with pytest.raises(ssl.SSLError):  # the reply is not waited for
            ends.secured.unwrap()
    if how == "reset":
        assert ends.plain.recv(100) == b"last words"
        linger = struct.pack("ii", 1, 0)
        ends.secured.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    ends.secured.close()
    expected = b"" if how == "reset" else b"last words"
    assert read_all(ends.plain, 100, random.Random(0)) == expected


@pytest.mark.parametrize("has_unread", [False, True])
def test_the_owner_s_end_comes_behind_what_it_said(ends: Ends, has_unread: bool) -> None:
    """The owner's close is sent after all its data, even if it has not read all input: a refusal
    reaches a peer that is still sending."""
    if has_unread:
        ends.secured.sendall(b"unread")
        assert select.select([ends.plain], [], [], 10.0)[0]
    ends.plain.sendall(b"because " * 10_000)
    ends.plain.close()
    assert read_all(ends.secured, 1 << 20, random.Random(0)) == b"because " * 10_000


def test_who_talks_to_an_owner_that_is_gone_still_hears_why(ends: Ends) -> None:
    for _ in range(20):
        ends.secured.sendall(b"more and more " * 1000)
    ends.plain.sendall(b"because " * 100)
    ends.plain.close()
    passed = b""
    with suppress(ConnectionError):  # after the data
        while part := ends.secured.recv(1000):
            passed += part
    assert passed == b"because " * 100


def fill(end: socket.socket) -> int:
    """Write until nothing was accepted for a while; returns the number of bytes."""
    end.setblocking(False)
    num_sent, until_s = 0, time.monotonic() + 0.3
    while time.monotonic() < until_s:
        try:
            num_sent += end.send(b"x" * 16384)
            until_s = time.monotonic() + 0.3
        except (BlockingIOError, ssl.SSLWantWriteError):
            time.sleep(0.01)
        assert num_sent < 32 << 20
    return num_sent


def held_by_the_pump() -> tuple[int, int]:
    """The numbers of bytes held for the pump's owner and for the far end."""
    (thread,) = engine_tls._running
    assert thread.ident is not None
    frame: FrameType | None = sys._current_frames()[thread.ident]
    while frame is not None and frame.f_code is not engine_tls._pump.__code__:
        frame = frame.f_back
    assert frame is not None
    return len(frame.f_locals["owner"].unsent), len(frame.f_locals["tls"].unsent)


MOST_HELD = engine_tls._MAX_HELD_BYTES + engine_tls._CHUNK_BYTES


def test_a_reader_that_stops_bounds_what_is_held(ends: Ends) -> None:
    """If the far end does not read, the pump holds a bounded number of bytes; the owner's socket is
    then full, and the owner does not wait."""
    num_sent = fill(ends.plain)
    started_s = time.monotonic()
    with pytest.raises(BlockingIOError):
        ends.plain.send(b"x")
    assert time.monotonic() - started_s < 0.1, "the owner waited"
    assert engine_tls._MAX_HELD_BYTES <= held_by_the_pump()[1] < MOST_HELD
    assert len(read_all(ends.secured, num_sent, random.Random(0))) == num_sent


def test_an_owner_that_stops_reading_bounds_what_is_held_and_may_leave(ends: Ends) -> None:
    fill(ends.secured)
    assert engine_tls._MAX_HELD_BYTES <= held_by_the_pump()[0] < MOST_HELD
    ends.plain.close()


class CountedPoll:
    """Counts the waits."""

    num_waits = 0

    def __init__(self) -> None:
        self._poll = select.poll()
        self.register, self.unregister = self._poll.register, self._poll.unregister

    def poll(self) -> object:
        CountedPoll.num_waits += 1
        return self._poll.poll()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[CountedPoll]:
    """Requested before `ends`, whose pump must use it."""
    CountedPoll.num_waits = 0

    class Select:
        POLLIN, POLLOUT, poll = select.POLLIN, select.POLLOUT, CountedPoll

    monkeypatch.setattr(engine_tls, "select", Select)
    return CountedPoll


@pytest.mark.parametrize("state", ["idle", "far is full", "owner is full", "far has ended"])
def test_nothing_spins(counted: type[CountedPoll], ends: Ends, state: str) -> None:
    if state == "far is full":
        fill(ends.plain)
    elif state in ("owner is full", "far has ended"):
        fill(ends.secured)
        if state == "far has ended":
            ends.secured.close()
    time.sleep(0.2)
    before = counted.num_waits
    time.sleep(0.5)
    assert counted.num_waits - before <= 3


def test_a_message_takes_few_wake_ups(counted: type[CountedPoll], ends: Ends) -> None:
    for _ in range(100):
        ends.plain.sendall(b"ping")
        assert ends.secured.recv(10) == b"ping"
        ends.secured.sendall(b"pong")
        assert ends.plain.recv(10) == b"pong"
    assert counted.num_waits < 1000


def test_a_process_may_wait_for_last_words(ends: Ends) -> None:
    words = b"why " * 500_000
    sending = threading.Thread(target=lambda: (ends.plain.sendall(words), ends.plain.close()))
    passed: list[bytes] = []
    hearing = threading.Thread(
        target=lambda: passed.append(read_all(ends.secured, len(words), random.Random(0)))
    )
    sending.start()
    hearing.start()
    sending.join()
    wait_for_pumps(10.0)
    assert not engine_tls._running
    hearing.join()
    assert passed == [words]


def test_a_process_waits_for_no_pump_that_stands(ends: Ends) -> None:
    started_s = time.monotonic()
    wait_for_pumps(0.05)
    assert 0.04 < time.monotonic() - started_s < 2


def test_no_thread_no_pump(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ours, theirs = socket.socketpair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    wrapped = context.wrap_socket(ours, do_handshake_on_connect=False, server_hostname="x")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with wrapped, theirs, pytest.raises(OSError, match="new thread"):
        plain_end(wrapped)
    assert not engine_tls._running
