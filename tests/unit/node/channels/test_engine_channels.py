"""All channels of one engine, over real sockets; the test simulates its loop and all peers."""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.core.channels.channel import Channel
from baton.core.channels.frames import MAX_FRAME_BYTES, FrameBuffer, encode_payload
from baton.core.errors import BatonError, EngineFailed, HandoffFailed, InvalidRequest, NodeLost
from baton.kv_transfer.protocol.messages import Attach, Message, Refused, decode, encode
from baton.node.channels.engine_channels import EngineChannels
from baton.node.channels.inbox import Inbox
from baton.node.channels.links import Kind, Link, LinkOver, Received
from baton.proto.v1 import node_pb2

WELCOME = node_pb2.Welcome(incarnation="a" * 32)
PEERS = (Kind.PULLER, Kind.SOURCE)


def cancel(name: str = "r") -> node_pb2.GatewayMessage:
    return node_pb2.GatewayMessage(cancel=node_pb2.Cancel(request_id=name))


def attach(number: int = 0) -> Attach:
    return Attach(f"{number:032x}")


def packed(message: node_pb2.GatewayMessage | Message) -> bytes:
    is_ours = isinstance(message, node_pb2.GatewayMessage)
    return message.SerializeToString() if is_ours else encode(message)


def step(number: int, size: int = 0) -> node_pb2.NodeMessage:
    """The outputs of a step, of about `size` bytes."""
    output = node_pb2.RequestOutput(request_id="r" * size, first_index=number)
    return node_pb2.NodeMessage(outputs=node_pb2.StepOutputs(outputs=[output]))


def beat(number: int) -> node_pb2.Heartbeat:
    return node_pb2.Heartbeat(num_steps=number)


@dataclass
class Far:
    """The other end of a link, controlled by the test."""

    kind: Kind
    raw: socket.socket
    _frames: FrameBuffer = field(default_factory=FrameBuffer)

    def say(self, *messages: node_pb2.GatewayMessage | Message) -> None:
        for message in messages:
            self.raw.sendall(encode_payload(packed(message)))

    def hear(self) -> list[Any]:
        """All messages that have arrived."""
        unpack = node_pb2.NodeMessage.FromString if self.kind is Kind.GATEWAY else decode
        self._frames.take_in(self.raw)
        return [unpack(payload) for payload in self._frames.take()]

    def kinds(self) -> list[str | None]:
        return [message.WhichOneof("body") for message in self.hear()]

    def is_over(self) -> bool:
        """Whether the engine has closed the link. Nothing may be left to read."""
        try:
            return self.raw.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True


class Engine:
    """`turn` handles links as the engine loop does, and records everything else."""

    def __init__(self) -> None:
        self.inbox: Inbox[Any] = Inbox()
        self.channels = EngineChannels(self.inbox, WELCOME)
        self.received: list[Received] = []
        self.ended: list[tuple[Link, BatonError]] = []
        self.replaced: list[Link] = []
        self.far: list[Far] = []

    def link(
        self, kind: Kind = Kind.GATEWAY, name: str = "g", max_unsent_bytes: int = 1 << 20
    ) -> tuple[Link, Far]:
        """A link, established from the next turn on."""
        ours, theirs = socket.socketpair()
        link = Link(kind, name, Channel(ours, max_unsent_bytes))
        self.inbox.put(link)
        self.far.append(Far(kind, theirs))
        return link, self.far[-1]

    def turn(self, timeout_s: float = 0.0) -> None:
        for item in self.inbox.receive(timeout_s):
            match item:
                case Link():
                    older = self.channels.links.add(item)
                    self.replaced += [older] if older else []
                case Received(link):
                    if not link.channel.is_closed:
                        self.received.append(item)
                case LinkOver(link, error):
                    if not link.channel.is_closed:
                        self.channels.links.remove(link)
                        self.ended.append((link, error))
                case _:
                    item()

    def messages(self) -> list[Any]:
        return [item.message for item in self.received]

    def close(self) -> None:
        self.channels.links.close()
        for far in self.far:
            far.raw.close()
        for item in self.inbox.receive(0):
            if isinstance(item, Link):
                item.channel.close()
        self.inbox.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


