"""Tells all gateways what one engine has cached: deltas soon, a head now and then, a snapshot on
request. Whatever Redis does, the engine never waits and memory stays bounded: what cannot be said
is dropped, and the gap in the numbers makes gateways ask.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from ..core.ports import Clock
from .journal import CacheJournal
from .link import IndexAway, PublisherLink
from .messages import Delta, Head, encode

BATCH_S = 0.05  # changes wait so long for others
HEAD_S = 1.0  # an engine is heard of at least so often
SNAPSHOT_S = 0.5  # at most one snapshot in so long, however many ask


class Publisher:
    """`run` publishes `journal` until cancelled."""

    def __init__(self, journal: CacheJournal, link: PublisherLink, clock: Clock) -> None:
        self._journal = journal
        self._link = link
        self._clock = clock
        self._is_asked = False
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
                    await self._wait_for_news()
        finally:
            listening.cancel()
            await asyncio.wait({listening})

    async def _listen(self) -> None:
        async with aclosing(self._link.questions(self._journal.incarnation)) as questions:
            async for _ in questions:
                self._is_asked = True
                self._journal.changed.set()

    async def _wait_for_news(self) -> None:
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
        news: list[Delta | Head] = [*journal.take()] or [journal.head()]
        if not self._is_asked or now_s < self._next_snapshot_s:
            await self._link.publish([encode(message) for message in news])
            return
        self._is_asked, self._next_snapshot_s = False, now_s + SNAPSHOT_S
        chunks, snapshot = journal.snapshot()  # before anything is awaited: it belongs to this seq
        await self._link.publish([encode(message) for message in news])
        await self._link.write_chunks(journal.incarnation, [encode(chunk) for chunk in chunks])
        await self._link.publish([encode(snapshot)])
