"""The prefix index's broker in memory: both sides of the index, with faults on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence

from baton.cluster.redis_client import RedisAway


class FakeIndexLink:
    """`published` keeps every message; `is_away` makes every command fail, `is_full` those that
    write keys; keys can be wiped.

    `keys`: an engine's contents under (incarnation, None), its pages by index. `num_reads`: reads
    of contents.
    """

    def __init__(self) -> None:
        self.published: list[bytes] = []
        self.keys: dict[tuple[str, int | None], bytes] = {}
        self.num_reads = 0
        self.is_away = self.is_full = False
        self._subscribers: list[asyncio.Queue[bytes]] = []

    def _check(self, *, is_write: bool = False) -> None:
        if self.is_away or (is_write and self.is_full):
            raise RedisAway("away")

    async def publish(self, messages: Sequence[bytes]) -> None:
        self._check()
        self.published += messages
        for queue in self._subscribers:
            for message in messages:
                queue.put_nowait(message)

    async def write_contents(self, incarnation: str, contents: bytes) -> None:
        self._check(is_write=True)
        self.keys[incarnation, None] = contents

    async def write_pages(self, incarnation: str, pages: Iterator[tuple[int, bytes]]) -> None:
        for index, page in pages:
            self._check(is_write=True)
            self.keys[incarnation, index] = page

    async def renew_pages(self, incarnation: str, num_pages: int) -> list[int]:
        self._check()
        return [index for index in range(num_pages) if (incarnation, index) not in self.keys]

    async def messages(self) -> AsyncGenerator[bytes]:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._subscribers.append(queue)
        while True:
            yield await queue.get()

    async def read_contents(self, incarnation: str) -> bytes:
        self._check()
        self.num_reads += 1
        return self.keys.get((incarnation, None), b"")

    async def read_pages(
        self, incarnation: str, num_pages: int
    ) -> AsyncGenerator[tuple[int, bytes]]:
        for index in range(num_pages):
            self._check()
            yield index, self.keys.get((incarnation, index), b"")
