"""The cluster's directory on Redis: `core.ports.Directory` over redis.asyncio, Redis 5 or newer.

    baton:{cluster}:member:{incarnation}   one entry with a TTL, rewritten by its announcer
    baton:{cluster}:listed                 sorted set: incarnations, by when an entry was written
    baton:{cluster}:members                channel: this incarnation's entry is new, or its last
    baton:{cluster}:probe                  written by watchers: Redis that stores nothing is away

Redis is never load-bearing: while it is away, watchers keep the last membership they saw and
announcers keep trying; no error of Redis reaches a caller. Entries are hints and may be junk, or
old ones that somebody put back: what does not pass the checks is skipped and counted. A writer of
Redis without the secret can hide engines, and slow down how they are found, but make up none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import aclosing
from dataclasses import dataclass, field

from ..core.membership import Member
from ..core.process.event_loop import keep_running
from .entries import MAX_ENTRY_BYTES, BadEntry, Entry, decode_entry, encode_entry, is_incarnation
from .redis_client import RETRY_MAX_S, Command, RedisAway, RedisClient

log = logging.getLogger(__name__)

_REFRESH_S = 2.0  # a re-read covers lost messages and entries that ran out
_MAX_MEMBERS = 4096
_MAX_LISTED = 2 * _MAX_MEMBERS
_LISTED_MS = 60_000  # no entry counts for longer
_AHEAD_MS = 1000  # who is listed at a later time than it is has not written that
_PROBE_MS = 10_000
_NO_TTL = -1  # PTTL of a key without one


@dataclass(slots=True)
class _View:
    """What one watcher knows: the newest entry of each incarnation, the last ones included."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def take(self, entry: Entry) -> None:
        """Raises BadEntry if a newer one of the incarnation was seen."""
        incarnation = entry.member.incarnation
        known = self.entries.get(incarnation)
        if known is not None and entry.sequence < known.sequence:
            raise BadEntry("superseded")
        if known is None and len(self.entries) >= _MAX_MEMBERS:
            raise BadEntry("one member too many")
        self.entries[incarnation] = entry

    def forget_old(self, now_ms: int) -> None:
        """Entries that ran out; put back, they are too old anyway."""
        for incarnation, entry in list(self.entries.items()):
            try:
                entry.check_age(now_ms)
            except BadEntry:
                del self.entries[incarnation]

    def drop(self, incarnations: Collection[str]) -> None:
        """Those whose keys are gone; what has left stays known, so that it cannot come back."""
        for incarnation in incarnations:
            if incarnation in self.entries and not self.entries[incarnation].is_gone:
                del self.entries[incarnation]

    def members(self) -> tuple[Member, ...]:
        """Ordered by incarnation."""
        live = (entry for entry in self.entries.values() if not entry.is_gone)
        return tuple(sorted((e.member for e in live), key=lambda member: member.incarnation))


