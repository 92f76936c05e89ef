"""The cluster's directory on Redis: `core.ports.Directory` over redis.asyncio, Redis 5 or newer.

    baton:{cluster}:member:{incarnation}   one entry with a TTL, rewritten by its announcer
    baton:{cluster}:members                channel: something changed, read again

Redis is never load-bearing: while it is away, watchers keep the last membership they saw and
announcers keep trying; no error of Redis reaches a caller. Entries are hints and may be junk: what
does not pass the schema check is skipped and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from ..core.membership import Member
from .entries import MAX_ENTRY_BYTES, BadEntry, decode_entry, encode_entry
from .redis_client import REDIS_ERRORS, RETRY_MAX_S, RETRY_MIN_S, connect, key_prefix, reply

log = logging.getLogger(__name__)

_REFRESH_S = 2.0  # a full re-read covers lost messages and entries that ran out
_MAX_MEMBERS = 4096


class RedisDirectory:
    """Announce, withdraw, watch. `num_bad_entries` counts the junk that was read so far."""

    def __init__(self, url: str, cluster: str, secret: str | None = None) -> None:
        prefix = key_prefix(cluster)
        self._redis = connect(url)
        self._secret = secret
        self._prefix = f"{prefix}member:"
        self._channel = f"{prefix}members"
        self._announcers: dict[str, asyncio.Task[None]] = {}
        self._is_away, self._has_answered = False, False
        self.num_bad_entries = 0

    async def announce(self, member: Member, ttl_s: float) -> None:
        """Write the entry and keep it alive until `withdraw`, through any loss of Redis.

        Returns after the first try, whether or not Redis took it. Announcing an incarnation again
        replaces its entry.
        """
        await self._stop_announcer(member.incarnation)
        await self._write(member, ttl_s)
        self._announcers[member.incarnation] = asyncio.create_task(self._keep(member, ttl_s))

    async def withdraw(self, incarnation: str) -> None:
        """Remove the entry; where Redis is away, its TTL does it."""
        await self._stop_announcer(incarnation)
        try:
            if await reply(self._redis.delete(self._prefix + incarnation)):
                await reply(self._redis.publish(self._channel, incarnation))
        except REDIS_ERRORS as error:
            self._note_away(error)

    async def watch(self) -> AsyncIterator[tuple[Member, ...]]:
        """Yield the membership, ordered by incarnation, at once and again after every change.

        With Redis away from the start, the first one is empty.
        """
        seen: tuple[Member, ...] | None = None
        delay_s = RETRY_MIN_S
        while True:
            try:
                async with self._redis.pubsub(ignore_subscribe_messages=True) as changes:
                    await reply(changes.subscribe(self._channel))
                    while True:
                        members = await self._read()
                        self._note_back()
                        delay_s = RETRY_MIN_S
                        if members != seen:
                            seen = members
                            yield members
                        await reply(changes.get_message(timeout=_REFRESH_S))
            except REDIS_ERRORS as error:
                self._note_away(error)
            if seen is None:
                seen = ()
                yield seen
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, RETRY_MAX_S)

    async def close(self) -> None:
        """Stop announcing, without withdrawing, and close the connections."""
        for incarnation in list(self._announcers):
            await self._stop_announcer(incarnation)
        try:
            await self._redis.aclose()
        except REDIS_ERRORS as error:
            log.debug("closing the connection to Redis: %s", error)

    async def _stop_announcer(self, incarnation: str) -> None:
        if task := self._announcers.pop(incarnation, None):
            task.cancel()
            await asyncio.wait({task})

    async def _keep(self, member: Member, ttl_s: float) -> None:
        """Rewrite the entry until cancelled: three times per TTL, faster after a failure."""
        delay_s = ttl_s / 3
        while True:
            await asyncio.sleep(delay_s)
            is_written = await self._write(member, ttl_s)
            delay_s = ttl_s / 3 if is_written else min(ttl_s / 3, RETRY_MAX_S)

    async def _write(self, member: Member, ttl_s: float) -> bool:
        """Store the entry; tell the watchers if it was not there."""
        key = self._prefix + member.incarnation
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.exists(key)
                pipe.set(key, encode_entry(member, self._secret), px=max(1, int(ttl_s * 1000)))
                was_there, _ = await reply(pipe.execute())
            if not was_there:
                await reply(self._redis.publish(self._channel, member.incarnation))
        except REDIS_ERRORS as error:
            self._note_away(error)
            return False
        self._note_back()
        return True

    async def _read(self) -> tuple[Member, ...]:
        """All entries that pass the check, of at most `_MAX_MEMBERS` keys, ordered."""
        found: set[Any] = set()  # SCAN may name a key twice
        cursor = 0
        while len(found) < _MAX_MEMBERS:
            cursor, page = await reply(
                self._redis.scan(cursor, match=f"{self._prefix}*", count=500)
            )
            found.update(page)
            if cursor == 0:
                break
        keys: list[bytes] = sorted(found)[:_MAX_MEMBERS]
        async with self._redis.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.getrange(key, 0, MAX_ENTRY_BYTES)  # junk may be huge: never ask for all of it
            values = await reply(pipe.execute(raise_on_error=False))
        return tuple(m for m in map(self._decode, keys, values) if m is not None)

    def _decode(self, key: bytes, value: object) -> Member | None:
        if value == b"":
            return None  # ran out between SCAN and GETRANGE
        try:
            if not isinstance(value, bytes):  # GETRANGE of a key that holds no string
                raise BadEntry(f"not a string: {value}")
            member = decode_entry(value, self._secret)
            if key != (self._prefix + member.incarnation).encode():
                raise BadEntry("under another member's key")
        except BadEntry as error:
            self.num_bad_entries += 1
            log.debug("skipped the entry %r: %s", key, error)
            return None
        return member

    def _note_away(self, error: BaseException) -> None:
        if not self._is_away:
            known = "going on with the last known membership"
            unknown = "waiting for it (is --redis-url right?)"
            log.warning("Redis is away (%s); %s", error, known if self._has_answered else unknown)
        self._is_away = True

    def _note_back(self) -> None:
        if self._is_away:
            log.warning("Redis is back")
        self._is_away, self._has_answered = False, True
