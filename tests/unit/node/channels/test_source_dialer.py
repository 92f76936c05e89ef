"""A puller dials every announced source, and redials it, over real sockets."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from baton.cli.host.certs import make_certificates
from baton.core.channels.addresses import host_id
from baton.core.channels.admission import PULLER
from baton.core.channels.channel import Channel
from baton.core.channels.channel_listener import AcceptPolicy, ChannelListener
from baton.core.channels.engine_tls import EngineTls
from baton.core.channels.handshake import Opening, key_id
from baton.core.errors import PermissionDenied
from baton.node.channels import source_dialer
from baton.node.channels.links import Kind, Link
from baton.node.channels.source_dialer import SourceDialer
from baton.proto.v1 import engine_pb2, node_pb2

KEY = os.urandom(32)
PULLER_ID = "b" * 32
US = node_pb2.Welcome(incarnation=PULLER_ID, role="decode", model="m", fingerprint="f")
ELSEWHERE = b"e" * 16


def eventually(is_so: Callable[[], bool], within_s: float = 10.0) -> None:
    until_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < until_s, "it does not come"
        time.sleep(0.005)


class PlayedSource:
    """An engine that listens. `accepted` has a channel for every accepted link."""

    def __init__(self, name: str = "p", secure: object = None) -> None:
        self.accepted: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self.refusal = ""
        self.num_asked = 0
        incarnation = os.urandom(16).hex()
        self.listener = ChannelListener(
            incarnation,
            "127.0.0.1",
            0,
            lambda port: (f"127.0.0.1:{port}",),
            AcceptPolicy({key_id(KEY): KEY}, (PULLER,), self._check),
            secure,  # type: ignore[arg-type]
        )
        self.listener.start(lambda opening, channel: self.accepted.put(channel))
        self.listed = engine_pb2.ListedEngine(
            incarnation=incarnation,
            role="prefill",
            name=name,
            address=f"127.0.0.1:{self.listener.port}",
            host_id=host_id(),
            model="m",
            fingerprint="f",
        )

    def _check(self, opening: Opening, names: frozenset[str] | None) -> None:
        assert opening.dialer == PULLER_ID
        self.num_asked += 1
        if self.refusal:
            raise PermissionDenied(self.refusal)

    def close(self) -> None:
        self.listener.close()
        while not self.accepted.empty():
            self.accepted.get().close()


@dataclass
class World:
    """A puller; the test is its loop, and its links are in `came`."""

    dialer: SourceDialer
    came: queue.SimpleQueue[Link]
    sources: list[PlayedSource] = field(default_factory=list)

    def source(self, secure: object = None, **listed: object) -> PlayedSource:
        source = PlayedSource(secure=secure)
        for name, value in listed.items():
            setattr(source.listed, name, value)
        self.sources.append(source)
        return source

    def list(self, *sources: PlayedSource) -> None:
        self.dialer.list_members(engine_pb2.Members(engines=[each.listed for each in sources]))

    def next_link(self, source: PlayedSource) -> Link:
        link = self.came.get(timeout=10.0)
        assert link.name == source.listed.incarnation and link.kind is Kind.SOURCE
        assert link.host == "127.0.0.1"
        assert str(link) == f"source {source.listed.name} ({link.name})"
        source.accepted.get(timeout=10.0).close()
        return link

    def end(self, link: Link) -> None:
        """Close the link as the engine loop does when it finds the link over."""
        link.channel.close()
        self.dialer.link_over(link)

    def num_threads(self) -> int:
        return sum("_keep_linked" in thread.name for thread in threading.enumerate())


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The length of each pause, in seconds; the pauses themselves are skipped."""
    delays: list[float] = []

    def pause(self: SourceDialer, seconds: float) -> None:
        delays.append(seconds)
        time.sleep(0.002)

    monkeypatch.setattr(SourceDialer, "_pause", pause)
    return delays


@pytest.fixture
def world(delays: list[float]) -> Iterator[World]:
    yield from play(None)


def play(secure: object) -> Iterator[World]:
    came: queue.SimpleQueue[Link] = queue.SimpleQueue()
    links: list[Link] = []

    def on_link(link: Link) -> None:
        links.append(link)
        came.put(link)

    dialer = SourceDialer(US, KEY, secure, on_link)  # type: ignore[arg-type]
    world = World(dialer, came)
    yield world
    world.dialer.close()
    for link in links:
        link.channel.close()
    for source in world.sources:
        source.close()
    eventually(lambda: not world.num_threads())


