"""Which peers get a channel to an engine and which do not, over unix sockets, TCP and TLS."""

from __future__ import annotations

import os
import queue
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from baton.cli.host.certs import make_certificates
from baton.core.channels import admission, channel_listener
from baton.core.channels.accept_thread import MAX_PENDING
from baton.core.channels.addresses import socket_address
from baton.core.channels.admission import GATEWAY, PULLER, SOCKET, THIS_HOST, dial
from baton.core.channels.channel import Channel
from baton.core.channels.channel_listener import AcceptPolicy, ChannelListener
from baton.core.channels.engine_tls import EngineTls
from baton.core.channels.frames import encode_payload
from baton.core.channels.handshake import CHALLENGE_BYTES, Dialer, Opening, key_id
from baton.core.errors import BatonError, HandoffFailed, NodeLost, PermissionDenied, StartupFailed

KEY, OLD_KEY, OTHER_KEY = os.urandom(32), os.urandom(32), os.urandom(32)
DIALER, OTHER = "d" * 32, "e" * 32


@dataclass
class Engine:
    """A listener whose channels are taken by the test."""

    addresses: tuple[str, ...] = ()
    secure: Any = None
    check: Callable[[Opening, frozenset[str] | None], None] = lambda opening, names: None
    host: str = "127.0.0.1"
    accepted: queue.SimpleQueue[tuple[Opening, Channel]] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.incarnation = os.urandom(16).hex()
        keys: Mapping[bytes, bytes] = {key_id(key): key for key in (KEY, OLD_KEY)}
        self.listener = ChannelListener(
            self.incarnation,
            self.host,
            0,
            lambda port: (f"127.0.0.1:{port}", *self.addresses),
            AcceptPolicy(keys, (GATEWAY, PULLER), lambda o, names: self.check(o, names)),
            self.secure,
        )
        self.address = f"127.0.0.1:{self.listener.port}"
        self.listener.start(lambda opening, channel: self.accepted.put((opening, channel)))

    def dial(self, *, is_local: bool, key: bytes = KEY, **how: Any) -> socket.socket:
        return dial(
            how.pop("purpose", GATEWAY),
            key,
            dialer=DIALER,
            listener=how.pop("listener", self.incarnation),
            address=None if is_local else how.pop("address", self.address),
            **how,
        )

    def connect(self, *, is_local: bool) -> socket.socket:
        """A connection without a handshake."""
        if not is_local:
            return socket.create_connection(("127.0.0.1", self.listener.port))
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(socket_address(self.incarnation, SOCKET))
        return stranger

    def where(self, *, is_local: bool) -> str:
        return THIS_HOST if is_local else self.address

    def close(self) -> None:
        self.listener.close()
        while not self.accepted.empty():
            self.accepted.get()[1].close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


