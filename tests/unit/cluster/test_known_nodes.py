"""The directory that queries known nodes while Redis is away: which nodes, and which replies it
trusts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
from fakes.clock import FakeClock
from fakes.directory import FakeDirectory

from baton.cluster.entries import BadEntry, decode_entry
from baton.cluster.known_nodes import KnownNodes, NodeAddress, answer_with
from baton.cluster.secret import ClusterSecret
from baton.core.errors import NodeLost
from baton.core.membership import Member, Role

SECRET = ClusterSecret("a secret of the tests")
BOTH = (Role.PREFILL, Role.DECODE)


def engine(number: int, node: str = "p", role: Role = Role.PREFILL) -> Member:
    """The `number`-th engine of this node."""
    address = f"host-{node}:5000"
    return Member(
        f"{number:032x}", role, node, address, "demo", "f", 512, 16, 64,
        engine_address=f"host-{node}:{6000 + number}", host_id="cd" * 16,
    )  # fmt: skip


def entries(*members: Member, secret: ClusterSecret = SECRET) -> Sequence[bytes]:
    return answer_with(members, secret).entries


class Redis(FakeDirectory):
    """A Redis directory that can be away, and be empty when it returns."""

    is_away = False

    async def replace(self, *members: Member) -> None:
        self._members = {member.incarnation: member for member in members}
        await self._tell()


class Nodes:
    """Queries nodes: `answers` has the replies by address; all other nodes fail."""

    def __init__(self) -> None:
        self.answers: dict[str, Sequence[bytes]] = {}
        self.requested: list[NodeAddress] = []
        self.num_at_once = self.most_at_once = 0

    async def __call__(self, node: NodeAddress) -> Sequence[bytes]:
        self.requested.append(node)
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        await asyncio.sleep(0)
        self.num_at_once -= 1
        if node.address not in self.answers:
            raise NodeLost("nobody is there")
        return self.answers[node.address]


class World:
    """The directory under test in simulated surroundings. `known` is a watcher's last list."""

    def __init__(self, roles: Sequence[Role] = BOTH) -> None:
        self.redis, self.nodes, self.clock = Redis(), Nodes(), FakeClock()
        self.directory = KnownNodes(self.redis, roles, self.nodes, SECRET, self.clock, self._sleep)
        self.reported: list[tuple[Member, ...]] = []
        self._sleeps, self._slept = asyncio.Event(), asyncio.Event()
        self._seconds = 0.0
        self.watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        async for members in self.directory.watch():
            self.reported.append(members)

    async def _sleep(self, seconds: float) -> None:
        self._seconds = seconds
        self._sleeps.set()
        await self._slept.wait()
        self._slept.clear()

    async def pass_by(self, seconds: float = 1.0) -> None:
        """Let time pass, then wait until all tasks are idle."""
        while seconds > 0:
            await self._sleeps.wait()
            self._sleeps.clear()
            self.clock.advance(self._seconds)
            seconds -= self._seconds
            self._slept.set()
            await self._sleeps.wait()
        for _ in range(10):
            await asyncio.sleep(0)

    async def known(self) -> set[Member]:
        for _ in range(10):
            await asyncio.sleep(0)
        assert list(self.reported[-1]) == sorted(self.reported[-1], key=lambda m: m.incarnation)
        return set(self.reported[-1])

    async def lose_redis_that_has(self, *members: Member) -> None:
        await self.redis.replace(*members)
        assert await self.known() == set(members)
        self.redis.is_away = True

    async def close(self) -> None:
        self.watching.cancel()
        await self.directory.close()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    await world.close()


P1, P2, P3 = engine(1), engine(2), engine(3)
D1, D2 = (engine(number, "d", Role.DECODE) for number in (11, 12))


async def test_an_engine_that_started_again_is_found_at_its_address(world: World) -> None:
    await world.lose_redis_that_has(P1, D1)
    world.nodes.answers[P1.address] = entries(P2)
    await world.pass_by()
    assert await world.known() == {P2, D1}, "who is silent keeps what was known of it"
    world.nodes.answers[P1.address] = entries(P2, P3)
    world.nodes.answers[D1.address] = entries(D2)
    await world.pass_by()
    assert await world.known() == {P2, P3, D2}
    world.nodes.answers.clear()
    await world.pass_by(100)
    assert await world.known() == {P2, P3, D2}


async def test_a_node_without_an_engine_says_so(world: World) -> None:
    await world.lose_redis_that_has(P1, D1)
    world.nodes.answers[P1.address] = ()
    await world.pass_by()
    assert await world.known() == {D1}
    world.nodes.answers[P1.address] = entries(P2)
    await world.pass_by()
    assert await world.known() == {P2, D1}, "and is asked again"


async def test_nobody_is_asked_while_redis_answers(world: World) -> None:
    await world.redis.replace(P1, D1)
    await world.pass_by(100)
    assert not world.nodes.requested


@pytest.mark.parametrize(
    "answer",
    [
        [b""],
        [b"junk"],
        [b"[" * 100_000],
        entries(P2, secret=ClusterSecret("a guess")),
        entries(P2, secret=ClusterSecret(None)),
        entries(replace(P2, address="elsewhere:5000")),
        entries(replace(P2, address=D1.address)),
        entries(replace(P2, role=Role.DECODE)),
        [*entries(P2), b"junk"],
        [*entries(P2), *entries(D2)],
    ],
    ids=lambda answer: f"{len(answer)} entries",
)
async def test_what_is_no_answer_changes_nothing(world: World, answer: Sequence[bytes]) -> None:
    await world.lose_redis_that_has(P1, D1)
    world.nodes.answers[P1.address] = answer
    await world.pass_by(3)
    assert await world.known() == {P1, D1}
    assert {node.address for node in world.nodes.requested} == {P1.address, D1.address}


