"""The prefix index: throughput, memory, and how long a new gateway takes to read it.

    python -m baton.bench.cpu_families.index

Uses a private Redis on this host and random hashes. `make docs` shows the results.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import redis

from baton.cluster.redis_client import RedisClient
from baton.cluster.redis_server import RedisServer
from baton.core.ports import Clock
from baton.core.request.token_ids import HASH_BYTES, BlockHash, Tier
from baton.node.engine_process.cache_report import CacheReport
from baton.prefix_index import redis_link
from baton.prefix_index.follower import Follower
from baton.prefix_index.journal import CacheJournal
from baton.prefix_index.messages import encode
from baton.prefix_index.mirror import PrefixMirror
from baton.prefix_index.pages import StoredBlocks, decode_page, encode_contents
from baton.prefix_index.redis_link import RedisIndexLink
from baton.proto.v1 import engine_pb2

from ..floors.figures import ROOT, Figure, machine, repeat_s, table, time_s, write

_PROMPT_BLOCKS = 2000
_NUM_ENGINES = 10
_ENGINE_BLOCKS = 1_000_000
_STEP_BLOCKS = 128  # blocks of 16 tokens that a step stores; it evicts as many
_BATCH_EVENTS = 250  # events of an engine in 50 ms
_REPEATS = 7
_PAGE = 800  # blocks per page when a gateway's memory is measured


def random_hashes(count: int) -> list[BlockHash]:
    drawn = os.urandom(HASH_BYTES * count)
    starts = range(0, len(drawn), HASH_BYTES)
    return [BlockHash(drawn[start : start + HASH_BYTES]) for start in starts]


def incarnation_of(number: int) -> str:
    return f"{number + 1:032x}"


def filled(incarnation: str, hashes: list[BlockHash]) -> CacheJournal:
    """The journal of an engine that has these blocks on its device and has published them."""
    journal = CacheJournal(incarnation)
    journal.record([], hashes)
    journal.take()
    return journal


def look_up() -> list[Figure]:
    """Look-ups of a prompt in the mirror, by the number of engines that have all its blocks."""
    figures = []
    for num_engines, target in ((1, 100.0), (_NUM_ENGINES, None)):
        mirror, prompt = PrefixMirror(Clock()), random_hashes(_PROMPT_BLOCKS)
        names = [incarnation_of(number) for number in range(num_engines)]
        for name in names:
            contents = CacheJournal(name).contents(0)
            mirror.add(name, _ENGINE_BLOCKS)
            others = random_hashes(_ENGINE_BLOCKS // num_engines - _PROMPT_BLOCKS)
            cached = {*others, *(BlockHash(bytes([*each])) for each in prompt)}
            mirror.copies[name].install(contents, cached, set(), mirror.clock.monotonic_s())
        samples = []
        for _ in range(_REPEATS):
            fresh = [BlockHash(bytes([*each])) for each in prompt]  # new, not looked up yet
            samples.append(1e6 * time_s(partial(mirror.cached_blocks, names, fresh)))
            assert set(mirror.cached_blocks(names, fresh).values()) == {_PROMPT_BLOCKS}
        engines = "1 engine has" if num_engines == 1 else f"{num_engines} engines have"
        name = f"look-up of {_PROMPT_BLOCKS:,} blocks that {engines}, of 1 M blocks"
        figures.append(Figure(name, "us", tuple(samples), target=target))
    return figures


def events() -> list[Figure]:
    """Block events (stored, evicted), at the publishing node and at the mirroring gateway."""
    name = incarnation_of(0)
    hashes = random_hashes(200_000)
    journal, mirror = filled(name, hashes), PrefixMirror(Clock())
    mirror.add(name, _ENGINE_BLOCKS)
    now_s = mirror.clock.monotonic_s()
    mirror.copies[name].install(journal.contents(0), {*hashes}, set(), now_s)
    published, taken = [], []
    for first in range(0, 160_000, 20_000):
        batches = [
            (hashes[i : i + _BATCH_EVENTS // 2], random_hashes(_BATCH_EVENTS // 2))
            for i in range(first, first + 20_000, _BATCH_EVENTS // 2)
        ]
        raws: list[bytes] = []

        def publish(batches: list[tuple[list[BlockHash], list[BlockHash]]] = batches) -> None:
            for removed, stored in batches:
                journal.record(removed, stored)
                raws.extend(map(encode, journal.take()))  # noqa: B023
                changed, journal.stored.changed = journal.stored.changed, set()
                for _ in journal.stored.encode(changed, 0):
                    pass

        def take() -> None:
            for raw in raws:  # noqa: B023
                assert mirror.take(raw) is None

        published.append(40_000 / time_s(publish))
        taken.append(40_000 / time_s(take))
    return [
        Figure("block events published by a node", "events/s", tuple(published)),
        Figure("block events mirrored", "events/s", tuple(taken), target=100_000.0),
    ]


def step() -> list[Figure]:
    """The cost of publishing per engine step, on the engine's thread."""
    sent: list[bytes] = []

    def send(message: engine_pb2.EngineOutput) -> None:
        sent.append(message.SerializeToString())

    changes = CacheReport(send)
    steps = [(random_hashes(_STEP_BLOCKS), random_hashes(_STEP_BLOCKS)) for _ in range(400)]

    def publish() -> None:
        for removed, stored in steps:
            changes.moved(removed, Tier.DEVICE, Tier.NOWHERE)
            changes.moved(stored, Tier.NOWHERE, Tier.DEVICE)
            changes.flush()

    samples = tuple(1e6 * s / len(steps) for s in repeat_s(publish, _REPEATS))
    name = f"publishing a step that stores {_STEP_BLOCKS} blocks and evicts as many"
    return [Figure(name, "us", samples, target=50.0)]