@pytest.mark.parametrize("where", [host_id(), ELSEWHERE], ids=["this host", "another host"])
def test_every_engine_of_the_model_is_dialled(world: World, where: bytes) -> None:
    ours = [world.source(host_id=where) for _ in range(3)] + [world.source(role="decode")]
    others = [world.source(model="another")]
    world.list(*ours, *others)
    links = {link.name: link.opens_late for link in (world.came.get(timeout=10.0) for _ in ours)}
    assert links == {s.listed.incarnation: s.listed.role == "decode" for s in ours}
    world.list(*ours, *others)
    time.sleep(0.05)
    assert world.came.empty() and [source.num_asked for source in world.sources] == [1, 1, 1, 1, 0]
    assert world.num_threads() == 4


def test_what_is_sent_arrives(world: World) -> None:
    source = world.source()
    world.list(source)
    link = world.came.get(timeout=10.0)
    channel = source.accepted.get(timeout=10.0)
    link.channel.send(b"hello")
    got: list[bytes] = []

    def has_come() -> bool:
        got.extend(channel.receive()[0])
        return bool(got)

    eventually(has_come)
    assert got == [b"hello"]
    channel.close()
    world.end(link)


def test_a_link_that_ends_is_dialled_again(world: World) -> None:
    source = world.source()
    world.list(source)
    for _ in range(3):
        world.end(world.next_link(source))
    world.next_link(source)


def test_only_its_own_end_ends_a_link(world: World) -> None:
    source = world.source()
    world.list(source)
    first = world.next_link(source)
    world.end(first)
    world.next_link(source)
    world.dialer.link_over(first)  # reported twice
    time.sleep(0.05)
    assert source.num_asked == 2


