"""Requests are routed to cached prefixes: real nodes, gateway and Redis (wiped, killed)."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass

import pytest
import redis
from checkpoints import write_byte_tokenizer
from deployments import Running, running

from baton.client import AsyncClient
from baton.client.messages import Result
from baton.cluster.redis_client import RedisClient
from baton.cluster.redis_server import RedisServer, find_redis_server
from baton.cluster.secret import ClusterSecret
from baton.core.config import UpConfig
from baton.core.engine_config import EngineConfig
from baton.core.ports import Clock
from baton.core.request.token_ids import BlockHash
from baton.prefix_index.follower import Follower
from baton.prefix_index.journal import CacheJournal
from baton.prefix_index.messages import MAX_MESSAGE_BYTES, Delta, decode, encode
from baton.prefix_index.mirror import PrefixMirror
from baton.prefix_index.publisher import Publisher
from baton.prefix_index.redis_link import LEASE_S, RedisIndexLink

VOCAB_SIZE = 320
BLOCK_SIZE = 16
PREFIX_TOKENS = 12 * BLOCK_SIZE
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "initializer_range": 0.3,
}


@dataclass
class World:
    """Two prefill nodes, a decode node, a gateway, and a Redis that the tests wipe and kill."""

    system: Running
    redis: RedisServer


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(MODEL))
    write_byte_tokenizer(folder)
    engine = EngineConfig(model=str(folder), device="cpu", load_format="dummy", num_kv_blocks=512)
    with RedisServer.start() as server:
        up = UpConfig(mode="disaggregated", num_prefill_nodes=2, redis_url=server.url)
        with running(engine, up=up) as system:
            yield World(system, server)


def prompt_of(group: int, member: int) -> list[int]:
    """Prompts of one group share their first blocks; those of two groups share none."""
    prefix, tail = random.Random(group), random.Random(f"{group} {member}")
    ids = [prefix.randrange(3, VOCAB_SIZE) for _ in range(PREFIX_TOKENS)]
    return ids + [tail.randrange(3, VOCAB_SIZE) for _ in range(7)]


async def generate(client: AsyncClient, group: int, member: int) -> Result:
    generation = client.generate(
        prompt_token_ids=prompt_of(group, member), max_tokens=4, temperature=0.0, ignore_eos=True
    )
    return await generation.finish()


async def until_heard_by(server: RedisServer, num_listeners: int) -> None:
    """Wait until that many clients have subscribed to what engines publish."""
    channel = "baton:default:prefix"
    with redis.Redis.from_url(server.url) as admin:
        async with asyncio.timeout(20):
            while admin.pubsub_numsub(channel) != [(channel.encode(), num_listeners)]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@asynccontextmanager
async def reported(world: World, num_blocks: int) -> AsyncIterator[None]:
    """At the end, wait until engines have published at least `num_blocks` new blocks."""
    secret = ClusterSecret.of(world.system.deployment.cluster)
    link = RedisIndexLink(RedisClient(world.redis.url, "default", secret))

    async def listen() -> None:
        num_stored = 0
        async for raw in link.messages():
            message = decode(raw)
            num_stored += len(message.stored) if isinstance(message, Delta) else 0
            if num_stored >= num_blocks:
                return

    listening = asyncio.create_task(listen())
    await until_heard_by(world.redis, 2)  # the gateway and this test
    yield
    await asyncio.wait_for(listening, 20)
    await link._redis.close()
    await asyncio.sleep(0.1)  # the gateway receives it at the same time


async def test_requests_go_where_their_prefix_is(world: World) -> None:
    async with AsyncClient(world.system.address) as client:
        for attempt in range(5):  # a node that lacks CPU time gets no requests for a while
            groups = range(100 + 6 * attempt, 106 + 6 * attempt)
            async with reported(world, len(groups) * PREFIX_TOKENS // BLOCK_SIZE):
                firsts = await asyncio.gather(*(generate(client, g, 0) for g in groups))
            homes = {g: first.prefill_node for g, first in zip(groups, firsts, strict=True)}
            if len(set(homes.values())) == 2:
                break
        assert len(set(homes.values())) == 2, "without hits, load decides"
        others = [(group, member) for group in groups for member in range(1, 6)]
        random.Random(0).shuffle(others)
        results = {key: await generate(client, *key) for key in others}
    num_home = sum(r.prefill_node == homes[group] for (group, _), r in results.items())
    num_hits = sum(r.cached_tokens == PREFIX_TOKENS for r in results.values())
    # Random routing would send half of them home: 27 or more of 30 once in a quarter million runs.
    assert num_home >= 27
    assert num_hits >= 27


async def test_a_late_gateway_reads_pages_among_junk() -> None:
    """A late gateway reads a whole cache over several keys, among junk keys, with the real adapter
    on both sides."""
    journal, mirror = CacheJournal("aa" * 16), PrefixMirror(Clock())
    journal.record([], [BlockHash(i.to_bytes(16, "little")) for i in range(1, 9001)])
    incarnation, prefix = journal.incarnation, "baton:default:prefix:"
    with RedisServer.start() as server, redis.Redis.from_url(server.url) as admin:
        admin.rpush(prefix + "bb" * 16, "of another type")
        admin.set(prefix + "cc" * 16, b"x" * (1 << 20))
        ours, theirs = (RedisIndexLink(RedisClient(server.url, "default")) for _ in range(2))
        assert await theirs.read_contents("bb" * 16) == b""
        assert MAX_MESSAGE_BYTES < len(await theirs.read_contents("cc" * 16)) < 1 << 17
        publishing = asyncio.create_task(Publisher(journal, ours, Clock()).run())
        async with asyncio.timeout(20):
            while not admin.exists(prefix + incarnation) or journal.stored.changed:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            mirror.add(incarnation, 9000)
            following = asyncio.create_task(Follower(theirs, mirror).run())
            while mirror.copies[incarnation].seq != journal.seq:
                admin.publish("baton:default:prefix", b"junk")
                await asyncio.sleep(0.02)
            last = journal.seq
            admin.publish("baton:default:prefix", b"junk")
            journal.record([BlockHash((1).to_bytes(16, "little"))], [BlockHash(bytes(16))])
            while mirror.copies[incarnation].seq != last + 1:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert len(mirror.copies[incarnation].hashes) == 9000
            assert 0 < admin.ttl(f"{prefix}{incarnation}:9") <= LEASE_S
            admin.flushall()
            while len(admin.keys(prefix + incarnation + "*")) < 11:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        for task in (publishing, following):
            task.cancel()
        await asyncio.wait({publishing, following})
        await ours._redis.close()
        await theirs._redis.close()


async def test_redis_wiped_stopped_and_killed_changes_no_token(world: World) -> None:
    keys = [(group, member) for group in (10, 11, 12) for member in range(4)]
    async with AsyncClient(world.system.address) as client:
        expected = {key: (await generate(client, *key)).token_ids for key in keys}

        async def check() -> None:
            results = await asyncio.gather(*(generate(client, *key) for key in keys))
            assert {k: r.token_ids for k, r in zip(keys, results, strict=True)} == expected
            assert {r.attempts for r in results} == {1}

        with redis.Redis.from_url(world.redis.url) as admin:
            checking = asyncio.create_task(check())
            await asyncio.sleep(0.01)
            admin.flushall()
            await checking
        world.redis.process.send_signal(signal.SIGSTOP)
        await check()
        world.redis.process.send_signal(signal.SIGCONT)
        world.redis.process.kill()
        world.redis.process.wait()
        await check()
        again = await generate(client, 10, 9)
        assert again.cached_tokens == PREFIX_TOKENS, "the mirror outlives Redis"
        with redis_again(world.redis):
            await asyncio.sleep(1.5)  # publishers reconnect within a second
            async with reported(world, PREFIX_TOKENS // BLOCK_SIZE):
                first = await generate(client, 20, 0)
            second = await generate(client, 20, 1)
            assert second.prefill_node == first.prefill_node
            assert second.cached_tokens == PREFIX_TOKENS
            await check()


@contextmanager
def redis_again(server: RedisServer) -> Iterator[None]:
    """An empty Redis at the address of the killed one."""
    socket_path = server.folder / "redis.sock"
    socket_path.unlink(missing_ok=True)
    command = [find_redis_server(), "--port", "0", "--unixsocket", socket_path, "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=server.folder)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


async def test_messages_that_are_not_signed_with_our_secret_are_junk() -> None:
    """A writer to Redis without the secret cannot announce cached blocks to gateways."""
    incarnation = "aa" * 16
    forged = encode(Delta(incarnation, 1, (), (BlockHash(b"f" * 16),)))
    true = encode(Delta(incarnation, 1, (), (BlockHash(b"t" * 16),)))
    with RedisServer.start() as server:
        secrets: tuple[str | None, ...] = ("ours", "ours", "theirs", None)
        ours, gateway, theirs, plain = (
            RedisIndexLink(RedisClient(server.url, "default", ClusterSecret(s))) for s in secrets
        )
        received: list[bytes] = []

        async def listen() -> None:
            async with aclosing(gateway.messages()) as messages:
                async for message in messages:
                    received.append(message)
                    if message == true:
                        return

        listening = asyncio.create_task(listen())
        await until_heard_by(server, 1)
        for link, message in ((theirs, forged), (plain, forged), (ours, true)):
            await link.write_pages(incarnation, iter([(0, message)]))
            await link.write_contents(incarnation, message)
            await link.publish([message])
            read = [page async for _, page in gateway.read_pages(incarnation, 1)]
            assert read == [await gateway.read_contents(incarnation)]
            assert read == [true if link is ours else b""]
        await asyncio.wait_for(listening, 20)
        assert received == [b"", b"", true]
        for link in (ours, gateway, theirs, plain):
            await link._redis.close()