@pytest.fixture(params=[True, False], ids=["unix", "tcp"])
def is_local(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def assert_joined(dialled: socket.socket, engine: Engine, purpose: bytes = GATEWAY) -> None:
    """Data sent by the dialer arrives at the channel that the listener handed over, and back."""
    opening, channel = engine.accepted.get(timeout=5.0)
    assert (opening.dialer, opening.purpose) == (DIALER, purpose)
    with dialled:
        dialled.settimeout(5.0)
        dialled.sendall(encode_payload(b"there"))
        payloads: list[bytes] = []
        until_s = time.monotonic() + 5
        while not payloads and time.monotonic() < until_s:
            payloads += channel.receive()[0]
        assert payloads == [b"there"]
        channel.send(b"back")
        assert dialled.recv(100) == encode_payload(b"back")
    channel.close()


def test_an_engine_may_stand_still_while_long_prompts_come(engine: Engine) -> None:
    """A gateway's messages are kept while the engine does not read for seconds, even if they exceed
    the kernel's socket buffers."""
    with engine.dial(is_local=False) as dialled:
        _, channel = engine.accepted.get(timeout=5.0)
        gateway = Channel(dialled)
        for _ in range(10):
            gateway.send(b"x" * 1_000_000)
        time.sleep(2.5)
        payloads: list[bytes] = []
        until_s = time.monotonic() + 5
        while len(payloads) < 10 and time.monotonic() < until_s:
            gateway.flush()
            got, is_over = channel.receive()
            assert not is_over
            payloads += got
        assert len(payloads) == 10
        channel.close()


@pytest.mark.parametrize(
    ("purpose", "lost_s"), [(GATEWAY, admission.GATEWAY_LOST_S), (PULLER, admission.LOST_S)]
)
def test_the_loss_of_a_host_is_noticed(engine: Engine, purpose: bytes, lost_s: float) -> None:
    with engine.dial(is_local=False, purpose=purpose) as dialled:
        _, channel = engine.accepted.get(timeout=5.0)
        for end in (dialled, channel._socket):
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            timeout_ms = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert timeout_ms == 1000 * lost_s
        channel.close()


@pytest.mark.parametrize("purpose", [GATEWAY, PULLER])
@pytest.mark.parametrize("key", [KEY, OLD_KEY], ids=["key", "key before"])
def test_who_proves_a_key_gets_a_channel(
    engine: Engine, is_local: bool, purpose: bytes, key: bytes
) -> None:
    dialled = engine.dial(is_local=is_local, purpose=purpose, key=key)
    assert_joined(dialled, engine, purpose)


def test_frames_right_behind_the_handshake_are_not_lost(engine: Engine, is_local: bool) -> None:
    with engine.connect(is_local=is_local) as raw:
        where = engine.where(is_local=is_local)
        ours = Dialer(KEY, GATEWAY, dialer=DIALER, listener=engine.incarnation, address=where)
        raw.sendall(ours.opening)
        challenge = raw.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        raw.sendall(ours.answer(challenge) + encode_payload(b"early"))
        _, channel = engine.accepted.get(timeout=5.0)
        assert channel.receive() == ([b"early"], False)
        channel.close()


@pytest.mark.parametrize(
    "how",
    [
        {"key": OTHER_KEY},
        {"purpose": b"kv"},
        {"listener": OTHER},
        {"address": "127.0.0.1:1"},
    ],
    ids=["key", "purpose", "incarnation", "address"],
)
def test_who_dials_wrongly_hears_nothing_and_gets_nothing(
    engine: Engine, is_local: bool, how: dict[str, Any]
) -> None:
    claims = {"key": KEY, "purpose": GATEWAY, "listener": engine.incarnation} | how
    where = claims.pop("address", engine.where(is_local=is_local))
    ours = Dialer(
        claims["key"],
        claims["purpose"],
        dialer=DIALER,
        listener=claims["listener"],
        address=where,
    )
    with engine.connect(is_local=is_local) as raw:
        raw.settimeout(5.0)
        raw.sendall(ours.opening)
        assert raw.recv(100) == b"", "no proof for who is not known"
    assert engine.accepted.empty()


def test_a_dialer_is_told_that_it_was_not_taken(engine: Engine, is_local: bool) -> None:
    with pytest.raises(NodeLost, match="handshake"):
        engine.dial(is_local=is_local, key=OTHER_KEY)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "127.0.0.1:99999", "a..b:1"])
def test_what_cannot_be_dialled_is_an_error_of_the_network(engine: Engine, address: str) -> None:
    with pytest.raises(OSError):
        engine.dial(is_local=False, address=address)


def test_a_port_beyond_the_last_is_not_another_one(engine: Engine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match="is no address"):
            engine.dial(is_local=False, address=f"127.0.0.1:{port + 65536}")


