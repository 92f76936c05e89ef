"""Publisher and follower over an in-memory broker that is unavailable, wiped, or has
invalid data.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest
from fakes.clock import FakeClock
from fakes.index_link import FakeIndexLink

from baton.cluster.redis_client import RedisAway
from baton.core.ports import Clock
from baton.core.request.token_ids import BlockHash
from baton.prefix_index import engine_copy as engine_copy_module
from baton.prefix_index import publisher as publisher_module
from baton.prefix_index.follower import Follower
from baton.prefix_index.journal import CacheJournal
from baton.prefix_index.messages import Delta, Head, decode, encode
from baton.prefix_index.mirror import PrefixMirror
from baton.prefix_index.pages import PAGE_BLOCKS, encode_contents
from baton.prefix_index.publisher import Publisher

A, B = "aa" * 16, "bb" * 16


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "BATCH_S", 0.002)
    monkeypatch.setattr(publisher_module, "HEAD_S", 0.02)
    monkeypatch.setattr(publisher_module, "_RENEW_S", 0.02)
    monkeypatch.setattr(engine_copy_module, "READ_S", 0.01)


def h(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@asynccontextmanager
async def publishing(journal: CacheJournal, link: FakeIndexLink) -> AsyncIterator[None]:
    task = asyncio.create_task(Publisher(journal, link, Clock()).run())
    try:
        yield
    finally:
        assert not task.done()
        task.cancel()
        await asyncio.wait({task})


@asynccontextmanager
async def following(mirror: PrefixMirror, link: FakeIndexLink) -> AsyncIterator[None]:
    task = asyncio.create_task(Follower(link, mirror).run())
    try:
        yield
    finally:
        assert not task.done()
        task.cancel()
        await asyncio.wait({task})


def mirrors(mirror: PrefixMirror, numbers: set[int]) -> bool:
    return {i for i in range(20) if mirror.holds_any([A], [h(i)])} == numbers


async def test_a_mirror_follows_through_losses_and_wipes() -> None:
    link, journal, mirror = FakeIndexLink(), CacheJournal(A), PrefixMirror(Clock())
    mirror.add(A, 20)
    journal.record([], [h(0)])
    async with publishing(journal, link), following(mirror, link):
        await until(lambda: mirrors(mirror, {0}))
        journal.record([h(0)], [h(1), h(2)])
        await until(lambda: mirrors(mirror, {1, 2}))
        link.is_away = True
        journal.record([h(1)], [h(3)])
        await asyncio.sleep(0.05)
        journal.record([], [h(4)])
        assert mirrors(mirror, {1, 2}), "what was known stays"
        link.is_away = False
        await until(lambda: mirrors(mirror, {2, 3, 4}))
        link.keys.clear()
        mirror.remove(A)
        mirror.add(A, 20)  # a gateway that starts late
        await until(lambda: mirrors(mirror, {2, 3, 4}))
        assert mirror.copies[A].seq == journal.seq


async def test_changes_are_told_in_batches_and_idle_engines_are_heard_of() -> None:
    link, journal = FakeIndexLink(), CacheJournal(A)
    async with publishing(journal, link):
        await until(lambda: link.published == [encode(Head(A, 0))])
        for i in range(10):
            journal.record([], [h(i)])
        await until(lambda: len(link.published) == 3)
        reported = [decode(raw) for raw in link.published[1:]]
        assert reported == [Delta(A, 1, (), tuple(map(h, range(10)))), Head(A, 1)]


async def test_pages_that_redis_lost_are_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "unix_ns", lambda _: 0)  # pages have a time stamp
    link, journal = FakeIndexLink(), CacheJournal(A)
    journal.record([], [h(i) for i in range(2 * PAGE_BLOCKS)])
    async with publishing(journal, link):
        await until(lambda: len(link.keys) == 3)
        before = dict(link.keys)
        del link.keys[A, 1]  # evicted
        await until(lambda: link.keys == before)
        link.is_away = True
        journal.record([h(0)], [])
        await asyncio.sleep(0.03)
        link.keys.clear()
        link.is_away = False
        await until(lambda: len(link.keys) == 3)
        await until(lambda: not journal.stored.changed)
        assert link.keys[A, 0] != before[A, 0], "as it is now"


@pytest.mark.parametrize("is_broken", [False, True])
async def test_redis_that_comes_back_with_older_data_is_written_anew(*, is_broken: bool) -> None:
    """After a restore from a snapshot or stale replica, no reader takes old pages for new."""
    link, journal, mirror = FakeIndexLink(), CacheJournal(A), PrefixMirror(Clock())
    mirror.add(A, 20)
    journal.record([], [h(0), h(1)])
    async with publishing(journal, link), following(mirror, link):
        await until(lambda: mirrors(mirror, {0, 1}))
        older = dict(link.keys)
        journal.record([h(0)], [h(2)])
        await until(lambda: mirrors(mirror, {1, 2}))
        link.is_away = True
        journal.record([h(1)], [h(3)])
        await asyncio.sleep(0.05 if is_broken else 0)
        link.keys = older
        link.is_away = False
        late = PrefixMirror(Clock())
        late.add(A, 20)
        async with following(late, link):
            await until(lambda: all(m.copies[A].seq == journal.seq for m in (mirror, late)))
            assert mirrors(mirror, {2, 3}) and mirrors(late, {2, 3})


async def test_redis_that_fails_once_gets_what_it_may_lack_and_no_more() -> None:
    link, journal = FakeIndexLink(), CacheJournal(A)
    journal.record([], [h(i) for i in range(3 * PAGE_BLOCKS)])
    publisher = Publisher(journal, link, FakeClock())
    await publisher._publish()
    written: list[int] = []

    async def write_pages(incarnation: str, pages: Iterator[tuple[int, bytes]]) -> None:
        written.extend(index for index, _ in pages)

    async def fail(incarnation: str, contents: bytes) -> None:
        raise RedisAway("away")

    working, link.write_pages, link.write_contents = link.write_contents, write_pages, fail  # type: ignore[method-assign]
    journal.record([h(0)], [])
    with pytest.raises(RedisAway):
        await publisher._publish()
    link.write_contents = working  # type: ignore[method-assign]
    journal.record([h(PAGE_BLOCKS)], [])
    for _ in range(2):
        await publisher._publish()
    assert written == [0, 0, 1]


async def test_where_redis_is_full_deltas_go_on() -> None:
    link, journal, mirror = FakeIndexLink(), CacheJournal(A), PrefixMirror(Clock())
    mirror.add(A, 20)
    journal.record([], [h(0)])
    async with publishing(journal, link), following(mirror, link):
        await until(lambda: mirrors(mirror, {0}))
        link.is_full = True
        for number in range(1, 5):
            journal.record([h(number - 1)], [h(number)])
            await until(lambda number=number: mirrors(mirror, {number}))  # type: ignore[misc]
        assert mirror.copies[A].seq == journal.seq, "a gap could not be closed"
        link.is_full = False
        await until(lambda: not journal.stored.changed)
        late = PrefixMirror(Clock())
        late.add(A, 20)
        async with following(late, link):
            await until(lambda: mirrors(late, {4}))


async def test_pages_are_there_before_a_delta_that_counts_them() -> None:
    """Pages are written before the delta that counts them, so that a reader finds its blocks."""
    link, journal, mirror = FakeIndexLink(), CacheJournal(A), PrefixMirror(Clock())
    seen: list[bool] = []

    class Watched(FakeIndexLink):
        async def publish(self, messages: Sequence[bytes]) -> None:
            mirror.add(A, 100)
            mirror.copies[A].seq = None
            await Follower(self, mirror)._read(A)
            seen.append(mirror.copies[A].seq == journal.seq and mirrors(mirror, {*range(10)}))
            await super().publish(messages)

    link = Watched()
    journal.record([], [h(i) for i in range(10)])
    async with publishing(journal, link):
        await until(lambda: bool(seen))
    assert seen[0]


@pytest.mark.parametrize("junk", ["gone", "junk", "another engine's", "another page", "short"])
async def test_pages_that_are_gone_or_others_are_not_installed(junk: str) -> None:
    link, mirror, journal = FakeIndexLink(), PrefixMirror(FakeClock()), CacheJournal(A)
    mirror.add(A, 20)
    journal.record([], [h(1)])
    journal.take()
    ((_, page),) = journal.stored.encode([0], 0)
    journal.stored._owner = bytes.fromhex(B)
    ((_, foreign),) = journal.stored.encode([0], 0)
    link.keys[A, None] = encode_contents(journal.contents(0))
    moved = page[:24] + b"\1" + page[25:]
    found = {"gone": b"", "junk": b"x" * 99, "another engine's": foreign, "another page": moved}
    link.keys[A, 0] = found.get(junk, page[:-1])
    follower = Follower(link, mirror)
    await follower.take(encode(Head(A, 5)))
    assert mirrors(mirror, set())
    link.keys[A, 0] = page
    mirror.copies[A].may_read_s = 0.0
    await follower.take(encode(Head(A, 5)))
    assert mirrors(mirror, {1})
    assert link.num_reads == 2