def test_pauses_grow_and_begin_anew_behind_a_link_that_stood(
    world: World, delays: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = world.source()
    source.refusal = "not in the directory"
    world.list(source)
    eventually(lambda: len(delays) >= 9)
    assert delays[:9] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    source.refusal = ""
    link = world.next_link(source)
    num_delays = len(delays)
    world.end(link)  # it was up for no time
    link = world.next_link(source)
    assert delays[num_delays:] == [5.0]
    monkeypatch.setattr(source_dialer, "STEADY_S", 0.01)
    world.end(link)
    link = world.next_link(source)
    time.sleep(0.1)
    world.end(link)
    world.next_link(source)
    assert delays[num_delays:] == [5.0, 5.0, 0.1]


def test_nobody_listening_is_no_end_of_tries(world: World, delays: list[float]) -> None:
    gone, source = world.source(host_id=ELSEWHERE), world.source()
    gone.listener.close()
    gone.listener = PlayedSource().listener
    world.list(gone, source)
    world.next_link(source)
    eventually(lambda: len(delays) > 3)


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:99999", "a..b:1", "[::1]:0"])
def test_an_address_that_is_none_costs_nobody_else(
    world: World, delays: list[float], address: str
) -> None:
    bad, source = world.source(host_id=ELSEWHERE, address=address), world.source()
    world.list(bad, source)
    world.next_link(source)
    eventually(lambda: len(delays) > 3)
    assert world.num_threads() == 2


def test_a_bug_of_ours_is_logged_and_the_source_dialled_again(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dial, num_tries = source_dialer.dial, 0

    def break_twice(*arguments: Any, **named: Any) -> Any:
        nonlocal num_tries
        num_tries += 1
        if num_tries <= 2:
            raise ZeroDivisionError("of ours")
        return dial(*arguments, **named)

    monkeypatch.setattr(source_dialer, "dial", break_twice)
    source = world.source()
    world.list(source)
    world.next_link(source)
    (line,) = caplog.records
    assert line.exc_info is not None and "of ours" in line.message


def test_a_source_that_leaves_the_list_keeps_its_link_and_is_not_dialled_again(
    world: World,
) -> None:
    source = world.source()
    world.list(source)
    link = world.next_link(source)
    world.list()
    time.sleep(0.05)
    assert not link.channel.is_closed and world.num_threads() == 1
    world.end(link)
    eventually(lambda: not world.num_threads())
    assert world.came.empty() and source.num_asked == 1
    world.list(source)
    world.next_link(source)


def test_a_source_that_is_back_before_its_link_ends_is_dialled_by_one(world: World) -> None:
    source = world.source()
    world.list(source)
    link = world.next_link(source)
    for _ in range(5):
        world.list()
        world.list(source)
    assert world.num_threads() == 1
    world.end(link)
    world.next_link(source)
    assert source.num_asked == 2


def test_why_there_is_no_link_is_logged_once_and_anew_behind_a_link(
    world: World, delays: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    source = world.source()
    source.refusal = "no"
    world.list(source)
    for num_lines in (1, 2):
        num_delays = len(delays)
        eventually(lambda n=num_delays: len(delays) > n + 2)
        assert caplog.text.count(f"no link to {source.listed.name}") == num_lines
        source.refusal = ""
        link = world.next_link(source)
        source.refusal = "no"
        world.end(link)


def test_a_source_that_is_never_reached_is_given_up_with_its_entry(
    world: World, delays: list[float]
) -> None:
    source = world.source()
    source.refusal = "no"
    world.list(source)
    eventually(lambda: len(delays) > 2)
    world.list()
    eventually(lambda: not world.num_threads())


def test_a_source_of_another_make_is_linked_once_while_it_is_listed(world: World) -> None:
    source, other = world.source(fingerprint="another"), world.source()
    world.list(source, other)
    links = [world.came.get(timeout=10.0) for _ in range(2)]
    (link,) = (each for each in links if each.name == source.listed.incarnation)
    world.end(link)
    eventually(lambda: world.num_threads() == 1)
    for _ in range(3):
        world.list(source, other)
    time.sleep(0.05)
    assert source.num_asked == 1 and world.came.empty()
    world.list(other)
    world.list(source, other)
    link = world.came.get(timeout=10.0)
    assert link.name == source.listed.incarnation


def test_close_ends_all_threads_and_whoever_comes_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closing ends all threads: in a pause, with an established link, and within a handshake."""
    for world in play(None):
        refused, linked, slow = (world.source() for _ in range(3))
        refused.refusal = "no"
        may_pass, waits = threading.Event(), threading.Event()

        def check(
            opening: Opening,
            names: frozenset[str] | None,
            waits: threading.Event = waits,
            may_pass: threading.Event = may_pass,
        ) -> None:
            waits.set()
            assert may_pass.wait(10.0)

        monkeypatch.setattr(
            slow.listener, "_policy", AcceptPolicy({key_id(KEY): KEY}, (PULLER,), check)
        )
        world.list(refused, linked)
        world.next_link(linked)
        world.list(refused, linked, slow)
        assert waits.wait(10.0)
        assert world.num_threads() == 3
        world.dialer.close()
        eventually(lambda world=world: world.num_threads() == 1)  # type: ignore[misc]
        may_pass.set()
        eventually(lambda world=world: not world.num_threads())  # type: ignore[misc]
        assert world.came.empty()
        world.list(linked)  # the loop may do so before it ends
        eventually(lambda world=world: not world.num_threads())  # type: ignore[misc]
        assert world.came.empty()


def test_with_tls_frames_pass(tmp_path: Path) -> None:
    make_certificates(folder := tmp_path / "certs")

    def tls_of(role: str) -> EngineTls:
        files = (str(folder / name) for name in ("ca.crt", f"{role}.crt", f"{role}.key"))
        names = (f"{each}.baton.internal" for each in ("gateway", "prefill", "decode"))
        return EngineTls(*files, *names)

    for world in play(tls_of("decode").puller_wrap()):
        source = world.source(tls_of("prefill").accept(), host_id=ELSEWHERE)
        world.list(source)
        link = world.came.get(timeout=10.0)
        channel = source.accepted.get(timeout=10.0)
        channel.send(b"x" * 1_000_000)
        got: list[bytes] = []

        def has_come(link: Link = link, channel: Channel = channel, got: list[bytes] = got) -> bool:
            channel.flush()
            got.extend(link.channel.receive()[0])
            return bool(got)

        eventually(has_come)
        assert got == [b"x" * 1_000_000]
        channel.close()
        world.end(link)


# -- which engines a source finds in its list ------------------------------------------------------


def never(link: Link) -> None:
    raise AssertionError("nobody is dialled: the listed engines have another model")


def members(*incarnations: str, is_away: bool = False) -> engine_pb2.Members:
    engines = [engine_pb2.ListedEngine(incarnation=i, name=f"node-{i}") for i in incarnations]
    return engine_pb2.Members(engines=engines, is_away=is_away)


def test_who_is_listed_may_come_and_others_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.node.channels.source_dialer._WAIT_S", 0.05)
    listed = SourceDialer(US, KEY, None, never)
    assert not listed.is_listed("a")
    listed.list_members(members("a"))
    assert listed.is_listed("a") and not listed.is_listed("b")
    assert (listed.name_of("a"), listed.name_of("b")) == ("node-a", "")
    listed.list_members(members("b"))
    assert listed.is_listed("b") and not listed.is_listed("a")


@pytest.mark.parametrize("later", [members("a"), members(is_away=True)], ids=["listed", "away"])
def test_who_comes_a_moment_too_early_is_waited_for(later: engine_pb2.Members) -> None:
    listed = SourceDialer(US, KEY, None, never)
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(listed.is_listed("a")))
    thread.start()
    listed.list_members(members("b"))
    listed.list_members(later)
    thread.join()
    assert answers == [True]


def test_without_a_directory_everybody_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.node.channels.source_dialer._WAIT_S", 0.05)
    listed = SourceDialer(US, KEY, None, never)
    listed.list_members(members("a", is_away=True))
    assert listed.is_listed("b")
    listed.list_members(members("a"))
    assert not listed.is_listed("b")