def test_a_gateway_hears_welcome_then_the_last_heartbeat_then_the_rest(engine: Engine) -> None:
    _, early = engine.link(name="early")
    engine.turn()
    engine.channels.links.heartbeat(beat(1))
    engine.channels.links.heartbeat(beat(2))
    _, late = engine.link(name="late")
    engine.turn()
    engine.channels.to_gateway("late", step(0))
    engine.channels.links.heartbeat(beat(3))
    assert early.kinds() == ["welcome", "heartbeat", "heartbeat", "heartbeat"]
    received = late.hear()
    assert [message.WhichOneof("body") for message in received] == [
        "welcome", "heartbeat", "outputs", "heartbeat"
    ]  # fmt: skip
    assert received[0].welcome == WELCOME
    assert (received[1].heartbeat.num_steps, received[3].heartbeat.num_steps) == (2, 3)


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Threads switch as often as possible."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.usefixtures("many_switches")
def test_welcome_is_first_and_heartbeats_in_order_whoever_beats_meanwhile(engine: Engine) -> None:
    is_over = threading.Event()

    def go_on() -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            engine.channels.links.heartbeat(beat(number))

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        for number in range(200):
            link, far = engine.link(name=f"{number}")
            engine.turn()
            received = far.hear()
            assert received[0].HasField("welcome")
            numbers = [message.heartbeat.num_steps for message in received[1:]]
            assert numbers == sorted(numbers) and len({*numbers}) == len(numbers)
            engine.channels.links.remove(link)
            engine.far.remove(far)
            far.raw.close()
    finally:
        is_over.set()
        thread.join()
    assert not engine.ended


def test_peers_get_no_welcome_and_of_heartbeats_an_empty_frame(engine: Engine) -> None:
    _, far = engine.link(Kind.PULLER)
    engine.turn()
    engine.channels.links.heartbeat(beat(1))
    assert far.raw.recv(100) == encode_payload(b"")
    far.raw.sendall(encode_payload(b""))
    engine.turn()
    assert not engine.received and not engine.ended


def test_what_is_said_both_ways_comes_in_order(engine: Engine) -> None:
    _, gateway = engine.link(Kind.GATEWAY, "g")
    _, peer = engine.link(Kind.SOURCE, "p")
    engine.turn()
    assert gateway.kinds() == ["welcome"]
    requested = [cancel(f"{n}" * 1000) for n in range(50)]
    gateway.say(*requested)
    engine.turn()
    reported = [attach(n) for n in range(50)]
    peer.say(*reported)
    engine.turn()
    assert engine.messages() == [*requested, *reported]
    steps = [step(n) for n in range(50)]
    for message in steps:
        engine.channels.to_gateway("g", message)
        index = message.outputs.outputs[0].first_index
        engine.channels.to_peer(Kind.SOURCE, "p", attach(index))
    assert gateway.hear() == steps
    assert peer.hear() == [attach(n) for n in range(50)]


def test_what_is_for_somebody_else_goes_nowhere(engine: Engine) -> None:
    _, gateway = engine.link(Kind.GATEWAY, "g")
    _, peer = engine.link(Kind.PULLER, "p")
    engine.turn()
    gateway.hear()
    for name in ("p", "x"):
        engine.channels.to_gateway(name, step(0))
    for name in ("g", "x"):
        engine.channels.to_peer(Kind.PULLER, name, attach())
        engine.channels.to_peer(Kind.PULLER, name, Refused(HandoffFailed("no")))
    engine.turn()
    assert not gateway.hear() and not peer.hear() and not engine.ended


@pytest.mark.parametrize("kind", Kind)
def test_a_newer_link_of_a_pair_replaces_the_older_and_what_came_late(
    engine: Engine, kind: Kind
) -> None:
    older, far = engine.link(kind)
    engine.turn()
    late = cancel() if kind is Kind.GATEWAY else attach()
    far.say(late)
    newer, other = engine.link(kind)
    for _ in range(3):
        engine.turn()
    assert engine.replaced == [older]
    assert older.channel.is_closed and not newer.channel.is_closed
    assert not [item for item in engine.received if item.link is newer]
    far.hear()
    assert far.is_over()
    engine.channels.links.remove(older)  # its end is noticed late
    assert not newer.channel.is_closed
    other.hear()
    if kind is Kind.GATEWAY:
        engine.channels.to_gateway("g", step(1))
    else:
        engine.channels.to_peer(kind, "g", attach())
    assert len(other.hear()) == 1
    assert engine.channels.links.ledger()["links"][kind.value] == ["g"]


