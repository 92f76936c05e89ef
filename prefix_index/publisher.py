"""Publishes the prefix cache of one engine: changes to all gateways, and the whole of it to Redis.

    every 50 ms with changes    pages that changed, contents, deltas     in this order: pages have
    every second                contents, head                           a delta before it is sent
    every third of a lease      the lease of all pages is renewed

One task. Whatever Redis does, the engine never waits and memory stays bounded: deltas that cannot
be sent are dropped, and the gap in their numbers makes gateways read the pages; pages that could
not be written are written later, in their state by then. Where Redis rejects writes, deltas are
sent all the same. After an outage, Redis may be empty or have old data: where it lacks the contents
that were written last, all pages are written before new contents count them.
"""

from __future__ import annotations

import asyncio

from ..cluster.redis_client import RedisAway
from ..core.ports import Clock
from .journal import CacheJournal
from .messages import Delta, Head, encode
from .pages import encode_contents
from .redis_link import LEASE_S, RedisIndexLink

BATCH_S = 0.05  # changes are collected for so long
HEAD_S = 1.0  # an engine publishes at least this often
_RENEW_S = LEASE_S / 3


class Publisher:
    """`run` publishes `journal` until cancelled."""

    def __init__(self, journal: CacheJournal, link: RedisIndexLink, clock: Clock) -> None:
        self._journal = journal
        self._link = link
        self._clock = clock
        self._renew_s = clock.monotonic_s() + _RENEW_S
        self._stored = self._tried = b""  # contents: stored for certain, or perhaps
        self._uncounted: set[int] = set()  # pages that were written after these

    async def run(self) -> None:
        while True:
            try:
                await self._publish()
            except RedisAway:
                await asyncio.sleep(HEAD_S)  # meanwhile the journal sums up changes
            else:
                await self._wait_for_changes()

    async def _wait_for_changes(self) -> None:
        try:
            async with asyncio.timeout(HEAD_S):
                await self._journal.changed.wait()
        except TimeoutError:
            return
        await asyncio.sleep(BATCH_S)

    async def _publish(self) -> None:
        """Raises RedisAway; the deltas taken from the journal are then a gap."""
        journal = self._journal
        journal.changed.clear()
        changes: list[Delta | Head] = [*journal.take()] or [journal.head()]
        messages = [encode(message) for message in changes]
        try:
            await self._store(encode_contents(journal.contents(self._unix_s())))
        except RedisAway:
            await self._link.publish(messages)  # uses no keys: works when Redis is full
            raise
        await self._link.publish(messages)
        if self._clock.monotonic_s() >= self._renew_s:
            self._renew_s = self._clock.monotonic_s() + _RENEW_S
            num_pages = journal.stored.num_pages
            journal.lost_pages(await self._link.renew_pages(journal.incarnation, num_pages))

    async def _store(self, contents: bytes) -> None:
        incarnation = self._journal.incarnation
        if await self._link.read_contents(incarnation) not in (self._stored, self._tried):
            self._journal.lost_pages()
        self._journal.stored.changed |= self._uncounted  # Redis that failed may have lost them
        await self._write_pages()
        self._tried = contents
        await self._link.write_contents(incarnation, contents)
        self._stored = contents
        self._uncounted.clear()

    async def _write_pages(self) -> None:
        stored = self._journal.stored
        written, stored.changed = stored.changed, set()
        pages = stored.encode(sorted(written), self._unix_s())
        try:
            await self._link.write_pages(self._journal.incarnation, pages)
        except BaseException:
            stored.changed |= written
            raise
        self._uncounted |= written

    def _unix_s(self) -> int:
        return self._clock.unix_ns() // 1_000_000_000
