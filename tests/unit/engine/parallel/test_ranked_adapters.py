"""The other ranks have the same adapters as rank 0; here a file's name is also its digest."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from baton.core.errors import AdapterRefused, Overloaded
from baton.core.request.request import Adapter, Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.lora.adapter_files import HostAdapter
from baton.engine.lora.adapter_room import AdapterRoom
from baton.engine.parallel.rank_channel import MessageKind, RankChannel
from baton.engine.parallel.rank_group import RankGroup
from baton.engine.parallel.ranked_adapters import AdapterOrders, RankedAdapters
from baton.engine.scheduling.sequence import Sequence


class Memory:
    """A rank's adapters in place of RankAdapters. `errors`: raised when a path is read."""

    def __init__(self) -> None:
        self.host: set[str] = set()
        self.slots: dict[int, str] = {}
        self.errors: dict[str, Exception] = {}

    def read(self, path: str, digest: str = "") -> HostAdapter:
        if path in self.errors:
            raise self.errors[path]
        return HostAdapter(path, torch.zeros(1, 1))

    def keep(self, adapter: HostAdapter) -> None:
        self.host.add(adapter.digest)

    def forget(self, adapter: HostAdapter) -> None: ...

    def drop(self, digest: str) -> None:
        self.host.discard(digest)

    def load(self, slot: int, digest: str) -> None:
        assert digest in self.host, "a copy from where nothing is"
        self.slots[slot] = digest


class World:
    """RankedAdapters over two other ranks, which are threads."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self._ours = [ours for ours, _ in pairs]
        channels = [RankChannel(ours) for ours in self._ours]
        self.group = RankGroup(channels, 60.0, 60.0, lambda error: None, lambda line: None)
        self.mine, self.theirs = Memory(), [Memory() for _ in pairs]
        self.adapters = RankedAdapters(self.mine, self.group)  # type: ignore[arg-type]
        self._channels = [RankChannel(theirs) for _, theirs in pairs]
        both = zip(self.theirs, self._channels, strict=True)
        self.orders = [AdapterOrders(memory, channel) for memory, channel in both]  # type: ignore[arg-type]
        self._threads = [threading.Thread(target=self._follow, args=(n,)) for n in range(2)]
        for thread in self._threads:
            thread.start()

    def _follow(self, number: int) -> None:
        while (message := self._channels[number].receive()) is not None:
            assert message.kind is MessageKind.ADAPTER
            self.orders[number].run(message)

    def read(self, path: str) -> HostAdapter:
        """Read an adapter on all ranks, within 5 s."""
        found: list[HostAdapter | Exception] = []

        def run() -> None:
            try:
                found.append(self.adapters.read(path))
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(5)
        assert found, "a rank never answers"
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def settle(self) -> None:
        """Wait until the other ranks have processed all that was sent to them."""
        for channel in self._ours:
            channel.shutdown(socket.SHUT_WR)
        for thread in self._threads:
            thread.join(5)
        assert not any(orders._read for orders in self.orders), "what was read is left behind"

    def close(self) -> None:
        self.group.close()
        for thread in self._threads:
            thread.join(5)
        for channel in self._channels:
            channel.close()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def test_an_eviction_spares_what_was_read_again(world: World) -> None:
    """Rank 0 keeps adapters later than all ranks read them; all still hold the same."""
    room = AdapterRoom[Sequence](world.adapters, 1, 2)
    reads = [world.read(path) for path in ("a", "b", "c", "a", "b", "c")]
    for read in reads:
        room.keep(read)
    for slot, digest in enumerate(room.digests):
        world.adapters.load(slot, digest)
    world.settle()
    assert len(world.mine.slots) == 2
    for memory in world.theirs:
        assert (memory.host, memory.slots) == (world.mine.host, world.mine.slots)


def test_one_that_is_refused_when_read_again_is_served_on(world: World) -> None:
    world.adapters.keep(world.read("a"))
    world.theirs[1].errors["a"] = AdapterRefused("it is another one now")
    with pytest.raises(AdapterRefused, match="rank 2: it is another one now"):
        world.read("a")
    world.adapters.load(0, "a")
    world.settle()
    assert [memory.slots for memory in world.theirs] == [{0: "a"}] * 2


def test_a_rank_that_cannot_read_says_so_whatever_went_wrong(world: World) -> None:
    world.theirs[0].errors["a"] = PermissionError("not for you")
    with pytest.raises(AdapterRefused, match="rank 1: PermissionError: not for you"):
        world.read("a")
    world.adapters.keep(world.read("b"))
    world.settle()
    assert [memory.host for memory in world.theirs] == [{"b"}] * 2


def test_what_finds_no_room_is_left_in_no_rank_s_memory(world: World) -> None:
    room = AdapterRoom[Sequence](world.adapters, 1, 1)
    room.keep(world.read("a"))
    adapter = Adapter("a", "a", "a")
    sequence = Sequence(Request("r", 0, [1], SamplingParams(), adapter=adapter), 0, False, b"")
    assert room.enter(sequence), "its slot is in use from here on"
    for path in "bcd":
        with pytest.raises(Overloaded):
            room.keep(world.read(path))
    world.settle()
    assert [memory.host for memory in (world.mine, *world.theirs)] == [{"a"}] * 3