class RedisDirectory:
    """Announce, withdraw, watch. `num_bad_entries` counts the junk that was read so far; `is_away`:
    Redis did not answer the last time."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis
        self._secret = redis.secret
        self._prefix = f"{redis.prefix}member:"
        self._channel = f"{redis.prefix}members"
        self._listed, self._probe = f"{redis.prefix}listed", f"{redis.prefix}probe"
        self._announcers: dict[str, asyncio.Task[None]] = {}
        self._last: dict[str, Entry] = {}  # that we wrote, or tried to
        self.is_away, self._has_answered = False, False
        self.num_bad_entries = 0

    async def announce(self, member: Member, ttl_s: float) -> None:
        """Write the entry and keep it alive until `withdraw`, through any loss of Redis.

        Returns after the first try, whether or not Redis took it. Announcing an incarnation again
        replaces its entry.
        """
        await self._stop_announcer(member.incarnation)
        await self._write(member, ttl_s)
        self._announcers[member.incarnation] = asyncio.create_task(
            keep_running("an engine's entry in Redis", lambda: self._keep(member, ttl_s))
        )

    async def withdraw(self, incarnation: str) -> None:
        """Mark the entry: the engine has left; where Redis is away, its TTL does it."""
        await self._stop_announcer(incarnation)
        last = self._last.get(incarnation)
        if last is not None and not last.is_gone:
            await self._write(last.member, last.ttl_ms / 1000, is_gone=True)

    async def watch(self) -> AsyncIterator[tuple[Member, ...]]:
        """Yield the membership, ordered by incarnation, once it is read and after every change.

        With Redis away from the start, the first one is empty.
        """
        seen: tuple[Member, ...] | None = None
        view = _View()
        async with aclosing(self._redis.follow(self._channel, _REFRESH_S)) as changes:
            async for came in changes:
                try:
                    if isinstance(came, RedisAway):
                        raise came
                    await self._read(view)
                except RedisAway as error:
                    self._note_away(error)
                    if seen is not None:
                        continue  # what was known stays
                else:
                    self._note_back()
                if (members := view.members()) != seen:
                    seen = members
                    yield members

    async def close(self) -> None:
        """Stop announcing, without withdrawing, and close the client: nobody else uses it now."""
        for incarnation in list(self._announcers):
            await self._stop_announcer(incarnation)
        await self._redis.close()

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

    async def _write(self, member: Member, ttl_s: float, *, is_gone: bool = False) -> bool:
        """Store an entry; publish it if it is the first or the last."""
        incarnation, ttl_ms = member.incarnation, max(1, int(ttl_s * 1000))
        last, key = self._last.get(incarnation), self._prefix + incarnation
        try:
            now_ms = int(await self._redis.now_s() * 1000)
            entry = Entry(member, last.sequence + 1 if last else 1, now_ms, ttl_ms, is_gone)
            self._last[incarnation] = entry
            was_there, *_ = await self._redis.run(
                ("EXISTS", key),
                ("SET", key, encode_entry(entry, self._secret), "PX", ttl_ms),
                ("ZADD", self._listed, now_ms, incarnation),
                ("ZREMRANGEBYSCORE", self._listed, "-inf", now_ms - _LISTED_MS),
                ("ZREMRANGEBYSCORE", self._listed, now_ms + _AHEAD_MS, "+inf"),
                ("PEXPIRE", self._listed, _LISTED_MS),
            )
            if is_gone or not was_there or (last is not None and last.is_gone):
                await self._redis.run(("PUBLISH", self._channel, incarnation))
        except RedisAway as error:
            self._note_away(error)
            return False
        self._note_back()
        return True

    async def _read(self, view: _View) -> None:
        """Bring the view up to date: what it has, and what is listed."""
        await self._redis.run(("SET", self._probe, b"1", "PX", _PROBE_MS))
        [listed] = await self._redis.run(("ZREVRANGE", self._listed, 0, _MAX_LISTED - 1))
        now_ms = int(await self._redis.now_s() * 1000)
        view.forget_old(now_ms)
        names = {name.decode() for name in listed if is_incarnation(name)}
        self.num_bad_entries += len(listed) - len(names)
        view.drop(await self._read_keys(view, view.entries.keys() | names, now_ms))

    async def _read_keys(self, view: _View, incarnations: Collection[str], now_ms: int) -> set[str]:
        """Take in the entries of these; returns those that have none any more."""
        wanted = sorted(incarnations)
        commands: list[Command] = []
        for incarnation in wanted:
            key = self._prefix + incarnation  # junk may be huge: never read all of it
            commands += [("GETRANGE", key, 0, MAX_ENTRY_BYTES), ("PTTL", key)]
        replies = await self._redis.run(*commands, is_strict=False)
        gone = set()
        for incarnation, value, pttl in zip(wanted, replies[::2], replies[1::2], strict=True):
            if value == b"":
                gone.add(incarnation)
                continue
            try:
                view.take(self._decode(incarnation, value, pttl, now_ms))
            except BadEntry as error:
                self._note_bad(incarnation, error)
        return gone

    def _decode(self, incarnation: str, value: object, pttl: object, now_ms: int) -> Entry:
        """Raises BadEntry."""
        if not isinstance(value, bytes):  # GETRANGE of a key that holds no string
            raise BadEntry(f"not a string: {value}")
        if pttl == _NO_TTL:
            raise BadEntry("without a TTL, which every announcer gives")
        entry = decode_entry(value, self._secret)
        if entry.member.incarnation != incarnation:
            raise BadEntry("under another member's key")
        entry.check_age(now_ms)
        return entry

    def _note_bad(self, incarnation: str, error: BadEntry) -> None:
        """A warning at the first one alone: whoever writes to Redis could fill the log."""
        if not self.num_bad_entries:
            log.warning(
                "skipped the entry of %s in Redis: %s; has its process another "
                "BATON_CLUSTER_SECRET? further ones are not logged: `baton fsck` counts them",
                *(incarnation, error),
            )
        self.num_bad_entries += 1

    def _note_away(self, error: BaseException) -> None:
        if not self.is_away:
            known = "going on with the last known membership"
            unknown = "waiting for it (is --redis-url right?)"
            log.warning("Redis is away (%s); %s", error, known if self._has_answered else unknown)
        self.is_away = True

    def _note_back(self) -> None:
        if self.is_away:
            log.warning("Redis is back")
        self.is_away, self._has_answered = False, True
