"""Where an engine's links come from: its listener and its dialer; which peers are accepted, and the
shutdown.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from baton.cli.host.certs import make_certificates
from baton.core.channels import engine_tls
from baton.core.channels.addresses import host_id
from baton.core.channels.admission import GATEWAY, PULLER, dial, read_frame
from baton.core.channels.channel import Channel
from baton.core.channels.engine_tls import EngineTls
from baton.core.channels.frames import MAX_FRAME_BYTES
from baton.core.channels.handshake import key_id
from baton.core.config import NodeConfig
from baton.core.errors import EngineFailed, PermissionDenied
from baton.node.channels import source_dialer
from baton.node.channels.inbox import Inbox
from baton.node.channels.links import Kind, Link, LinkOver
from baton.node.engine_process.engine_links import EngineLinks, Keys
from baton.proto.v1 import engine_pb2, node_pb2

KEY = os.urandom(32)
KEYS = Keys(KEY, {key_id(KEY): KEY})
CALLER = "c" * 32


class Engine:
    """An engine's links; the test is its loop."""

    def __init__(self, tls: EngineTls | None = None, *, role: str = "prefill", **node: Any):
        self.inbox: Inbox[Any] = Inbox()
        name = os.urandom(16).hex()
        self.welcome = node_pb2.Welcome(incarnation=name, model="m", role=role)
        config = NodeConfig(host="127.0.0.1", **node)
        self.links = EngineLinks(self.inbox, self.welcome, config, KEYS, tls)
        self.ready = self.links.ready(self.welcome)
        self.links.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ready.port}"

    def dial(self, purpose: bytes = GATEWAY, *, is_local: bool = True, **how: Any) -> socket.socket:
        return dial(
            *(purpose, KEY),
            dialer=CALLER,
            listener=self.welcome.incarnation,
            address=None if is_local else self.address,
            **how,
        )

    def list(self, *incarnations: str) -> None:
        engines = [engine_pb2.ListedEngine(incarnation=each) for each in incarnations]
        self.links.dialer.list_members(engine_pb2.Members(engines=engines))

    def add_next(self) -> Link:
        until_s = time.monotonic() + 5
        while time.monotonic() < until_s:
            for item in self.inbox.receive(1.0):
                if isinstance(item, Link):
                    self.links.channels.links.add(item)
                    return item
                if isinstance(item, LinkOver):
                    self.links.channels.links.remove(item.link)
        raise AssertionError("nobody comes")

    def close(self) -> None:
        self.links.close()
        self.inbox.close()


@pytest.fixture
def source() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


def hear(end: socket.socket) -> list[node_pb2.NodeMessage]:
    """All messages until the connection ends."""
    messages, until_s = [], time.monotonic() + 5.0
    with suppress(ConnectionError):
        while True:
            payload = read_frame(end, until_s, MAX_FRAME_BYTES)
            messages.append(node_pb2.NodeMessage.FromString(payload))
    return messages


def test_the_supervisor_is_told_where_the_engine_listens(source: Engine) -> None:
    assert source.ready.welcome == source.welcome
    assert source.ready.host_id == host_id()
    with source.dial(is_local=False):
        assert source.add_next().kind is Kind.GATEWAY


@pytest.mark.parametrize("is_local", [True, False], ids=["unix", "tcp"])
def test_a_gateway_needs_the_key_alone_and_a_puller_its_entry(
    source: Engine, is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_dialer, "_WAIT_S", 0.05)
    with source.dial(is_local=is_local):
        assert source.add_next().kind is Kind.GATEWAY
    with pytest.raises(PermissionDenied, match=f"engine {CALLER} is not in the directory"):
        source.dial(PULLER, is_local=is_local)
    source.list(CALLER)
    with source.dial(PULLER, is_local=is_local):
        link = source.add_next()
        assert (link.kind, link.name) == (Kind.PULLER, CALLER)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_dials_who_is_listed(source: Engine, role: str) -> None:
    """An engine dials listed sources; it opens the pools at once for those that hand off to it."""
    puller = Engine(role=role)
    source.list(puller.welcome.incarnation)
    listed = engine_pb2.ListedEngine(
        incarnation=source.welcome.incarnation,
        role="prefill",
        address=source.address,
        host_id=host_id(),
        model="m",
    )
    puller.links.dialer.list_members(engine_pb2.Members(engines=[listed]))
    there, here = source.add_next(), puller.add_next()
    assert (there.kind, there.name) == (Kind.PULLER, puller.welcome.incarnation)
    assert (here.kind, here.name) == (Kind.SOURCE, source.welcome.incarnation)
    assert here.host == "127.0.0.1" and here.opens_late == (role == "prefill")
    puller.close()


