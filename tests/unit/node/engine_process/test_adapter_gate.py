"""Dispatches and orders wait for a thread that reads adapters; the test controls its reads."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
import torch

from baton.core.errors import AdapterRefused
from baton.core.request.request import Adapter, Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.lora.adapter_files import HostAdapter
from baton.engine.lora.adapter_room import AdapterRoom
from baton.engine.scheduling.sequence import Sequence
from baton.node.engine_process.dispatch_gate import DispatchGate, Gated
from baton.proto.v1 import node_pb2

DIGEST, OTHER = "a" * 32, "b" * 32
NO_GRAMMARS: Any = None  # no dispatch has a grammar


class Reader:
    """Reads when `may_read` is set, and records its arguments."""

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.requested: list[tuple[str, str]] = []

    def read(self, path: str, digest: str = "") -> HostAdapter:
        assert self.may_read.wait(10)
        self.requested.append((path, digest))
        if path == "/bad":
            raise AdapterRefused("no adapter")
        if path == "/broken":
            raise ZeroDivisionError("of the reader")
        return HostAdapter(digest or DIGEST, torch.zeros(1, 1))


class Kept:
    """`lora.adapter_room.Adapters` that does nothing."""

    def keep(self, adapter: HostAdapter) -> None: ...

    def forget(self, adapter: HostAdapter) -> None: ...

    def drop(self, digest: str) -> None: ...

    def load(self, slot: int, digest: str) -> None: ...


def sequence(
    request_id: str = "r",
    digest: str = DIGEST,
    path: str = "/a",
    fork_ids: tuple[str, ...] = (),
) -> Sequence:
    adapter = Adapter("a", digest, path)
    request = Request(request_id, 2, [1], SamplingParams(), adapter=adapter, fork_ids=fork_ids)
    return Sequence(request, 0, False, b"")


class World:
    def __init__(self, *, max_host: int = 2) -> None:
        self.reader = Reader()
        self.room = AdapterRoom[Sequence](Kept(), 1, max_host)
        self.reads: queue.SimpleQueue[Gated] = queue.SimpleQueue()
        self.sent: list[tuple[str, node_pb2.AdapterLoaded]] = []
        self.ended: list[tuple[str, str]] = []
        self.gate = DispatchGate(
            NO_GRAMMARS,
            self.room,
            self.reader,
            lambda key, error: self.ended.append((key, error.code)),
            self.reads.put,
            lambda gateway, message: self.sent.append((gateway, message.adapter_loaded)),
        )

    def next_read(self) -> list[tuple[str, node_pb2.Dispatch]]:
        self.reader.may_read.set()
        read = self.reads.get(timeout=10)
        dispatch = self.gate.released(read)
        return [] if dispatch is None else [(read.gateway, dispatch)]


def dispatch(path: str = "/a", digest: str = DIGEST, request_id: str = "r") -> node_pb2.Dispatch:
    return node_pb2.Dispatch(
        request_id=request_id,
        attempt=2,
        deadline_remaining_us=60_000_000,
        adapter=node_pb2.Adapter(name="a", digest=digest, path=path),
    )


def test_a_dispatch_waits_until_its_adapter_is_read() -> None:
    world = World()
    sent = dispatch()
    assert not world.gate.admits("g", sent)
    assert world.gate.num_waiting == 1
    assert world.next_read() == [("g", sent)]
    assert world.reader.requested == [("/a", DIGEST)] and not world.gate.num_waiting
    assert 0 < sent.deadline_remaining_us <= 60_000_000
    assert world.gate.admits("g", dispatch(request_id="s")), "it is in host memory now"


@pytest.mark.parametrize("path", ["/a", "/bad"])
def test_one_read_is_for_all_that_wait_for_it(path: str) -> None:
    world = World()
    for request_id in ("r", "s", "t"):
        assert not world.gate.admits("g", dispatch(path, request_id=request_id))
    assert not world.gate.admits("g", dispatch("/elsewhere", request_id="u"))
    released = [one.request_id for _ in range(4) for _, one in world.next_read()]
    assert sorted(released) == ["r", "s", "t", "u"] and not world.gate.num_waiting
    assert world.reader.requested == [(path, DIGEST), ("/elsewhere", DIGEST)]


def test_what_could_not_be_read_is_read_again_for_the_next() -> None:
    world = World()
    for _ in range(2):
        assert not world.gate.admits("g", dispatch("/bad"))
        world.next_read()
    assert world.reader.requested == [("/bad", DIGEST)] * 2


@pytest.mark.parametrize("path", ["/bad", "/broken"])
def test_one_that_cannot_be_read_goes_on_without(path: str) -> None:
    """A dispatch whose adapter cannot be read is admitted; the engine reports it missing."""
    world = World()
    assert not world.gate.admits("g", dispatch(path))
    assert [gateway for gateway, _ in world.next_read()] == ["g"]
    assert not world.room.has(DIGEST) and not world.gate.num_waiting


def test_nobody_waits_for_a_gateway_that_is_lost() -> None:
    world = World()
    assert not world.gate.admits("g", dispatch())
    assert not world.gate.admits("h", dispatch(request_id="s"))
    world.gate.gateway_lost("g")
    assert world.gate.num_waiting == 1
    assert world.next_read() == []
    assert [gateway for gateway, _ in world.next_read()] == ["h"]


def test_orders_are_answered() -> None:
    world = World()
    for number, path in enumerate(("/a", "/bad", "/broken"), start=1):
        world.gate.load("g", node_pb2.LoadAdapter(order_id=number, name="n", path=path))
        assert world.next_read() == []
    assert [(gateway, one.order_id, one.digest) for gateway, one in world.sent] == [
        *(("g", 1, DIGEST), ("g", 2, ""), ("g", 3, "")),
    ]
    texts = [one.error.message for _, one in world.sent]
    assert texts == ["", "no adapter", "ZeroDivisionError: of the reader"]


def test_an_order_needs_no_room() -> None:
    """An order to load is answered without room in host memory: requests read the adapter again
    when they have a slot."""
    world = World(max_host=1)
    world.gate.admits("g", dispatch())
    world.next_read()
    assert world.room.enter(sequence())
    world.gate.load("g", node_pb2.LoadAdapter(order_id=1, name="n", path="/other"))
    world.reader.read = lambda path, digest="": HostAdapter(OTHER, torch.zeros(1, 1))  # type: ignore[method-assign]
    world.next_read()
    (_, answer), *_ = world.sent
    assert answer.digest == OTHER and not answer.HasField("error")
    assert not world.room.has(OTHER) and world.room.has(DIGEST)


def test_a_dispatch_goes_on_where_host_memory_has_no_room_before_its_turn() -> None:
    world = World(max_host=1)
    world.gate.admits("g", dispatch())
    world.next_read()
    first, second = sequence(), sequence("s", OTHER)
    assert world.room.enter(first)
    assert world.gate.admits("g", dispatch("/other", OTHER, "s"))
    assert not world.room.enter(second) and world.reads.empty()
    world.room.leave(first)
    for _ in range(2):
        assert not world.room.unpark(), "its adapter is read, once"
    assert world.next_read() == []
    assert world.reader.requested == [("/a", DIGEST), ("/a", OTHER)]
    assert world.room.unpark() == [second]


def test_who_waits_for_an_adapter_that_cannot_be_read_ends_with_all_samples() -> None:
    world = World(max_host=1)
    waits = sequence("s", OTHER, "/bad", fork_ids=("t",))
    assert not world.room.enter(waits)
    assert world.next_read() == []
    assert world.ended == [("s/2", "unavailable"), ("t/2", "unavailable")]


def test_an_engine_without_adapters_says_so() -> None:
    sent: list[node_pb2.NodeMessage] = []
    gate = DispatchGate(
        NO_GRAMMARS, None, None, lambda key: True, lambda read: None, lambda _, m: sent.append(m)
    )
    assert gate.admits("g", dispatch())
    gate.load("g", node_pb2.LoadAdapter(order_id=1, name="n", path="/a"))
    assert "--enable-lora" in sent[0].adapter_loaded.error.message
