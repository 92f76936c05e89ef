"""A peer whose connection stays open without messages, over real sockets; the test is the loop."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from baton.core.channels.channel import Channel
from baton.core.channels.frames import encode_payload
from baton.node.channels import link_table
from baton.node.channels.engine_channels import EngineChannels
from baton.node.channels.inbox import Inbox
from baton.node.channels.links import Kind, Link, LinkOver
from baton.proto.v1 import node_pb2

SILENCE_S = 1.2
KEEPALIVE = encode_payload(b"")


class Clock:
    """In place of the modules' `time`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class World:
    """An engine that is linked with a source; `peer` is the source's end."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.inbox: Inbox[Any] = Inbox()
        self.channels = EngineChannels(self.inbox, node_pb2.Welcome(), silence_s=SILENCE_S)
        self.channels.links._last_beat_s = self.clock.now_s
        ours, self.peer = socket.socketpair()
        self.link = Link(Kind.SOURCE, "a" * 32, Channel(ours))
        self.channels.links.add(self.link)

    def beat(self, seconds: float, interval_s: float = 0.25) -> None:
        """Let `seconds` pass, in which the engine sends heartbeats and its loop does nothing."""
        until_s = self.clock.now_s + seconds
        while self.clock.now_s < until_s:
            self.clock.now_s += interval_s
            self.channels.links.heartbeat(node_pb2.Heartbeat())

    def lost(self) -> list[Link]:
        return [item.link for item in self.inbox.receive(0) if isinstance(item, LinkOver)]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World()
    monkeypatch.setattr(link_table, "time", world.clock)
    monkeypatch.setattr("baton.core.channels.channel.time", world.clock)
    yield world
    world.channels.links.close()
    world.peer.close()
    world.inbox.close()


def test_a_peer_that_falls_silent_is_lost(world: World) -> None:
    world.peer.sendall(KEEPALIVE)
    assert not world.lost()
    world.beat(SILENCE_S - 0.3)
    assert not world.lost()
    world.beat(0.6)
    assert world.link in world.lost()


def test_one_that_says_empty_frames_is_not(world: World) -> None:
    for _ in range(20):
        world.peer.sendall(KEEPALIVE)
        assert not world.lost()
        world.beat(0.5)


def test_one_that_has_not_begun_is_not(world: World) -> None:
    """A peer that has sent nothing yet is not lost: its loop may be in a long step."""
    world.beat(10.0)
    assert not world.lost()


def test_what_waits_while_the_loop_is_in_a_long_step_has_come(world: World) -> None:
    world.peer.sendall(KEEPALIVE)
    assert not world.lost()
    world.peer.sendall(KEEPALIVE)
    world.beat(10.0)
    assert not world.lost()


def test_our_own_standstill_is_no_silence_of_others(world: World) -> None:
    world.peer.sendall(KEEPALIVE)
    assert not world.lost()
    world.beat(30.0, interval_s=30.0)
    world.beat(SILENCE_S - 0.3)
    assert not world.lost()
    world.beat(0.6)
    assert world.link in world.lost()