def test_a_port_that_is_taken_is_replaced_unless_it_was_made_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        engine = Engine(engine_port=port)
        assert engine.ready.port not in (0, port)
        with engine.dial(is_local=False):
            engine.add_next()
        engine.close()
        with pytest.raises(Exception, match="cannot listen"):
            Engine(engine_port=port, advertise_engine=f"engine.example:{port}")


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
    engine = Engine(tls_of(certs, "prefill"))
    engine.list(CALLER)
    yield engine
    engine.close()


@pytest.mark.parametrize("role", ["gateway", "decode"])
@pytest.mark.parametrize("purpose", [GATEWAY, PULLER])
def test_certificates_say_who_may_do_what(
    secured: Engine, certs: Path, role: str, purpose: bytes
) -> None:
    secure = tls_of(certs, role).puller_wrap()
    if (role == "gateway") is (purpose == GATEWAY):
        with secured.dial(purpose, is_local=False, secure=secure):
            secured.add_next()
    else:
        wanted = "gateway" if purpose == GATEWAY else "decode.baton.internal or prefill"
        with pytest.raises(PermissionDenied, match=f"{wanted}.baton.internal"):
            secured.dial(purpose, is_local=False, secure=secure)
    with secured.dial(purpose):  # on the same host, the user is checked instead
        secured.add_next()


@pytest.mark.parametrize("is_closed", [False, True], ids=["exits", "closes"])
def test_last_words_pass_through_tls_before_the_process_ends(
    secured: Engine, certs: Path, is_closed: bool
) -> None:
    """The last message passes through TLS before the process ends, behind all other data."""
    secure = tls_of(certs, "gateway").puller_wrap()
    received: list[node_pb2.NodeMessage] = []
    gateway = secured.dial(is_local=False, secure=secure)
    thread = threading.Thread(target=lambda: received.extend(hear(gateway)))
    name = secured.add_next().name
    output = node_pb2.RequestOutput(request_id="r" * 50_000)
    step = node_pb2.NodeMessage(outputs=node_pb2.StepOutputs(outputs=[output]))
    for _ in range(20):
        secured.links.channels.to_gateway(name, step)
    thread.start()
    while secured.links.channels.links.has_unsent:
        for item in secured.inbox.receive(0.1):
            raise AssertionError(item)
    if is_closed:
        secured.links.close()
    else:
        secured.links.end(EngineFailed("out of memory"))
    assert not engine_tls._running, "what follows is the end of all threads"
    thread.join()
    gateway.close()
    expected = ["welcome"] + ["outputs"] * 20 + ([] if is_closed else ["engine_ended"])
    assert [message.WhichOneof("body") for message in received] == expected
    if is_closed:
        secured.links = Engine().links  # for the fixture


def test_who_was_accepted_too_late_is_closed() -> None:
    """A connection accepted after the loop has ended is closed: the process may live on."""
    engine = Engine()
    with engine.dial() as late:
        until_s = time.monotonic() + 5
        while not engine.inbox._items and time.monotonic() < until_s:
            time.sleep(0.01)
        engine.links.close()
        late.settimeout(5.0)
        assert late.recv(1) == b""
    engine.inbox.close()


def test_nothing_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    source, puller = Engine(), Engine(role="decode")
    with source.dial() as gateway, puller.dial(is_local=False) as other:
        for engine in (source, puller):
            engine.add_next()
            engine.close()
        assert isinstance(gateway, socket.socket) and isinstance(other, socket.socket)
    until_s = time.monotonic() + 5
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < until_s:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_link_belongs_to_the_loop_alone(source: Engine) -> None:
    """Nothing is sent on a channel before the loop has added it."""
    with source.dial() as gateway:
        gateway.setblocking(False)
        time.sleep(0.05)
        with pytest.raises(BlockingIOError):
            gateway.recv(1)
        link = source.add_next()
        assert isinstance(link.channel, Channel)
        gateway.settimeout(5.0)
        assert gateway.recv(1)
