"""The gateway that decides on promises: heartbeats in, orders out; leases that begin, end, and are
wrongly assumed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import pytest
from fakes.clock import FakeClock
from fakes.gateway.engine_link import FakeLink

from baton.core.membership import Member, Role
from baton.core.step_cost import StepCost
from baton.core.step_shape import StepShape
from baton.gateway.engines.engine_table import EngineTable
from baton.gateway.engines.linked_engine import LinkedEngine
from baton.gateway.engines.reported_load import ReportedLoad
from baton.gateway.promises.promise_decider import PromiseDecider
from baton.gateway.promises.promise_leader import PERIOD_S, PromiseLeader
from baton.prefix_index.mirror import PrefixMirror
from baton.proto.v1 import node_pb2
from baton.proto.v1.node_pb2 import Counters

COST = StepCost(0.012, (*(0.0,) * 6, 7.2e-6, *(20.6e-6,) * 3), 9e-10, 3.2e-8, max_rows=8192)
TARGET_S = 0.024
LONG, SHORT, HEAVY = (5, 8192, 256), (8, 256, 512), (6, 8192, 256)  # requests/s, prompt, output


@dataclass
class FakeLease:
    """`granted`: the epoch returned; None: another gateway holds the lease, or Redis is away."""

    granted: int | None = 1
    epoch: int | None = None
    least: int = 0
    is_closed: bool = False

    async def take(self, least_epoch: int) -> int | None:
        self.least, self.epoch = least_epoch, self.granted
        return self.epoch

    async def close(self) -> None:
        self.is_closed = True


class World:
    """Engines that execute orders, with counters as under a load `(per_s, prompt, output)`."""

    def __init__(self, num_prefill: int = 1, num_decode: int = 1) -> None:
        self.clock = FakeClock()
        self.table = EngineTable(PrefixMirror(self.clock))
        self.links: dict[str, FakeLink] = {}
        for index in range(num_prefill):
            self.join(f"p{index}", Role.PREFILL)
        for index in range(num_decode):
            self.join(f"d{index}", Role.DECODE)
        self.counts = [0.0, 0.0, 0.0]
        self.lease = FakeLease()
        self.leader = self.gateway(self.lease, "us")

    def gateway(self, lease: FakeLease, name: str) -> PromiseLeader:
        return PromiseLeader(PromiseDecider(self.table, self.clock, 1.0), lease, name)

    def join(self, name: str, role: Role, own_target_s: float = TARGET_S) -> None:
        member = Member(name, role, name, "h:1", "demo", "fp", 1 << 17, 16, 1 << 15)
        self.links[name] = FakeLink(name)
        load = ReportedLoad(0, 0, 0, 1 << 15, 1 << 14, False, frozenset(), step_tokens=8192)
        load = replace(load, tbt_target_s=own_target_s or None, step_cost=COST)
        welcome = node_pb2.Welcome(tbt_target_s=own_target_s)
        self.table.add(LinkedEngine(member, self.links[name], load, welcome))

    def play(self, seconds: float, mix: tuple[float, float, float]) -> None:
        """Run for that long under this load, shared by the engines; the leader polls all the
        while."""
        asyncio.run(self._play(seconds, mix))

    async def _play(self, seconds: float, mix: tuple[float, float, float]) -> None:
        per_s, prompt, output = mix
        engines = self.table.engines
        for _ in range(round(seconds / PERIOD_S)):
            self.clock.advance(PERIOD_S)
            rates = (per_s, per_s * prompt, per_s * output)
            self.counts = [c + PERIOD_S * r for c, r in zip(self.counts, rates, strict=True)]
            counters = Counters(
                num_prompts=int(self.counts[0] / len(engines)),
                num_prompt_tokens=int(self.counts[1] / len(engines)),
                num_decode_tokens=int(self.counts[2] / len(engines)),
            )
            for engine in engines.values():
                num_decodes = int(per_s * output * 0.01)
                decodes = StepShape(num_decodes=num_decodes, keys=num_decodes * int(prompt))
                engine.load = replace(engine.load, counters=counters, decodes=decodes)
            await self.leader.turn()
            for name, engine in engines.items():
                for epoch, leader, target_s in self.links[name].promises[-1:]:
                    engine.load = replace(
                        engine.load,
                        is_promise_withdrawn=target_s is None,
                        promise_epoch=epoch,
                        promise_leader=leader,
                    )

    def orders(self, name: str) -> list[float | None]:
        found = [target_s for _, _, target_s in self.links[name].promises]
        self.links[name].promises.clear()
        return found


def test_the_mix_changes_and_promises_follow_within_ten_seconds() -> None:
    world = World()
    world.play(10, LONG)
    assert world.orders("p0") == [None] and not world.orders("d0")
    world.play(60, LONG)
    assert not world.orders("p0"), "it stays"
    world.play(10, SHORT)
    assert world.orders("p0") == [TARGET_S]
    world.play(60, SHORT)
    assert not world.orders("p0")
    world.play(10, LONG)
    assert world.orders("p0") == [None] and not world.orders("d0")


def test_a_wish_moves_a_promise_once_it_has_lasted() -> None:
    """A promise moves only if the decision is stable; one that varies with arrivals moves
    nothing."""
    world = World()
    world.play(10, SHORT)
    for _ in range(20):
        world.play(1.5, LONG)
        world.play(10, SHORT)
    assert not world.orders("p0")


def test_requests_that_began_count_with_the_outputs_that_they_will_bring() -> None:
    """Expected outputs of started requests count: with prompts as when LONG moves a promise, long
    outputs that will fill both engines keep it."""
    per_s, prompt, _ = LONG
    for mean, orders in ((0, [None]), (128, [None]), (100_000, [])):
        world = World()
        for engine in world.table.engines.values():
            engine.load = replace(engine.load, mean_output_tokens=mean)
        world.play(10, (per_s, prompt, 1.0))
        assert world.orders("p0") == orders


def test_nothing_is_known_at_first_and_nothing_moves() -> None:
    world = World()
    for engine in world.table.engines.values():
        engine.load = replace(engine.load, step_cost=None)
    world.play(20, LONG)
    assert not world.orders("p0")


def test_without_a_lease_nothing_is_ordered_and_promises_stay() -> None:
    world = World()
    world.lease.granted = None
    world.play(20, LONG)
    assert not world.orders("p0") and world.lease.least == 1
    world.lease.granted = 4
    world.play(2.5, LONG)
    assert world.links["p0"].promises == [(4, "us", None)], "it knows the last seconds"
    world.orders("p0")
    world.lease.granted = None  # Redis is away
    world.play(20, SHORT)
    assert not world.orders("p0") and world.lease.least == 4


def test_an_epoch_that_another_gateway_used_will_not_do() -> None:
    world = World(num_prefill=2)
    ours, others = (world.table.engines[name] for name in ("p0", "p1"))
    ours.load = replace(ours.load, promise_epoch=4, promise_leader="us")
    world.play(PERIOD_S, SHORT)
    assert world.lease.least == 4
    others.load = replace(others.load, promise_epoch=4, promise_leader="them")
    world.play(PERIOD_S, SHORT)
    assert world.lease.least == 5


def test_the_last_decode_engine_dies_and_another_decodes_at_once() -> None:
    world = World()
    world.play(8, LONG)
    assert world.orders("p0") == [None]
    world.table.remove("d0")
    world.play(1, LONG)
    assert world.orders("p0")[:1] == [TARGET_S]
    world.join("d1", Role.DECODE)
    world.play(10, LONG)
    assert world.orders("p0")[-1:] == [None]


def test_an_engine_that_comes_back_begins_with_its_promise() -> None:
    world = World(num_prefill=2)
    world.play(10, HEAVY)
    moved = [name for name in ("p0", "p1") if world.orders(name)]
    assert moved
    world.table.remove(moved[0])
    world.join(moved[0], Role.PREFILL)
    world.play(4, HEAVY)
    assert not world.orders(moved[0]), "held for a while"


def test_a_decode_engine_that_promises_nothing_is_given_its_promise_back() -> None:
    world = World()
    engine = world.table.engines["d0"]
    engine.load = replace(engine.load, is_promise_withdrawn=True)
    world.play(1, SHORT)
    assert world.orders("d0")[:1] == [TARGET_S]


@pytest.mark.parametrize("num_decode", [0, 2])
def test_engines_without_a_promise_of_their_own_are_left_alone(num_decode: int) -> None:
    world = World(0, 0)
    world.join("p0", Role.PREFILL, own_target_s=0.0)
    for index in range(num_decode):
        world.join(f"d{index}", Role.DECODE, own_target_s=0.0)
    world.play(20, LONG)
    assert not any(link.promises for link in world.links.values()) and world.lease.epoch is None


async def test_a_leader_that_ends_leaves_the_lease() -> None:
    world = World()
    running = asyncio.create_task(world.leader.run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert world.lease.epoch is not None
    running.cancel()
    await asyncio.wait({running})
    await world.leader.close()
    assert world.lease.is_closed


async def test_a_gateway_whose_turn_fails_leaves_the_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()

    def fail() -> dict[str, float | None]:
        raise ZeroDivisionError

    monkeypatch.setattr(PromiseDecider, "orders", lambda _: fail())
    async with asyncio.timeout(5):
        with pytest.raises(ZeroDivisionError):
            await world.leader.run()
    assert world.lease.is_closed
