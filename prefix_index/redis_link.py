"""The index over Redis, at engines and gateways: commands of Redis 2.6 or newer.

    baton:{cluster}:prefix                                  channel: what all engines publish
    baton:{cluster}:prefix:ask:{incarnation}                channel: requests for a snapshot
    baton:{cluster}:prefix:{incarnation}:{index}            a chunk of its last snapshot, with a TTL

Knows no message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from redis.exceptions import ResponseError

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

log = logging.getLogger(__name__)

_CHUNK_TTL_S = 10
_PROBE_S = 2.0  # silence after which a subscription is probed


class RedisIndexLink:
    """One for a process. Raises StartupFailed on a bad URL or cluster name."""

    def __init__(self, url: str, cluster: str, secret: ClusterSecret = NO_SECRET) -> None:
        self._redis = connect(url)
        self._secret = secret
        self._max_bytes = MAX_MESSAGE_BYTES + (TAG_BYTES if secret.current else 0)
        self._channel = f"{key_prefix(cluster)}prefix"
        self._is_away = False

    @property
    def is_up(self) -> bool:
        """Whether Redis answered the last time."""
        return not self._is_away

    # -- an engine's -------------------------------------------------------------------------------

    async def publish(self, messages: Sequence[bytes]) -> None:
        """To all gateways, in order. Raises IndexAway: some may have arrived."""
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                for message in messages:
                    pipe.publish(self._channel, self._secret.seal(message))
                await reply(pipe.execute())
        except REDIS_ERRORS as error:
            raise self._away(error) from error
        self._note_back()

    async def write_chunks(self, incarnation: str, chunks: Sequence[bytes]) -> None:
        """Put a snapshot's pieces where they can be read for a while, over the last one's. Raises
        IndexAway."""
        try:
            for index, chunk in enumerate(chunks):
                key = self._chunk_key(incarnation, index)
                await reply(self._redis.set(key, self._secret.seal(chunk), ex=_CHUNK_TTL_S))
        except REDIS_ERRORS as error:
            raise self._away(error) from error

    def snapshot_requests(self, incarnation: str) -> AsyncGenerator[bytes]:
        """Yields whenever a gateway requests a snapshot of this engine; never ends or raises."""
        return self._follow(self._request_channel(incarnation))

    # -- a gateway's -------------------------------------------------------------------------------

    def messages(self) -> AsyncGenerator[bytes]:
        """What engines publish, as far as it arrives; never ends, never raises."""
        return self._follow(self._channel, self._secret.unseal)

    async def request_snapshot(self, incarnation: str) -> None:
        """Of an engine. Raises IndexAway."""
        try:
            await reply(self._redis.publish(self._request_channel(incarnation), b"snapshot"))
        except REDIS_ERRORS as error:
            raise self._away(error) from error

    async def read_chunk(self, incarnation: str, index: int) -> bytes:
        """One piece of the last snapshot; empty if it is gone. Raises IndexAway."""
        key = self._chunk_key(incarnation, index)
        try:
            # Junk may be huge: never read all of it.
            value = await reply(self._redis.getrange(key, 0, self._max_bytes))
        except ResponseError:
            return b""  # something else lies there
        except REDIS_ERRORS as error:
            raise self._away(error) from error
        assert isinstance(value, bytes), "the client does not decode"
        return self._secret.unseal(value)

    async def close(self) -> None:
        try:
            await self._redis.aclose()
        except REDIS_ERRORS as error:
            log.debug("closing the connection to Redis: %s", error)

    def _request_channel(self, incarnation: str) -> str:
        return f"{self._channel}:ask:{incarnation}"

    def _chunk_key(self, incarnation: str, index: int) -> str:
        return f"{self._channel}:{incarnation}:{index}"

    async def _follow(
        self, channel: str, read: Callable[[bytes], bytes] = bytes
    ) -> AsyncGenerator[bytes]:
        """What is published there, as `read` reads it, through any loss of Redis."""
        delay_s = RETRY_MIN_S
        while True:
            try:
                async with aclosing(self._subscribe(channel)) as published:
                    async for data in published:
                        delay_s = RETRY_MIN_S
                        yield read(data)
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
