"""A node's end: its engines drain at once, whatever Redis does, and a second signal is heard."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

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

    def __init__(self, number: int) -> None:
        self.engine = SimpleNamespace(incarnation=f"{number:032x}", is_over=False)
        self.over = asyncio.Event()

    def drain(self, _: object) -> None:
        self.over.set()

    async def run(self) -> None:
        await self.over.wait()


async def test_a_redis_that_hangs_delays_no_drain_and_no_hurry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index: Any = FakeIndexLink()
    config = NodeConfig(name="p", num_engines=4)
    node = Supervisor(Role.PREFILL, EngineConfig(), config, ClusterSecret(), HungDirectory(), index)
    slots = [FakeSlot(number) for number in range(4)]
    monkeypatch.setattr(node, "_slots", slots)
    running = [asyncio.create_task(slot.run()) for slot in slots]
    hurry = asyncio.Event()
    draining = asyncio.create_task(node._drain(hurry, running))
    _, late = await asyncio.wait(running, timeout=0.5)
    assert not late
    assert not draining.done(), "others may still have to hear that its engines have left"
    hurry.set()
    await asyncio.wait_for(draining, 0.5)
