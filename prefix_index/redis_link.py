"""The index over Redis, at engines and gateways: commands of Redis 2.6 or newer.

    baton:{cluster}:prefix                          channel: what all engines publish
    baton:{cluster}:prefix:{incarnation}            contents of an engine's pages, with a TTL
    baton:{cluster}:prefix:{incarnation}:{index}    a page, with a TTL

What a dead engine wrote runs out. Knows no message and no page, only bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from itertools import islice

from ..cluster.redis_client import (
    REDIS_ERRORS,
    RETRY_MAX_S,
    RETRY_MIN_S,
    connect,
    key_prefix,
    reply,
)
from ..cluster.secret import NO_SECRET, TAG_BYTES, ClusterSecret
from .messages import MAX_MESSAGE_BYTES, IndexAway
from .pages import MAX_PAGE_BYTES

log = logging.getLogger(__name__)

LEASE_S = 30.0  # of what an engine stores
_PIPELINE_PAGES, _PIPELINE_KEYS = 16, 256  # a quarter of a MB: nobody else waits for long
_PROBE_S = 2.0  # silence after which a subscription is probed


class RedisIndexLink:
    """One for a process. Raises StartupFailed on a bad URL or cluster name."""

    def __init__(self, url: str, cluster: str, secret: ClusterSecret = NO_SECRET) -> None:
        self._redis = connect(url)
        self._secret = secret
        self._max_bytes = max(MAX_MESSAGE_BYTES, MAX_PAGE_BYTES) + TAG_BYTES
        self._channel = f"{key_prefix(cluster)}prefix"
        self._is_away = False

    @property
    def is_up(self) -> bool:
        """Whether Redis answered the last time."""
        return not self._is_away

    # -- an engine's -------------------------------------------------------------------------------

    async def publish(self, messages: Sequence[bytes]) -> None:
        """Send an engine's messages to all gateways, in order. Raises IndexAway: some may have
        arrived."""
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                for message in messages:
                    pipe.publish(self._channel, self._secret.seal(message))
                await reply(pipe.execute())
        except REDIS_ERRORS as error:
            raise self._away(error) from error

    async def write_contents(self, incarnation: str, contents: bytes) -> None:
        """Store what an engine's pages have. Raises IndexAway: it may be there."""
        sealed, lease_ms = self._secret.seal(contents), int(LEASE_S * 1000)
        try:
            await reply(self._redis.set(self._key(incarnation), sealed, px=lease_ms))
        except REDIS_ERRORS as error:
            raise self._away(error) from error
        self._note_back()

    async def write_pages(self, incarnation: str, pages: Iterator[tuple[int, bytes]]) -> None:
        """Store pages of an engine, over what they were. Raises IndexAway: some may be there."""
        lease_ms = int(LEASE_S * 1000)
        try:
            while part := [*islice(pages, _PIPELINE_PAGES)]:
                async with self._redis.pipeline(transaction=False) as pipe:
                    for index, page in part:
                        key = self._key(incarnation, index)
                        pipe.set(key, self._secret.seal(page), px=lease_ms)
                    await reply(pipe.execute())
        except REDIS_ERRORS as error:
            raise self._away(error) from error

    async def renew_pages(self, incarnation: str, num_pages: int) -> list[int]:
        """Keep an engine's pages for another lease; returns those that are gone. Raises
        IndexAway."""
        lease_ms, is_there = int(LEASE_S * 1000), list[object]()
        keys = [self._key(incarnation, index) for index in range(num_pages)]
        try:
            for start in range(0, num_pages, _PIPELINE_KEYS):
                async with self._redis.pipeline(transaction=False) as pipe:
                    for key in keys[start : start + _PIPELINE_KEYS]:
                        pipe.pexpire(key, lease_ms)
                    is_there += await reply(pipe.execute())
        except REDIS_ERRORS as error:
            raise self._away(error) from error
        return [index for index, each in enumerate(is_there) if not each]

    # -- a gateway's -------------------------------------------------------------------------------

    def messages(self) -> AsyncGenerator[bytes]:
        """What engines publish, as far as it arrives; never ends, never raises."""
        return self._follow(self._channel)

    async def read_contents(self, incarnation: str) -> bytes:
        """Of an engine's pages; empty if there are none. Raises IndexAway."""
        (contents,) = await self._read([self._key(incarnation)])
        return contents

    async def read_pages(self, incarnation: str, num_pages: int) -> AsyncGenerator[bytes]:
        """An engine's pages in order; empty where one is gone. Raises IndexAway."""
        indices = iter(range(num_pages))
        while part := [*islice(indices, _PIPELINE_PAGES)]:
            for page in await self._read([self._key(incarnation, index) for index in part]):
                yield page

    async def _read(self, keys: Sequence[str]) -> list[bytes]:
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                for key in keys:  # junk may be huge: never read all of it
                    pipe.getrange(key, 0, self._max_bytes)
                values = await reply(pipe.execute(raise_on_error=False))
        except REDIS_ERRORS as error:
            raise self._away(error) from error
        # An error: something else lies there.
        return [self._secret.unseal(v) if isinstance(v, bytes) else b"" for v in values]

    async def close(self) -> None:
        try:
            await self._redis.aclose()
        except REDIS_ERRORS as error:
            log.debug("closing the connection to Redis: %s", error)

    def _key(self, incarnation: str, page: int | None = None) -> str:
        return f"{self._channel}:{incarnation}" + ("" if page is None else f":{page}")

    async def _follow(self, channel: str) -> AsyncGenerator[bytes]:
        """What is published there, through any loss of Redis."""
        delay_s = RETRY_MIN_S
        while True:
            try:
                async with aclosing(self._subscribe(channel)) as published:
                    async for data in published:
                        delay_s = RETRY_MIN_S
                        yield self._secret.unseal(data)
            except REDIS_ERRORS as error:
                self._away(error)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, RETRY_MAX_S)

    async def _subscribe(self, channel: str) -> AsyncGenerator[bytes]:
        """One subscription until it breaks. A peer that went silently away is found by a ping."""
        async with self._redis.pubsub() as pubsub:
            await reply(pubsub.subscribe(channel))
            is_probed = False
            while True:
                message = await reply(pubsub.get_message(timeout=_PROBE_S))
                if message is not None:
                    self._note_back()
                    is_probed = False
                    if message["type"] == "message":
                        yield message["data"]
                elif is_probed:
                    raise TimeoutError(f"no answer in {_PROBE_S} s")
                else:
                    await reply(pubsub.ping())
                    is_probed = True

    def _away(self, error: BaseException) -> IndexAway:
        if not self._is_away:
            log.warning("the prefix index stands still, Redis is away: %s", error)
        self._is_away = True
        return IndexAway(str(error))

    def _note_back(self) -> None:
        if self._is_away:
            log.warning("the prefix index goes on, Redis is back")
        self._is_away = False
