"""The lease on a real Redis: one holder, growing epochs, a Redis that stops or loses its data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest
import redis.asyncio as aioredis
from fakes.clock import FakeClock

from baton.cluster.lease import RedisLease
from baton.cluster.redis_client import RedisClient
from baton.cluster.redis_server import RedisServer
from baton.node.engine_process.promise_orders import PromiseOrders
from baton.proto.v1 import node_pb2

TTL_S = 1.0


@dataclass
class FakeEngine:
    tbt_target_s: float | None = 0.02
    is_promising: bool = True


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    server = RedisServer.start()
    yield server
    server.stop()


_clients: list[RedisClient] = []


@pytest.fixture(autouse=True)
async def _closed() -> AsyncIterator[None]:
    yield
    while _clients:
        await _clients.pop().close()


def lease(
    redis: RedisServer, name: str, cluster: str, clock: FakeClock | None = None
) -> RedisLease:
    _clients.append(RedisClient(redis.url, cluster))
    return RedisLease(_clients[-1], "promises", name, TTL_S, clock or FakeClock())


async def test_one_holder_and_the_next_has_a_higher_epoch(redis: RedisServer) -> None:
    a, b = lease(redis, "a", "one"), lease(redis, "b", "one")
    assert await a.take(0) == 1 and await b.take(0) is None
    for _ in range(5):  # longer than the TTL in total, each step far shorter
        await asyncio.sleep(TTL_S / 4)
        assert await a.take(0) == 1 and await b.take(0) is None, "renewed"
    await asyncio.sleep(TTL_S + 0.2)  # its holder died
    assert await b.take(0) == 2 and await a.take(0) is None
    assert a.epoch is None
    await b.close()
    assert await a.take(0) == 3, "left to others at once"
    await a.close()


async def test_who_was_paused_believes_in_it_for_no_longer_than_it_lasts(
    redis: RedisServer,
) -> None:
    clock = FakeClock()
    a = lease(redis, "a", "two", clock)
    assert await a.take(0) == 1
    clock.advance(TTL_S - 0.01)
    assert a.epoch == 1
    clock.advance(0.02)
    assert a.epoch is None
    await a.close()


async def test_an_epoch_is_above_all_that_engines_have_seen(redis: RedisServer) -> None:
    a = lease(redis, "a", "three")
    assert await a.take(8) == 8 and await a.take(8) == 8
    client = aioredis.Redis.from_url(redis.url)
    await client.flushall()
    assert await a.take(9) == 9, "Redis lost its data"
    assert await a.take(13) == 13, "another gave orders meanwhile"
    await client.aclose()
    await a.close()


async def test_two_holders_of_one_epoch_and_the_newer_is_followed_in_the_end(
    redis: RedisServer,
) -> None:
    """If Redis loses its data before the first holder orders anything, two holders share an epoch,
    and the newer one is followed in the end."""
    orders = PromiseOrders(FakeEngine())  # type: ignore[arg-type]

    def send(holder: str, epoch: int | None) -> bool:
        assert epoch is not None
        return orders.take(node_pb2.SetPromise(epoch=epoch, leader=holder))

    def least(holder: str) -> int:
        return orders.epoch + (orders.leader != holder)

    a, b = lease(redis, "a", "six"), lease(redis, "b", "six")
    assert await a.take(least("a")) == 1
    client = aioredis.Redis.from_url(redis.url)
    await client.flushall()
    assert await b.take(least("b")) == 1 == a.epoch, "both believe in it"
    assert send("a", a.epoch) and not send("b", b.epoch)
    assert await b.take(least("b")) == 2 and await a.take(least("a")) is None
    assert send("b", b.epoch) and not send("a", 1)
    assert await b.take(least("b")) == 2
    await client.aclose()
    for each in (a, b):
        await each.close()


@pytest.mark.parametrize("junk", [b"x", b"-1", b"1e400", b"9" * 40, b"nan"])
async def test_junk_in_its_keys_costs_the_lease_and_no_more(
    redis: RedisServer, junk: bytes
) -> None:
    client = aioredis.Redis.from_url(redis.url)
    await client.flushall()
    await client.set("baton:four:promises:epoch", junk)
    a = lease(redis, "a", "four")
    epoch = await a.take(3)
    assert epoch is None or 3 <= epoch < 1 << 54
    await client.delete("baton:four:promises:holder", "baton:four:promises:epoch")
    await client.lpush("baton:four:promises:holder", "no string")
    b = lease(redis, "b", "four")
    assert await b.take(0) is None
    for each in (a, b):
        await each.close()
    await client.aclose()


async def test_redis_goes_away_and_comes_back() -> None:
    server = RedisServer.start()
    clock = FakeClock()
    a = lease(server, "a", "five", clock)
    assert await a.take(0) == 1
    server.process.kill()
    server.process.wait()
    assert await a.take(1) == 1, "it lasts as long as it was given"
    clock.advance(TTL_S)
    assert await a.take(1) is None and a.epoch is None
    server.start_again()
    clock.advance(5.0)
    async with asyncio.timeout(10):
        while await a.take(2) != 2:  # noqa: ASYNC110 (of another process)
            await asyncio.sleep(0.05)
    await a.close()
    server.stop()
