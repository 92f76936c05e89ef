"""The cluster's directory on Redis: `core.ports.Directory` over redis.asyncio, Redis 5 or newer.

    baton:{cluster}:member:{incarnation}   one entry with a TTL, rewritten by its announcer
    baton:{cluster}:listed                 sorted set: incarnations, by the time of their last write
    baton:{cluster}:members                channel: incarnations with a new or a last entry
    baton:{cluster}:probe                  written by watchers: a Redis that cannot store is away

Serving never depends on Redis: while it is away, watchers keep the last membership and announcers
keep retrying; no error of Redis reaches a caller. Entries may be invalid or replayed: those that
fail the checks are skipped and counted. A writer to Redis without the secret can hide engines and
delay their discovery, but cannot forge one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import aclosing
from dataclasses import dataclass, field

from ..core.membership import Member
from ..core.process.event_loop import keep_running
from .entries import (
    MAX_ENTRY_BYTES,
    BadEntry,
    DirectoryEntry,
    decode_entry,
    encode_entry,
    is_incarnation,
)
from .redis_client import RETRY_MAX_S, Command, RedisAway, RedisClient

log = logging.getLogger(__name__)

_REFRESH_S = 2.0  # period of re-reads, for lost messages and expired entries
_MAX_MEMBERS = 4096
_MAX_LISTED = 2 * _MAX_MEMBERS
_LISTED_MS = 60_000  # the longest validity of an entry
_AHEAD_MS = 1000  # later times are not from announcers and are removed
_PROBE_MS = 10_000
_NO_TTL = -1  # PTTL of a key without a TTL


@dataclass(slots=True)
class _View:
    """The state of one watcher: the newest entry of each incarnation, including those that left."""

    entries: dict[str, DirectoryEntry] = field(default_factory=dict)

    def take(self, entry: DirectoryEntry) -> None:
        """Add an entry. Raises BadEntry if a newer one of the incarnation was seen."""
        incarnation = entry.member.incarnation
        known = self.entries.get(incarnation)
        if known is not None and entry.sequence < known.sequence:
            raise BadEntry("superseded")
        if known is None and len(self.entries) >= _MAX_MEMBERS:
            raise BadEntry("too many members")
        self.entries[incarnation] = entry

    def forget_old(self, now_ms: int) -> None:
        """Drop expired entries; if replayed, they are rejected as too old."""
        for incarnation, entry in list(self.entries.items()):
            try:
                entry.check_age(now_ms)
            except BadEntry:
                del self.entries[incarnation]

    def drop(self, incarnations: Collection[str]) -> None:
        """Drop incarnations without a key. Those that left stay, so that none can be replayed."""
        for incarnation in incarnations:
            if incarnation in self.entries and not self.entries[incarnation].is_gone:
                del self.entries[incarnation]

    def members(self) -> tuple[Member, ...]:
        """The live members, ordered by incarnation."""
        live = (entry for entry in self.entries.values() if not entry.is_gone)
        return tuple(sorted((e.member for e in live), key=lambda member: member.incarnation))


class RedisDirectory:
    """Announce, withdraw, watch. `num_bad_entries`: invalid entries read so far; `is_away`: Redis
    failed at the last attempt."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis
        self._secret = redis.secret
        self._prefix = f"{redis.prefix}member:"
        self._channel = f"{redis.prefix}members"
        self._listed, self._probe = f"{redis.prefix}listed", f"{redis.prefix}probe"
        self._announcers: dict[str, asyncio.Task[None]] = {}
        self._last: dict[str, DirectoryEntry] = {}  # own entries, written or attempted
        self.is_away, self._has_answered = False, False
        self.num_bad_entries = 0

    async def announce(self, member: Member, ttl_s: float) -> None:
        """Write the entry and renew it until `withdraw`, across losses of Redis.

        Returns after the first attempt, successful or not. Announcing an incarnation again replaces
        its entry.
        """
        await self._stop_announcer(member.incarnation)
        await self._write(member, ttl_s)
        self._announcers[member.incarnation] = asyncio.create_task(
            keep_running("an engine's entry in Redis", lambda: self._keep(member, ttl_s))
        )

    async def withdraw(self, incarnation: str) -> None:
        """Mark the engine as gone; if Redis is away, the entry's TTL expires."""
        await self._stop_announcer(incarnation)
        last = self._last.get(incarnation)
        if last is not None and not last.is_gone:
            await self._write(last.member, last.ttl_ms / 1000, is_gone=True)

    async def watch(self) -> AsyncIterator[tuple[Member, ...]]:
        """Yield the membership, ordered by incarnation, once it is read and after every change.

        If Redis is away from the start, the first membership is empty.
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
                        continue  # keep the last membership
                else:
                    self._note_back()
                if (members := view.members()) != seen:
                    seen = members
                    yield members

    async def close(self) -> None:
        """Stop announcing, without withdrawing, and close the client, for all its users."""
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
            entry = DirectoryEntry(
                member, last.sequence + 1 if last else 1, now_ms, ttl_ms, is_gone
            )
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
        """Update the view: its own entries and the listed ones."""
        await self._redis.run(("SET", self._probe, b"1", "PX", _PROBE_MS))
        [listed] = await self._redis.run(("ZREVRANGE", self._listed, 0, _MAX_LISTED - 1))
        now_ms = int(await self._redis.now_s() * 1000)
        view.forget_old(now_ms)
        names = {name.decode() for name in listed if is_incarnation(name)}
        self.num_bad_entries += len(listed) - len(names)
        view.drop(await self._read_keys(view, view.entries.keys() | names, now_ms))

    async def _read_keys(self, view: _View, incarnations: Collection[str], now_ms: int) -> set[str]:
        """Add the entries of these incarnations to the view; returns those without a key."""
        wanted = sorted(incarnations)
        commands: list[Command] = []
        for incarnation in wanted:
            key = self._prefix + incarnation  # an invalid value may be huge: bounded read
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

    def _decode(self, incarnation: str, value: object, pttl: object, now_ms: int) -> DirectoryEntry:
        """The entry, checked; raises BadEntry."""
        if not isinstance(value, bytes):  # GETRANGE of a key that is not a string
            raise BadEntry(f"not a string: {value}")
        if pttl == _NO_TTL:
            raise BadEntry("without a TTL, which every announcement has")
        entry = decode_entry(value, self._secret)
        if entry.member.incarnation != incarnation:
            raise BadEntry("under another member's key")
        entry.check_age(now_ms)
        return entry

    def _note_bad(self, incarnation: str, error: BadEntry) -> None:
        """Warn only at the first one: a writer to Redis could fill the log."""
        if not self.num_bad_entries:
            log.warning(
                "skipped the entry of %s in Redis: %s; does its process have another "
                "BATON_CLUSTER_SECRET? further ones are not logged: `baton fsck` counts them",
                *(incarnation, error),
            )
        self.num_bad_entries += 1

    def _note_away(self, error: BaseException) -> None:
        if not self.is_away:
            known = "using the last known membership"
            unknown = "waiting for it (is --redis-url right?)"
            log.warning(
                "Redis is unreachable (%s); %s", error, known if self._has_answered else unknown
            )
        self.is_away = True

    def _note_back(self) -> None:
        if self.is_away:
            log.warning("Redis is reachable again")
        self.is_away, self._has_answered = False, True
