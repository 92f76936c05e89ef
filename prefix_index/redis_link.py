"""The index in Redis, for engines and gateways.

    baton:{cluster}:prefix                          channel: messages of all engines
    baton:{cluster}:prefix:{incarnation}            contents of an engine's pages, with a TTL
    baton:{cluster}:prefix:{incarnation}:{index}    a page, with a TTL

Keys of a dead engine expire. Knows no message and no page, only bytes.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from itertools import islice
from typing import Any

from ..cluster.redis_client import Command, RedisAway, RedisClient
from .messages import MAX_MESSAGE_BYTES
from .pages import MAX_PAGE_BYTES

log = logging.getLogger(__name__)

LEASE_S = 30.0  # TTL of an engine's keys
_PIPELINE_PAGES, _PIPELINE_KEYS = 16, 256  # 256 KiB: other users of the client wait only briefly
_PROBE_S = 2.0  # silence after which a subscription is probed
_MAX_BYTES = max(MAX_MESSAGE_BYTES, MAX_PAGE_BYTES)


class RedisIndexLink:
    """One per process. `is_up`: whether Redis was there the last time."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis
        self._channel = f"{redis.prefix}prefix"
        self.is_up = True

    # -- for engines -------------------------------------------------------------------------------

    async def publish(self, messages: Sequence[bytes]) -> None:
        """Send an engine's messages to all gateways, in order. Raises RedisAway; some may have been
        sent."""
        seal = self._redis.secret.seal
        await self._run(*(("PUBLISH", self._channel, seal(message)) for message in messages))

    async def write_contents(self, incarnation: str, contents: bytes) -> None:
        """Store the contents of an engine's pages. Raises RedisAway; they may be stored."""
        await self._run(self._redis.setting(self._key(incarnation), contents, LEASE_S))
        self._note_back()

    async def write_pages(self, incarnation: str, pages: Iterator[tuple[int, bytes]]) -> None:
        """Overwrite pages of an engine. Raises RedisAway; some may be written."""
        while part := [*islice(pages, _PIPELINE_PAGES)]:
            setting = self._redis.setting
            await self._run(*(setting(self._key(incarnation, i), p, LEASE_S) for i, p in part))

    async def renew_pages(self, incarnation: str, num_pages: int) -> list[int]:
        """Renew the lease of an engine's pages; returns those that are gone. Raises RedisAway."""
        lease_ms, is_there = int(LEASE_S * 1000), list[object]()
        keys = (self._key(incarnation, index) for index in range(num_pages))
        while part := [*islice(keys, _PIPELINE_KEYS)]:
            is_there += await self._run(*(("PEXPIRE", key, lease_ms) for key in part))
        return [index for index, each in enumerate(is_there) if not each]

    # -- for gateways ------------------------------------------------------------------------------

    async def messages(self) -> AsyncGenerator[bytes]:
        """The messages of engines, which may have gaps; survives any loss of Redis, never ends,
        never raises."""
        async with aclosing(self._redis.follow(self._channel, _PROBE_S)) as published:
            async for came in published:
                if isinstance(came, RedisAway):
                    self._note_away(came)
                    continue
                self._note_back()
                for data in came:
                    yield self._redis.secret.unseal(data)

    async def read_contents(self, incarnation: str) -> bytes:
        """The contents of an engine's pages; empty if there are none. Raises RedisAway."""
        (contents,) = await self._read([self._key(incarnation)])
        return contents

    async def read_pages(
        self, incarnation: str, num_pages: int
    ) -> AsyncGenerator[tuple[int, bytes]]:
        """An engine's pages, each with its index; empty where one is gone. Raises RedisAway."""
        indices = iter(range(num_pages))
        while part := [*islice(indices, _PIPELINE_PAGES)]:
            pages = await self._read([self._key(incarnation, index) for index in part])
            for page in zip(part, pages, strict=True):
                yield page

    def _key(self, incarnation: str, page: int | None = None) -> str:
        return f"{self._channel}:{incarnation}" + ("" if page is None else f":{page}")

    async def _read(self, keys: Sequence[str]) -> list[bytes]:
        try:
            return await self._redis.read(keys, _MAX_BYTES)
        except RedisAway as error:
            self._note_away(error)
            raise

    async def _run(self, *commands: Command) -> list[Any]:
        try:
            return await self._redis.run(*commands)
        except RedisAway as error:
            self._note_away(error)
            raise

    def _note_away(self, error: RedisAway) -> None:
        if self.is_up:
            log.warning("the prefix index is not updated, Redis is unreachable: %s", error)
        self.is_up = False

    def _note_back(self) -> None:
        if not self.is_up:
            log.warning("the prefix index is updated again")
        self.is_up = True
