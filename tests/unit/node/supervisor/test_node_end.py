"""A node's shutdown: its engines drain at once, whatever the state of Redis, and a second signal
works.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from fakes.directory import FakeDirectory
from fakes.index_link import FakeIndexLink

from baton.cluster.secret import ClusterSecret
from baton.core.config import NodeConfig
from baton.core.engine_config import EngineConfig
from baton.core.membership import Role
from baton.core.process import event_loop
from baton.node.supervisor import supervisor
from baton.node.supervisor.supervisor import Supervisor
from baton.prefix_index.journal import CacheJournal
from baton.prefix_index.publisher import Publisher


class HungDirectory(FakeDirectory):
    """A directory that never replies."""

    async def withdraw(self, incarnation: str) -> None:
        await asyncio.Event().wait()


class FakeSlot:
    """An `EngineSlot` whose engine ends as soon as it drains."""

    is_ready, has_drained = True, False

    def __init__(self, number: int) -> None:
        self.engine = SimpleNamespace(incarnation=f"{number:032x}", is_over=False)
        self.over = asyncio.Event()

    async def start(self) -> None: ...

    def drain(self, _: object) -> None:
        self.has_drained = True
        self.over.set()

    async def run(self) -> None:
        await self.over.wait()

    async def stop(self, running: asyncio.Task[None], _: float) -> None:
        self.over.set()
        await running


def node_of(*slots: FakeSlot, directory: FakeDirectory) -> Supervisor:
    index: Any = FakeIndexLink()
    config = NodeConfig(name="p", num_engines=len(slots))
    node = Supervisor(Role.PREFILL, EngineConfig(), config, ClusterSecret(), directory, index)
    node._slots = [*slots]  # type: ignore[list-item]
    return node


async def test_a_redis_that_hangs_delays_no_drain_and_no_hurry() -> None:
    slots = [FakeSlot(number) for number in range(4)]
    node = node_of(*slots, directory=HungDirectory())
    running = [asyncio.create_task(slot.run()) for slot in slots]
    hurry = asyncio.Event()
    draining = asyncio.create_task(node._drain(hurry, running))
    _, late = await asyncio.wait(running, timeout=0.5)
    assert not late
    assert not draining.done(), "others may still have to hear that its engines have left"
    hurry.set()
    await asyncio.wait_for(draining, 0.5)


async def test_a_node_that_does_not_start_leaves_what_cannot_be_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "KILLED_S", 0.01)
    slot, num_kills = FakeSlot(0), 0

    def kill() -> None:
        nonlocal num_kills
        num_kills += 1

    slot.engine.kill, slot.engine.run = kill, asyncio.Event().wait
    node = node_of(slot, directory=FakeDirectory())
    await asyncio.wait_for(node._stop_engines([]), 2.0)
    assert num_kills == 1


class BrokenDirectory(FakeDirectory):
    """Fails at its first watch, as by a bug of ours."""

    num_watches = 0

    async def watch(self) -> Any:
        self.num_watches += 1
        yield ()
        if self.num_watches == 1:
            raise ZeroDivisionError("of the directory")
        await asyncio.Event().wait()


async def test_a_node_whose_look_at_the_directory_breaks_looks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node whose watch of the directory fails watches again: its engines keep their requests."""
    monkeypatch.setattr(event_loop, "AGAIN_S", 0.0)
    slot, directory = FakeSlot(0), BrokenDirectory()
    node = node_of(slot, directory=directory)
    signals: Any = SimpleNamespace(stop=asyncio.Event(), hurry=asyncio.Event())
    serving = asyncio.create_task(node.serve(grpc.aio.server(), signals))
    while directory.num_watches < 2:
        await asyncio.wait({serving}, timeout=0.01)
        assert not serving.done() and not slot.has_drained
    signals.stop.set()
    await asyncio.wait_for(serving, 2.0)
    assert slot.has_drained


async def test_an_engine_whose_cache_could_not_be_published_is_published_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_loop, "AGAIN_S", 0.0)
    node, done = node_of(FakeSlot(0), directory=FakeDirectory()), asyncio.Event()
    num_tries = 0

    async def publish(_: Publisher) -> None:
        nonlocal num_tries
        num_tries += 1
        if num_tries == 1:
            raise ZeroDivisionError
        done.set()

    monkeypatch.setattr(Publisher, "_publish", publish)
    monkeypatch.setattr(node, "_member", lambda _: SimpleNamespace(incarnation="e"))
    engine: Any = SimpleNamespace(
        incarnation="e", cache_journal=CacheJournal("0" * 32), send=lambda _: None
    )
    async with node._presence(engine), asyncio.timeout(2):
        await done.wait()