def test_items_of_a_link_that_was_closed_meanwhile_are_dropped(engine: Engine) -> None:
    """Items received in the same turn as a newer link belong to the closed link and are dropped."""
    _, far = engine.link()
    engine.turn()
    far.say(cancel())
    far.raw.shutdown(socket.SHUT_WR)
    items = [*engine.inbox.receive(0), *engine.inbox.receive(0)]
    newer, _ = engine.link()
    engine.turn()
    assert [type(item) for item in items] == [Received, LinkOver]
    assert all(item.link.channel.is_closed for item in items)
    assert not newer.channel.is_closed


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("num_bytes", [0, 3, 10])
def test_the_end_is_told_behind_what_came_before(
    engine: Engine, kind: Kind, num_bytes: int
) -> None:
    link, far = engine.link(kind)
    engine.turn()
    message = cancel("r" * 32) if kind is Kind.GATEWAY else attach()
    far.say(message)
    far.raw.sendall(encode_payload(packed(message))[:num_bytes])
    far.raw.close()
    engine.turn()
    engine.turn()
    assert engine.messages() == [message]
    ((ended, error),) = engine.ended
    assert ended is link and isinstance(error, NodeLost)
    assert link.channel.is_closed


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize(
    "words",
    [encode_payload(b"\xff\xff\xff"), struct.pack("<I", MAX_FRAME_BYTES + 1)],
    ids=["no message", "no frame"],
)
def test_what_cannot_be_read_ends_its_link_alone_which_is_told_why(
    engine: Engine, kind: Kind, words: bytes
) -> None:
    _, far = engine.link(kind, "strange")
    _, other = engine.link(kind, "sane")
    engine.turn()
    far.hear()
    message = cancel() if kind is Kind.GATEWAY else attach()
    far.say(message)
    engine.turn()
    far.raw.sendall(words)
    engine.turn()
    engine.turn()
    ((link, error),) = engine.ended
    assert link.name == "strange"
    assert type(error) is (InvalidRequest if kind is Kind.GATEWAY else HandoffFailed)
    assert engine.messages() == [message]
    (refused,) = far.hear()
    why = refused.refused if kind is Kind.GATEWAY else refused.error
    assert why.code == error.code and "cannot be read" in why.message
    assert far.is_over()
    other.say(message)
    engine.turn()
    assert engine.messages() == [message] * 2


def test_a_peer_that_is_refused_is_told_why_behind_the_rest(engine: Engine) -> None:
    link, far = engine.link(Kind.PULLER, "p")
    engine.turn()
    engine.channels.to_peer(Kind.PULLER, "p", attach())
    engine.channels.to_peer(Kind.PULLER, "p", Refused(HandoffFailed("dtype: 'a' here, 'b' there")))
    engine.turn()
    attached, refused = far.hear()
    assert attached == attach() and refused.error.message == "dtype: 'a' here, 'b' there"
    assert far.is_over()
    assert [ended for ended, _ in engine.ended] == [link]


def test_the_end_of_a_peer_does_not_end_its_next_link(engine: Engine) -> None:
    engine.link(Kind.PULLER, "p")
    engine.turn()
    engine.channels.to_peer(Kind.PULLER, "p", Refused(HandoffFailed("of another make")))
    newer, far = engine.link(Kind.PULLER, "p")
    engine.channels.links.add(newer)
    items = engine.inbox.receive(0)
    assert [item.link is newer for item in items if isinstance(item, LinkOver)] == [False]
    engine.channels.to_peer(Kind.PULLER, "p", attach())
    assert far.hear() == [attach()]


# -- peers that do not read ------------------------------------------------------------------------


def read_until(engine: Engine, far: Far, num_messages: int) -> list[Any]:
    read: list[Any] = []
    until_s = time.monotonic() + 10
    while len(read) < num_messages and time.monotonic() < until_s:
        engine.turn(0.01)
        read += far.hear()
    return read


def test_what_is_not_read_yet_is_sent_once_there_is_room(engine: Engine) -> None:
    _, far = engine.link(max_unsent_bytes=4 << 20)
    engine.turn()
    reported = [step(n, size=100_000) for n in range(15)]  # more than a socket holds
    for message in reported:
        engine.channels.to_gateway("g", message)
    assert engine.channels.links.has_unsent
    welcome, *rest = read_until(engine, far, 16)
    assert welcome.HasField("welcome") and rest == reported
    engine.turn()
    assert not engine.channels.links.has_unsent and not engine.ended
    assert engine.inbox.receive(0) == [], "room to write is of no more interest"


def test_what_the_heartbeat_s_thread_left_is_sent_once_there_is_room(engine: Engine) -> None:
    """A heartbeat that the heartbeat thread could not send in full is sent once there is room, even
    if nothing else is ever sent."""
    link, far = engine.link(max_unsent_bytes=4 << 20)
    engine.turn()
    while not link.channel.has_unsent:
        link.channel.send(step(0, size=100_000).SerializeToString())
    numbers = beat(1)
    numbers.waiting_by_caller.add(caller_id=7)
    thread = threading.Thread(target=engine.channels.links.heartbeat, args=(numbers,))
    thread.start()
    thread.join()
    received: list[Any] = []
    until_s = time.monotonic() + 10
    while not (received and received[-1].HasField("heartbeat")) and time.monotonic() < until_s:
        engine.turn(0.01)
        received += far.hear()
    assert received[-1].heartbeat == numbers
    assert not engine.channels.links.has_unsent