async def test_redis_counts_again_once_it_is_back(world: World) -> None:
    await world.lose_redis_that_has(P1, D1)
    world.nodes.answers[P1.address] = entries(P2)
    await world.pass_by()
    world.redis.is_away = False
    await world.redis.replace(P3, D1)
    assert await world.known() == {P3, D1}
    requested = len(world.nodes.requested)
    await world.pass_by(10)
    assert await world.known() == {P3, D1}
    assert len(world.nodes.requested) == requested


async def test_redis_that_is_back_and_says_nothing_new_counts_again_soon(world: World) -> None:
    await world.lose_redis_that_has(P1, D1)
    world.nodes.answers[P1.address] = entries(P2)
    await world.pass_by()
    world.redis.is_away = False
    await world.pass_by(2)
    assert await world.known() == {P2, D1}, "it may not have been read yet"
    await world.pass_by(2)
    assert await world.known() == {P1, D1}


async def test_nodes_that_a_restarted_redis_does_not_list_yet_are_remembered(world: World) -> None:
    await world.lose_redis_that_has(P1, D1)
    world.redis.is_away = False
    await world.redis.replace()
    assert await world.known() == set()
    world.redis.is_away = True
    world.nodes.answers |= {P1.address: entries(P2), D1.address: entries(D1)}
    await world.pass_by()
    assert await world.known() == {P2, D1}
    world.nodes.answers.clear()
    await world.pass_by(100)
    world.nodes.answers[P1.address] = entries(P3)
    await world.pass_by()
    assert await world.known() == {P3, D1}, "who has answered is asked for as long as Redis is away"


async def test_who_left_in_time_is_asked_for_a_minute_and_no_longer(world: World) -> None:
    await world.redis.replace(P1, D1)
    await world.known()
    await world.lose_redis_that_has(P1)
    await world.pass_by(50)
    assert D1.address in {node.address for node in world.nodes.requested}
    await world.pass_by(20)
    world.nodes.requested.clear()
    await world.pass_by(5)
    assert {node.address for node in world.nodes.requested} == {P1.address}


async def test_a_round_is_bounded_and_comes_to_everybody(world: World) -> None:
    many = [engine(number, f"n{number:03}") for number in range(150)]
    await world.lose_redis_that_has(*many)
    for expected in (64, 128):
        await world.pass_by()
        assert len(set(world.nodes.requested)) == len(world.nodes.requested) == expected
    await world.pass_by()
    assert len(set(world.nodes.requested)) == 150
    assert world.nodes.most_at_once == 16


async def test_of_one_node_no_more_engines_are_taken_in_than_one_can_have(world: World) -> None:
    await world.lose_redis_that_has(P1)
    world.nodes.answers[P1.address] = entries(*(engine(number) for number in range(2, 100)))
    await world.pass_by()
    assert len(await world.known()) == 64


async def test_a_puller_asks_sources_alone() -> None:
    world = World(roles=(Role.PREFILL,))
    await world.lose_redis_that_has(P1, D1)
    world.nodes.answers |= {P1.address: entries(P2), D1.address: entries(D2)}
    await world.pass_by()
    assert await world.known() == {P2, D1}
    assert world.nodes.requested == [NodeAddress(P1.address, Role.PREFILL)]
    await world.close()


async def test_who_begins_to_watch_without_redis_gets_what_is_known(world: World) -> None:
    """A watcher that starts without Redis gets the known nodes, for a restarted engine."""
    await world.lose_redis_that_has(P1, D1)
    world.nodes.answers[P1.address] = entries(P2)
    await world.pass_by()
    num_asked = len(world.nodes.requested)
    assert set(await anext(world.directory.watch())) == {P2, D1}
    await world.pass_by()
    assert len(world.nodes.requested) == num_asked + 2, "all watchers share one look"


async def test_a_watcher_is_told_what_broke_the_look_and_who_watches_again_looks_again() -> None:
    class Broken(Redis):
        async def watch(self) -> AsyncIterator[tuple[Member, ...]]:
            yield tuple(self._members.values())
            raise RuntimeError("a bug")

    inner = Broken()
    directory = KnownNodes(inner, BOTH, Nodes(), SECRET, FakeClock())
    watch = directory.watch()
    assert await anext(watch) == ()
    with pytest.raises(ExceptionGroup, match="unhandled errors"):
        await anext(watch)
    await inner.replace(P1)
    watch = directory.watch()
    async with asyncio.timeout(5):
        while await anext(watch) != (P1,):
            pass
        with pytest.raises(ExceptionGroup, match="unhandled errors"):
            await anext(watch)
    await directory.close()


def test_an_answer_s_entries_are_none_for_redis() -> None:
    """Redis must not accept the entries of a node's reply: anyone could have recorded them."""
    (entry,) = entries(P1)
    with pytest.raises(BadEntry, match="too old"):
        decode_entry(entry, SECRET).check_age(now_ms=1_790_000_000_000)
