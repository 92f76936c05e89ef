"""A node's end: its engines drain at once, whatever Redis does, and a second signal is heard."""

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
from baton.node.supervisor.supervisor import Supervisor


class HungDirectory(FakeDirectory):
    """Nothing is answered."""

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


class BrokenDirectory(FakeDirectory):
    """Cannot be watched any more, as by a fault of ours."""

    async def watch(self) -> Any:
        yield ()
        raise ZeroDivisionError("of the directory")


async def test_a_node_that_no_longer_sees_who_is_listed_drains_and_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slot = FakeSlot(0)
    node = node_of(slot, directory=BrokenDirectory())
    signals: Any = SimpleNamespace(stop=asyncio.Event(), hurry=asyncio.Event())
    with pytest.raises(ZeroDivisionError, match="of the directory"):
        await asyncio.wait_for(node.serve(grpc.aio.server(), signals), 2.0)
    assert slot.has_drained
    assert "the node ends: ZeroDivisionError('of the directory')" in capsys.readouterr().out