def test_an_answer_that_proves_nothing_gets_nothing(engine: Engine, is_local: bool) -> None:
    where = engine.where(is_local=is_local)
    ours = Dialer(KEY, GATEWAY, dialer=DIALER, listener=engine.incarnation, address=where)
    with engine.connect(is_local=is_local) as raw:
        raw.settimeout(5.0)
        raw.sendall(ours.opening)
        answer = ours.answer(raw.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
        raw.sendall(bytes(reversed(answer)))
        assert raw.recv(100) == b""
    assert engine.accepted.empty()


@pytest.mark.parametrize(
    "words",
    [b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n" * 10, struct.pack("<I", 0xFFFFFFFF) * 50, b"BATON"],
    ids=["http", "huge", "short"],
)
def test_nonsense_gets_nothing(engine: Engine, is_local: bool, words: bytes) -> None:
    with engine.connect(is_local=is_local) as raw:
        raw.settimeout(5.0)
        with suppress(OSError):  # it may be closed before all is sent
            raw.sendall(words)
            raw.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            assert raw.recv(100) == b""
    assert engine.accepted.empty()


def test_who_is_too_slow_is_hung_up_on(
    engine: Engine, is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer without a handshake in time is disconnected, even if it sends a byte now and then."""
    monkeypatch.setattr(admission, "ADMIT_S", 0.2)
    monkeypatch.setattr(channel_listener, "ADMIT_S", 0.2)
    with engine.connect(is_local=is_local) as silent, engine.connect(is_local=is_local) as slow:
        for each in (silent, slow):
            each.settimeout(5.0)
        began_s = time.monotonic()
        with pytest.raises(OSError):  # the far end has closed
            while time.monotonic() < began_s + 5:
                slow.sendall(b"B")
                time.sleep(0.02)
        assert time.monotonic() - began_s < 3
        assert silent.recv(1) == b""
    assert engine.accepted.empty()


def test_silent_strangers_keep_nobody_out(engine: Engine, is_local: bool) -> None:
    with ExitStack() as strangers:
        silent = [
            strangers.enter_context(engine.connect(is_local=is_local)) for _ in range(MAX_PENDING)
        ]
        began_s = time.monotonic()
        assert_joined(engine.dial(is_local=is_local), engine)
        assert time.monotonic() - began_s < 1.5, "it did not wait for one to be given up"
        silent[0].settimeout(5.0)
        assert silent[0].recv(1) == b"", "the eldest made room"
        for each in silent[5:]:
            each.setblocking(False)
            with pytest.raises(BlockingIOError):
                each.recv(1)


def test_strangers_do_not_push_out_who_has_proven_itself(engine: Engine, is_local: bool) -> None:
    """Unproven connections do not displace a proven peer that waits for the directory."""
    may_pass, waits = threading.Event(), threading.Event()

    def check(opening: Opening, names: frozenset[str] | None) -> None:
        waits.set()
        assert may_pass.wait(5.0)

    engine.check = check
    dialled: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: dialled.put(engine.dial(is_local=is_local)))
    thread.start()
    assert waits.wait(5.0)
    with ExitStack() as strangers:
        silent = [
            strangers.enter_context(engine.connect(is_local=is_local))
            for _ in range(MAX_PENDING + 1)
        ]
        silent[0].settimeout(5.0)
        assert silent[0].recv(1) == b""
        may_pass.set()
        thread.join()
        assert_joined(dialled.get(timeout=5.0), engine)


def test_a_refusal_s_reason_reaches_who_has_proven_itself(engine: Engine, is_local: bool) -> None:
    def check(opening: Opening, names: frozenset[str] | None) -> None:
        raise PermissionDenied("engine é is not in the directory " + "x" * 5000)

    engine.check = check
    with pytest.raises(PermissionDenied, match="engine é is not in the directory xxx"):
        engine.dial(is_local=is_local)
    assert engine.accepted.empty()


@pytest.mark.parametrize("side", ["listener", "dialer"])
def test_another_user_is_refused(
    engine: Engine, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(connection: socket.socket) -> None:
        raise HandoffFailed("the other end belongs to user 1")

    module = channel_listener if side == "listener" else admission
    monkeypatch.setattr(module, "require_same_user", refuse)
    with pytest.raises(BatonError) as caught:
        engine.dial(is_local=True)
    assert isinstance(caught.value, NodeLost if side == "listener" else HandoffFailed)
    assert engine.accepted.empty()
    assert_joined(engine.dial(is_local=False), engine)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_of_the_host_is_turned_away_with_the_key(engine: Engine) -> None:
    where = Dialer(
        KEY, GATEWAY, dialer=DIALER, listener=engine.incarnation, address=THIS_HOST
    ).opening
    address = socket_address(engine.incarnation, SOCKET)
    read, written = os.pipe()
    child = os.fork()
    if child == 0:
        received = b"?"
        try:
            os.setresuid(65534, 65534, 65534)
            stranger = socket.socket(socket.AF_UNIX)
            stranger.settimeout(5.0)
            stranger.connect(address)
            try:
                stranger.sendall(where)
                received = stranger.recv(100) or b"nothing"
            except ConnectionError:
                received = b"nothing"
        finally:
            os.write(written, received)
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"nothing"
    os.close(read)
    os.close(written)


def test_a_port_that_is_taken_is_said(engine: Engine) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    admits = AcceptPolicy({}, (GATEWAY,), lambda opening, names: None)
    with pytest.raises(StartupFailed, match="cannot listen"):
        ChannelListener(OTHER, "127.0.0.1", engine.listener.port, lambda port: (), admits)
    assert len(os.listdir("/proc/self/fd")) == num_open


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return socket.has_dualstack_ipv6()


@pytest.mark.skipif(not has_ipv6(), reason="there is no IPv6 here")
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_all_addresses_are_those_of_both_families(host: str) -> None:
    engine = Engine(host="::")
    engine.listener._addresses = (address := f"{host}:{engine.listener.port}",)
    assert_joined(engine.dial(is_local=False, address=address), engine)
    engine.close()


# -- shutdown --------------------------------------------------------------------------------------


def settle() -> None:
    """Wait until all threads of pending connections have ended."""
    until_s = time.monotonic() + 5
    while time.monotonic() < until_s and any(
        thread.name == "newcomer" for thread in threading.enumerate()
    ):
        time.sleep(0.01)


def test_nothing_is_left_open(is_local: bool) -> None:
    before = len(os.listdir("/proc/self/fd"))
    engine = Engine()
    joined = engine.dial(is_local=is_local)
    with engine.connect(is_local=is_local) as stranger, joined:
        stranger.settimeout(5.0)
        engine.accepted.get(timeout=5.0)[1].close()
        engine.close()
        with suppress(ConnectionResetError):  # if it was not accepted yet
            assert stranger.recv(1) == b"", "who has proven nothing is not waited for"
    settle()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_listener_that_never_started_can_be_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    admits = AcceptPolicy({}, (GATEWAY,), lambda opening, names: None)
    ChannelListener(OTHER, "127.0.0.1", 0, lambda port: (), admits).close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_nobody_is_handed_over_behind_the_end(engine: Engine, is_local: bool) -> None:
    may_pass, waits = threading.Event(), threading.Event()

    def check(opening: Opening, names: frozenset[str] | None) -> None:
        waits.set()
        assert may_pass.wait(5.0)

    engine.check = check
    dialled: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: dialled.put(engine.dial(is_local=is_local)))
    thread.start()
    assert waits.wait(5.0)
    engine.listener.close()
    may_pass.set()
    thread.join()
    with dialled.get(timeout=5.0) as late:
        late.settimeout(5.0)
        assert late.recv(1) == b"", "it is closed, not forgotten"
    assert engine.accepted.empty()
    engine.listener = Engine().listener  # for the fixture


def test_without_threads_strangers_are_hung_up_on_and_later_ones_are_served(
    engine: Engine, is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, engine.connect(is_local=is_local) as stranger:
        patch.setattr(threading.Thread, "start", refuse)
        stranger.settimeout(5.0)
        assert stranger.recv(1) == b""
    assert_joined(engine.dial(is_local=is_local), engine)


# -- TLS -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs") / "made"
    make_certificates(folder)
    return folder


def tls_of(certs: Path, role: str) -> EngineTls:
    files = (str(certs / name) for name in ("ca.crt", f"{role}.crt", f"{role}.key"))
    names = (f"{each}.baton.internal" for each in ("gateway", "prefill", "decode"))
    return EngineTls(*files, *names)


@pytest.fixture
def secured(certs: Path) -> Iterator[Engine]:
    """A source: pullers need the certificate of the decode role, gateways that of the gateway."""
    wanted = {GATEWAY: "gateway.baton.internal", PULLER: "decode.baton.internal"}

    def check(opening: Opening, names: frozenset[str] | None) -> None:
        if names is not None and wanted[opening.purpose] not in names:
            raise PermissionDenied(f"this needs the certificate of {wanted[opening.purpose]}")

    engine = Engine(secure=tls_of(certs, "prefill").accept(), check=check)
    yield engine
    engine.close()


@pytest.mark.parametrize(("role", "purpose"), [("gateway", GATEWAY), ("decode", PULLER)])
def test_within_tls_frames_pass(secured: Engine, certs: Path, role: str, purpose: bytes) -> None:
    secure = tls_of(certs, role).puller_wrap()
    assert_joined(secured.dial(is_local=False, purpose=purpose, secure=secure), secured, purpose)


def test_processes_of_the_host_need_no_tls(secured: Engine, certs: Path) -> None:
    secure = tls_of(certs, "decode").puller_wrap()
    dialled = secured.dial(is_local=True, purpose=PULLER, secure=secure)
    assert not isinstance(dialled, ssl.SSLSocket)
    assert_joined(dialled, secured, PULLER)


@pytest.mark.parametrize(("role", "purpose"), [("decode", GATEWAY), ("gateway", PULLER)])
def test_another_role_s_certificate_is_refused_with_the_reason(
    secured: Engine, certs: Path, role: str, purpose: bytes
) -> None:
    with pytest.raises(PermissionDenied, match="this needs the certificate of"):
        secure = tls_of(certs, role).puller_wrap()
        secured.dial(is_local=False, purpose=purpose, secure=secure)
    assert secured.accepted.empty()


def test_certificates_of_another_cluster_are_none(
    secured: Engine, certs: Path, tmp_path: Path
) -> None:
    make_certificates(other := tmp_path / "other")
    with pytest.raises(OSError):
        secured.dial(is_local=False, secure=tls_of(other, "gateway").puller_wrap())
    with pytest.raises((OSError, NodeLost)):  # without TLS
        secured.dial(is_local=False)
    assert secured.accepted.empty()


def test_a_dialer_wants_a_source_s_certificate(certs: Path) -> None:
    engine = Engine(secure=tls_of(certs, "gateway").accept())
    with pytest.raises(OSError, match="certificate"):
        engine.dial(is_local=False, secure=tls_of(certs, "decode").puller_wrap())
    engine.close()


def test_a_handshake_of_tls_has_an_end_too(
    secured: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_listener, "ADMIT_S", 0.2)
    with secured.connect(is_local=False) as silent:
        silent.settimeout(5.0)
        assert silent.recv(1) == b""


def test_silent_strangers_keep_nobody_out_of_tls(secured: Engine, certs: Path) -> None:
    with ExitStack() as strangers:
        for _ in range(MAX_PENDING + 10):
            strangers.enter_context(secured.connect(is_local=False))
        secure = tls_of(certs, "gateway").puller_wrap()
        assert_joined(secured.dial(is_local=False, secure=secure), secured)