def _mirrored_gb(num_blocks: int) -> float:
    """Memory of a process that mirrors `num_blocks` as a gateway does."""
    num_engines = max(1, num_blocks // _ENGINE_BLOCKS)
    mirror = PrefixMirror(Clock())
    before = _resident_bytes()
    for number in range(num_engines):
        name = incarnation_of(number)
        mirror.add(name, _ENGINE_BLOCKS)
        hashes = set[BlockHash]()
        for _ in range(num_blocks // num_engines // _PAGE):
            one = StoredBlocks(name)
            for each in random_hashes(_PAGE):
                one.move(each, Tier.NOWHERE, Tier.DEVICE)
            raw = next(one.encode([0], 0))[1]
            hashes.update(decode_page(raw, name, 0).hashes)
        now_s = mirror.clock.monotonic_s()
        mirror.copies[name].install(CacheJournal(name).contents(0), hashes, set(), now_s)
    return (_resident_bytes() - before) / 1e9


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory() -> list[Figure]:
    """A gateway's memory, each size in a process of its own."""
    figures = []
    for millions, target in ((1, None), (10, 2.0)):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(_mirrored_gb, (millions * 1_000_000,))
        figures.append(Figure(f"{millions} M blocks mirrored", "GB", (found,), target=target))
    return figures


async def _start(url: str, num_engines: int, num_blocks: int) -> float:
    """Seconds until a new gateway has mirrored all blocks of these engines."""
    link, mirror = RedisIndexLink(RedisClient(url, "default")), PrefixMirror(Clock())
    following = asyncio.create_task(Follower(link, mirror).run())
    began_s = time.perf_counter()
    names = [incarnation_of(number) for number in range(num_engines)]
    for name in names:
        mirror.add(name, num_blocks)
    while any(len(mirror.copies[name].hashes) < num_blocks for name in names):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    took_s = time.perf_counter() - began_s
    following.cancel()
    await asyncio.wait({following})
    await link._redis.close()
    return took_s


async def _store(url: str, journals: Iterator[CacheJournal]) -> None:
    link = RedisIndexLink(RedisClient(url, "default"))
    for journal in journals:
        stored = journal.stored
        await link.write_pages(journal.incarnation, stored.encode(range(stored.num_pages), 0))
        contents = encode_contents(journal.contents(0))
        await link.write_contents(journal.incarnation, contents)
        await link.publish([encode(journal.head())])
    await link._redis.close()


def in_redis() -> list[Figure]:
    """Memory in Redis, and the time a gateway takes to read it."""
    figures = []
    redis_link.LEASE_S = 3600.0  # filling takes longer than the product's lease
    for num_engines, num_blocks in ((4, 250_000), (_NUM_ENGINES, _ENGINE_BLOCKS)):
        total = num_engines * num_blocks
        with RedisServer.start() as server, redis.Redis.from_url(server.url) as admin:
            before = admin.info("memory")["used_memory"]
            journals = (
                filled(incarnation_of(number), random_hashes(num_blocks))
                for number in range(num_engines)
            )
            asyncio.run(_store(server.url, journals))
            used = admin.info("memory")["used_memory"] - before
            millions = f"{total // 1_000_000} M blocks of {num_engines} engines"
            figures.append(Figure(f"Redis with {millions}", "MB", (used / 1e6,)))
            name = f"a block in Redis, with {millions}"
            figures.append(Figure(name, "bytes", (used / total,), HASH_BYTES, "its hash"))
            if total == _ENGINE_BLOCKS:
                samples = [
                    asyncio.run(_start(server.url, num_engines, num_blocks)) for _ in "12345"
                ]
                name = f"a gateway that starts knows {millions}"
                figures.append(Figure(name, "s", tuple(samples), target=1.0))
    return figures


def main(argv: list[str]) -> int:
    """Measure, print the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = ROOT / "bench" / "results" / "index.json"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args(argv)
    where = machine()
    figures = [*look_up(), *events(), *step(), *memory(), *in_redis()]
    print(table(figures))
    write(options.out, {"index": figures}, where, "cpu_families.index")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
