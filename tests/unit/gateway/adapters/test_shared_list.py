"""Gateways that share their list of adapters through Redis, whose data the test can lose or
corrupt.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
import pytest
from fakes.clock import FakeClock
from fakes.gateway.engine_link import FakeLink

from baton.cluster.redis_client import Command, RedisAway, RedisClient
from baton.cluster.secret import ClusterSecret
from baton.core.errors import InvalidRequest, ModelNotFound
from baton.core.membership import Member, Role
from baton.core.request.request import Adapter
from baton.gateway.adapters import adapter_registry
from baton.gateway.adapters.adapter_registry import AdapterRegistry
from baton.gateway.adapters.shared_list import AdapterEntry, SharedList
from baton.gateway.engines.engine_table import EngineTable
from baton.gateway.engines.linked_engine import LinkedEngine
from baton.gateway.engines.reported_load import ReportedLoad
from baton.prefix_index.mirror import PrefixMirror

ENGINE = "dd" * 16
ONE, TWO = "1" * 32, "2" * 32
SECRET = ClusterSecret("secret")


class PlayedRedis(RedisClient):
    """The Redis commands that the list needs."""

    def __init__(self) -> None:
        super().__init__("redis://localhost", "test", SECRET)
        self.value = b""
        self.is_away = False
        self.num_lost_races = 0

    async def run(self, *commands: Command, is_strict: bool = True) -> list[Any]:
        if self.is_away:
            raise RedisAway("away")
        return [self._answer(*command) for command in commands]

    def _answer(self, name: object, *args: Any) -> object:
        match name, args:
            case "GETRANGE", (_, first, last):
                return self.value[first : last + 1]
            case "SET", (_, value, "EX", _):
                self.value = value
            case "EVAL", (_, 1, _, old, new, _):
                if self.num_lost_races:
                    self.num_lost_races -= 1
                    return 0
                if old != self.value:
                    return 0
                self.value = new
            case _:
                assert name == "EXPIRE"
        return 1


class Gateway:
    """A gateway with one engine, whose responses the test sets."""

    def __init__(self, redis: PlayedRedis) -> None:
        self.shared = SharedList(redis, "base")
        table = EngineTable(PrefixMirror(FakeClock()))
        self.link = FakeLink(ENGINE)
        member = Member(ENGINE, Role.DECODE, "node", "h:1", "base", "fp", 200, 4, 100)
        load = ReportedLoad(0, 0, 0, 90, 90, False, frozenset())
        table.add(LinkedEngine(member, self.link, load))
        self.registry = AdapterRegistry(table, "base", shared=self.shared)

    def load(self, name: str, digest: str = ONE, path: str = "/a") -> None:
        self.registry._note(name, Adapter(name, digest, path))

    async def begin_load(self) -> asyncio.Task[Adapter]:
        """Start to load adapter `sql`; it stays pending until the engine has responded."""
        loading = asyncio.create_task(self.registry.load("sql", "/sql"))
        await asyncio.sleep(0)
        return loading

    def answer(self, digest: str) -> None:
        self.link.adapter_answers[-1].set_result(digest)

    async def exchange(self) -> dict[str, str]:
        await self.registry._exchange(self.shared)
        return {name: one.digest for name, one in self.registry.adapters.items()}


async def exchanged(*gateways: Gateway) -> dict[str, str]:
    """The adapters that all gateways serve, after each gateway has read the list twice."""
    found = [await one.exchange() for _ in range(2) for one in gateways][-len(gateways) :]
    assert all(one == found[0] for one in found)
    return found[0]


async def test_what_one_loads_or_unloads_all_serve_or_do_not() -> None:
    redis = PlayedRedis()
    first, second = Gateway(redis), Gateway(redis)
    first.load("sql")
    second.load("chat", TWO)
    assert await exchanged(first, second) == {"sql": ONE, "chat": TWO}
    second.registry.unload("sql")
    assert await exchanged(first, second) == {"chat": TWO}
    with pytest.raises(ModelNotFound):
        first.registry.unload("sql")
    first.load("sql", TWO)
    assert await exchanged(first, second, Gateway(redis)) == {"sql": TWO, "chat": TWO}


async def test_what_was_unloaded_stays_so_whoever_was_away() -> None:
    redis = PlayedRedis()
    first, second = Gateway(redis), Gateway(redis)
    first.load("sql")
    assert await exchanged(first, second) == {"sql": ONE}
    first.registry.unload("sql")
    redis.is_away = True
    assert await second.exchange() == {"sql": ONE}, "it goes on with what it knows"
    redis.is_away, redis.value = False, b""  # all data is lost
    await second.exchange()
    assert await exchanged(first, second, Gateway(redis)) == {}


async def test_two_that_load_one_name_at_once_agree() -> None:
    for order in itertools.permutations((0, 1)):
        redis = PlayedRedis()
        gateways = Gateway(redis), Gateway(redis)
        gateways[0].load("sql", ONE)
        gateways[1].load("sql", TWO)
        redis.num_lost_races = 2
        first = (ONE, TWO)[order[0]]
        assert await exchanged(*(gateways[index] for index in order)) == {"sql": first}


@pytest.mark.parametrize("digests", [(ONE, TWO), (TWO, ONE)])
@pytest.mark.parametrize("is_known", [True, False], ids=["the list was read", "at once"])
async def test_the_later_of_two_that_load_one_name_is_refused(
    digests: tuple[str, str], is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_registry, "_SHARE_S", 0.0)
    redis = PlayedRedis()
    first, second = Gateway(redis), Gateway(redis)
    loading = [await gateway.begin_load() for gateway in (first, second)]
    first.answer(digests[0])
    if is_known:
        await loading[0]
        await second.exchange()
    second.answer(digests[1])
    assert (await loading[0]).digest == digests[0]
    with pytest.raises(InvalidRequest, match="the name 'sql' is taken"):
        await loading[1]
    assert await exchanged(first, second) == {"sql": digests[0]}


async def test_two_that_load_the_same_at_once_both_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_registry, "_SHARE_S", 0.0)
    redis = PlayedRedis()
    gateways = Gateway(redis), Gateway(redis)
    loading = [await gateway.begin_load() for gateway in gateways]
    for gateway in gateways:
        gateway.answer(ONE)
    assert [one.digest for one in await asyncio.gather(*loading)] == [ONE, ONE]
    assert await exchanged(*gateways) == {"sql": ONE}


@pytest.mark.parametrize(
    "junk",
    [
        b"junk" * 400_000,
        SECRET.seal(b"\x00"),
        SECRET.seal(msgspec.msgpack.encode(("another model", [AdapterEntry("x", 1, ONE, "/x")]))),
        ClusterSecret("another").seal(
            msgspec.msgpack.encode(("base", [AdapterEntry("x", 1, ONE, "/x")]))
        ),
        *(
            SECRET.seal(msgspec.msgpack.encode(("base", [AdapterEntry(*entry)])))
            for entry in (
                ("base", 1, ONE, "/x"),
                ("x y", 1, ONE, "/x"),
                ("x", 0, ONE, "/x"),
                ("x", 1 << 60, ONE, "/x"),
                ("x", 1, "z" * 32, "/x"),
                ("x", 1, "", "/x"),
                ("x", 1, ONE, ""),
                ("x", 1, ONE, "/\0"),
                ("x", 1, ONE, "/" * 5000),
            )
        ),
    ],
    ids=range(13),
)
async def test_junk_is_no_adapter(junk: bytes) -> None:
    redis = PlayedRedis()
    redis.value = junk
    first, second = Gateway(redis), Gateway(redis)
    assert await first.exchange() == {}
    first.load("sql")
    assert await exchanged(first, second) == {"sql": ONE}


async def test_what_changed_here_while_redis_answered_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stale response of Redis does not undo a local change: it lists an adapter that another
    gateway unloaded and this one has loaded again."""
    redis = PlayedRedis()
    first, second = Gateway(redis), Gateway(redis)
    first.load("sql")
    await exchanged(first, second)
    second.registry.unload("sql")
    await second.exchange()

    run = redis.run

    async def answer_late(*commands: Command, is_strict: bool = True) -> list[Any]:
        answers = await run(*commands, is_strict=is_strict)
        if commands[0][0] == "EXPIRE":  # the last command of an exchange
            monkeypatch.undo()
            first.registry.unload("sql")
            first.load("sql", TWO)
        return answers

    monkeypatch.setattr(redis, "run", answer_late)
    assert await first.exchange() == {"sql": TWO}
    assert await exchanged(first, second) == {"sql": TWO}
