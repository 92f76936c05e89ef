"""The index's broker in memory: both sides of the prefix index, with faults on order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from baton.prefix_index.messages import IndexAway


class FakeIndexLink:
    """`published` keeps every message; `is_away` makes every command fail; keys can be wiped."""

    def __init__(self) -> None:
        self.published: list[bytes] = []
        self.chunks: dict[tuple[str, int], bytes] = {}
        self.asked: list[str] = []
        self.is_away = False
        self._subscribers: list[asyncio.Queue[bytes]] = []
        self._listeners: dict[str, asyncio.Queue[bytes]] = {}

    def _check(self) -> None:
        if self.is_away:
            raise IndexAway("away")

    async def publish(self, messages: Sequence[bytes]) -> None:
        self._check()
        self.published += messages
        for queue in self._subscribers:
            for message in messages:
                queue.put_nowait(message)

    async def write_chunks(self, incarnation: str, chunks: Sequence[bytes]) -> None:
        self._check()
        self.chunks |= {(incarnation, index): chunk for index, chunk in enumerate(chunks)}

    async def snapshot_requests(self, incarnation: str) -> AsyncGenerator[bytes]:
        queue = self._listeners[incarnation] = asyncio.Queue()
        while True:
            yield await queue.get()

    async def messages(self) -> AsyncGenerator[bytes]:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._subscribers.append(queue)
        while True:
            yield await queue.get()

    async def request_snapshot(self, incarnation: str) -> None:
        self._check()
        self.asked.append(incarnation)
        if queue := self._listeners.get(incarnation):
            queue.put_nowait(b"snapshot")

    async def read_chunk(self, incarnation: str, index: int) -> bytes:
        self._check()
        return self.chunks.get((incarnation, index), b"")
