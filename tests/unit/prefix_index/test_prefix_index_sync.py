"""Publisher and follower over a broker in memory that goes away, is wiped, and holds junk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from fakes.clock import FakeClock
from fakes.index_link import FakeIndexLink

from baton.core.ports import SystemClock
from baton.core.request.token_ids import BlockHash
from baton.prefix_index import mirror as mirror_module
from baton.prefix_index import publisher as publisher_module
from baton.prefix_index.messages import (
    CacheJournal,
    Delta,
    Head,
    Snapshot,
    SnapshotChunk,
    decode,
    encode,
)
from baton.prefix_index.mirror import Follower, PrefixMirror
from baton.prefix_index.publisher import Publisher

A, B = "aa" * 16, "bb" * 16


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "BATCH_S", 0.002)
    monkeypatch.setattr(publisher_module, "HEAD_S", 0.02)
    monkeypatch.setattr(publisher_module, "SNAPSHOT_S", 0.01)
    monkeypatch.setattr(mirror_module, "REQUEST_S", 0.01)


def h(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@asynccontextmanager
async def publishing(journal: CacheJournal, link: FakeIndexLink) -> AsyncIterator[None]:
    task = asyncio.create_task(Publisher(journal, link, SystemClock()).run())
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
    link, journal, mirror = FakeIndexLink(), CacheJournal(A), PrefixMirror(SystemClock())
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
        link.chunks.clear()
        mirror.remove(A)
        mirror.add(A, 20)  # a gateway that comes late
        await until(lambda: mirrors(mirror, {2, 3, 4}))
        assert mirror._copies[A].seq == journal.seq


async def test_changes_are_told_in_batches_and_idle_engines_are_heard_of() -> None:
    link, journal = FakeIndexLink(), CacheJournal(A)
    async with publishing(journal, link):
        await until(lambda: link.published == [encode(Head(A, 0))])
        for i in range(10):
            journal.record([], [h(i)])
        await until(lambda: len(link.published) == 3)
        told = [decode(raw) for raw in link.published[1:]]
        assert told == [Delta(A, 1, (), tuple(map(h, range(10)))), Head(A, 1)]


async def test_many_questions_bring_few_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "SNAPSHOT_S", 10.0)
    link, journal = FakeIndexLink(), CacheJournal(A)
    async with publishing(journal, link):
        await until(lambda: bool(link.published))
        for _ in range(20):
            await link.request_snapshot(A)
            await asyncio.sleep(0.002)
        kinds = [type(decode(raw)) for raw in link.published]
        assert kinds.count(Snapshot) == 1


@pytest.mark.parametrize(
    "chunk",
    [
        b"",
        b"junk",
        encode(Head(A, 5)),
        encode(SnapshotChunk(A, 4, 0, (h(1),))),
        encode(SnapshotChunk(B, 5, 0, (h(1),))),
        encode(SnapshotChunk(A, 5, 1, (h(1),))),
    ],
)
async def test_a_snapshot_that_is_gone_or_another_is_not_installed(chunk: bytes) -> None:
    link, mirror = FakeIndexLink(), PrefixMirror(FakeClock())
    mirror.add(A, 20)
    link.chunks[A, 0] = chunk
    follower = Follower(link, mirror)
    await follower.take(encode(Snapshot(A, 5, 1)))
    assert mirrors(mirror, set())
    await follower.take(encode(Head(A, 5)))
    assert link.asked == [A]
    link.chunks[A, 0] = encode(SnapshotChunk(A, 5, 0, (h(1),)))
    await follower.take(encode(Snapshot(A, 5, 1)))
    assert mirrors(mirror, {1})
