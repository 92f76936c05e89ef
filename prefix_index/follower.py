"""Feeds a gateway's mirror from Redis: messages as they come, pages of new engines and after a gap.

One thing at a time: while pages are read, later messages wait in the subscription. Pages have all
changes up to their number, and a delta states the present tier of its hashes: applying the deltas
after that number gives the engine's cache, even where the pages have later changes.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from ..cluster.redis_client import RedisAway
from ..core.request.token_ids import BlockHash
from .messages import BadMessage
from .mirror import PrefixMirror
from .pages import decode_contents, decode_page
from .redis_link import RedisIndexLink


class Follower:
    """`run` follows until cancelled, and survives any loss of Redis."""

    def __init__(self, link: RedisIndexLink, mirror: PrefixMirror) -> None:
        self._link = link
        self._mirror = mirror
        self._turn = asyncio.Lock()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read_new())
            async with aclosing(self._link.messages()) as messages:
                async for raw in messages:
                    await self.take(raw)

    async def take(self, raw: bytes) -> None:
        """Apply one message, and read the engine's pages if they are needed."""
        async with self._turn:
            if (incarnation := self._mirror.take(raw)) is not None:
                await self._read(incarnation)

    async def _read_new(self) -> None:
        while True:
            await self._mirror.added.wait()
            for incarnation in self._mirror.take_new():
                async with self._turn:
                    await self._read(incarnation)

    async def _read(self, incarnation: str) -> None:
        """Read all pages of an engine. After a failure, its next message causes another read."""
        if (copy := self._mirror.copies.get(incarnation)) is None:
            return
        try:
            contents = decode_contents(await self._link.read_contents(incarnation), incarnation)
            if not copy.wants(contents):
                return
            hashes, in_host = set[BlockHash](), set[BlockHash]()
            async with aclosing(self._link.read_pages(incarnation, contents.num_pages)) as pages:
                async for index, raw in pages:
                    page = decode_page(raw, incarnation, index)
                    hashes.update(page.hashes)
                    in_host.update(page.in_host)
        except (BadMessage, RedisAway):
            return
        copy.install(contents, hashes, in_host, self._mirror.clock.monotonic_s())
