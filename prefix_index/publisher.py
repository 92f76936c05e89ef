"""Publishes what one engine has cached: deltas soon, a head now and then, a snapshot on request.

Whatever Redis does, the engine never waits and memory stays bounded: what cannot be sent is
dropped, and the gap in the numbers makes gateways request a snapshot.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from ..core.ports import Clock
from .messages import CacheJournal, Delta, Head, IndexAway, encode
from .redis_link import RedisIndexLink

BATCH_S = 0.05  # changes wait so long for others
HEAD_S = 1.0  # an engine publishes at least so often
SNAPSHOT_S = 0.5  # at most one snapshot in so long, however many requests come


class Publisher:
    """`run` publishes `journal` until cancelled."""

    def __init__(self, journal: CacheJournal, link: RedisIndexLink, clock: Clock) -> None:
        self._journal = journal
        self._link = link
        self._clock = clock
        self._is_requested = False
        self._next_snapshot_s = 0.0

    async def run(self) -> None:
        listening = asyncio.create_task(self._listen())
        try:
            while True:
                try:
                    await self._publish()
                except IndexAway:
                    await asyncio.sleep(HEAD_S)  # the journal adds up what happens meanwhile
                else:
                    await self._wait_for_changes()
        finally:
            listening.cancel()
            await asyncio.wait({listening})

    async def _listen(self) -> None:
        async with aclosing(self._link.snapshot_requests(self._journal.incarnation)) as requests:
            async for _ in requests:
                self._is_requested = True
                self._journal.changed.set()

    async def _wait_for_changes(self) -> None:
        try:
            async with asyncio.timeout(HEAD_S):
                await self._journal.changed.wait()
        except TimeoutError:
            return
        await asyncio.sleep(BATCH_S)

    async def _publish(self) -> None:
        """Raises IndexAway; what was taken from the journal is then a gap."""
        journal, now_s = self._journal, self._clock.monotonic_s()
        journal.changed.clear()
        changes: list[Delta | Head] = [*journal.take()] or [journal.head()]
        encoded = [encode(message) for message in changes]
        if not self._is_requested or now_s < self._next_snapshot_s:
            await self._link.publish(encoded)
            return
        self._is_requested, self._next_snapshot_s = False, now_s + SNAPSHOT_S
        chunks, snapshot = journal.snapshot()  # before anything is awaited: it belongs to this seq
        await self._link.publish(encoded)
        await self._link.write_chunks(journal.incarnation, [encode(chunk) for chunk in chunks])
        await self._link.publish([encode(snapshot)])