def test_room_that_the_heartbeat_s_thread_used_does_not_keep_the_loop_awake(
    engine: Engine,
) -> None:
    """The loop waited for room, finds nothing left to send, and sleeps again."""
    link, far = engine.link(max_unsent_bytes=4 << 20)
    engine.turn()
    while not link.channel.has_unsent:
        engine.channels.to_gateway("g", step(0, size=100_000))
    while link.channel.has_unsent:
        far.hear()
        thread = threading.Thread(target=engine.channels.links.heartbeat, args=(beat(1),))
        thread.start()
        thread.join()
    far.hear()
    engine.turn()
    began_s = time.monotonic()
    assert engine.inbox.receive(0.1) == []
    assert time.monotonic() - began_s >= 0.1


@pytest.mark.parametrize("who", ["loop", "heartbeats"])
def test_who_does_not_read_is_cut_off_and_blocks_nobody(engine: Engine, who: str) -> None:
    link, _ = engine.link(name="deaf", max_unsent_bytes=1 << 20)
    _, other = engine.link(name="good")
    engine.turn()
    other.hear()
    numbers = beat(1)
    for n in range(10_000):
        numbers.waiting_by_caller.add(caller_id=n, num_tokens=n)
    for _ in range(200):
        if who == "loop":
            engine.channels.to_gateway("deaf", step(0, size=100_000))
        else:
            engine.channels.links.heartbeat(numbers)
            other.hear()
        engine.turn()
        if engine.ended:
            break
    ((ended, error),) = engine.ended
    assert ended is link and "does not read" in error.message
    assert not engine.channels.links.has_unsent
    engine.channels.to_gateway("good", step(1))
    assert other.hear()[-1] == step(1)
    engine.channels.to_gateway("deaf", step(1))  # is dropped


def test_sending_to_who_is_gone_ends_the_link(engine: Engine) -> None:
    link, far = engine.link(Kind.PULLER, "p")
    engine.turn()
    far.raw.close()
    engine.channels.to_peer(Kind.PULLER, "p", attach())
    engine.turn()
    assert [ended for ended, _ in engine.ended] == [link]


# -- the end ---------------------------------------------------------------------------------------


def test_all_gateways_are_told_why_the_process_ends(engine: Engine) -> None:
    gateways = [engine.link(name=name)[1] for name in "xy"]
    _, peer = engine.link(Kind.PULLER, "p")
    engine.turn()
    for each in (*gateways, peer):
        each.hear()
    thread = threading.Thread(
        target=engine.channels.links.end, args=(EngineFailed("out of memory"),)
    )
    thread.start()
    thread.join()
    engine.channels.links.heartbeat(beat(1))
    for gateway in gateways:
        (message,) = gateway.hear()
        assert message.engine_ended.code == EngineFailed.code
        assert message.engine_ended.message == "out of memory"
        assert gateway.is_over()
    assert not peer.hear() and peer.is_over()


def test_the_end_is_told_to_the_others_where_the_loop_closes_a_channel_just_now(
    engine: Engine,
) -> None:
    """The other gateways are notified although one channel is closed: the process will end."""
    link, _ = engine.link(name="closed")
    _, far = engine.link(name="open")
    engine.turn()
    link.channel.close()
    engine.channels.links.end(EngineFailed("out of memory"))
    assert far.kinds() == ["welcome", "engine_ended"]


@pytest.mark.usefixtures("many_switches")
def test_links_may_end_while_another_thread_beats(engine: Engine) -> None:
    is_over = threading.Event()
    failures: list[BaseException] = []

    def go_on() -> None:
        try:
            while not is_over.is_set():
                engine.channels.links.heartbeat(beat(1))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=go_on)
    thread.start()
    for number in range(300):
        kind = (Kind.GATEWAY, *PEERS)[number % 3]
        link, far = engine.link(kind, f"{number % 7}")
        engine.turn()
        if number % 2:
            far.raw.close()
        if number % 5 == 0:
            engine.channels.links.remove(link)
    is_over.set()
    thread.join()
    assert not failures
    links = engine.channels.links.ledger()["links"]
    assert isinstance(links, dict) and sum(map(len, links.values())) <= 14


def test_nothing_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    engine = Engine()
    links: Sequence[Link] = [engine.link(kind, kind.value)[0] for kind in Kind]
    engine.link()  # never added
    engine.turn()
    engine.link(Kind.PULLER, "late")
    engine.close()
    assert all(link.channel.is_closed for link in links)
    assert len(os.listdir("/proc/self/fd")) == before
