"""The LoRA adapters that all gateways of a cluster serve: a list on Redis, merged with their own.

    baton:{cluster}:adapters:{of the model}   [model, [[name, version, digest, path], ...]], sealed

Of two entries of a name the one with the greater version holds, and else the one that was in the
list first: a gateway that has loaded another adapter of the name finds that it is taken. One that
is unloaded stays as an entry without a digest, so that neither a gateway that was away nor a Redis
that lost its data brings it back. The list outlives its gateways for an hour. What is read is
bounded and checked, whoever wrote it. Knows no engine.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from ...cluster.redis_client import RedisAway, RedisClient
from ...cluster.secret import TAG_BYTES

log = logging.getLogger(__name__)

_TTL_S = 3600
_MAX_BYTES = 1 << 20
_MAX_VERSION = 1 << 53
_NUM_TRIES = 5  # while others write too
_DIGEST = re.compile(r"([0-9a-f]{32})?\Z")
# Replace what was read; 0: somebody else has written since.
_REPLACE = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
return 1
"""


class Entry(NamedTuple):
    """An adapter by its name, or that there is none: `digest` and `path` are empty then."""

    name: str
    version: int  # how often the name was loaded and unloaded
    digest: str
    path: str


_Message = tuple[str, list[Entry]]


class SharedList:
    """One gateway's way to it."""

    def __init__(self, redis: RedisClient, model: str) -> None:
        self._redis, self._model = redis, model
        of_model = hashlib.blake2b(model.encode(), digest_size=16).hexdigest()
        self._key = f"{redis.prefix}adapters:{of_model}"

    async def exchange(self, mine: Mapping[str, Entry]) -> list[Entry]:
        """Add to the list what it lacks of `mine`; returns its entries that hold against these.
        Nothing of either while Redis is away."""
        held: list[Entry] = []
        try:
            for _ in range(_NUM_TRIES):
                # Junk may be huge: never read all of it.
                last = _MAX_BYTES + TAG_BYTES
                [found] = await self._redis.run(("GETRANGE", self._key, 0, last))
                theirs = {entry.name: entry for entry in self._decode(found)}
                held = [one for one in theirs.values() if holds(one, mine)]
                if not any(_is_lacking(one, theirs) for one in mine.values()):
                    await self._redis.run(("EXPIRE", self._key, _TTL_S))
                    break
                merged = {**mine, **{one.name: one for one in held}}
                sealed = self._encode(merged.values())
                if len(sealed) > _MAX_BYTES:
                    log.error("too many LoRA adapters for one list: %d", len(merged))
                    break
                if found and not theirs:  # junk, or a secret that was
                    await self._redis.run(("SET", self._key, sealed, "EX", _TTL_S))
                    break
                replacing = ("EVAL", _REPLACE, 1, self._key, found, sealed, _TTL_S)
                if any(await self._redis.run(replacing)):
                    break
        except RedisAway as error:
            log.debug("the list of LoRA adapters: %s", error)
        return held

    def _encode(self, entries: Iterable[Entry]) -> bytes:
        return self._redis.secret.seal(msgspec.msgpack.encode((self._model, [*entries])))

    def _decode(self, found: object) -> list[Entry]:
        """None of junk."""
        if not isinstance(found, bytes) or not (message := self._redis.secret.unseal(found)):
            return []
        try:
            model, entries = msgspec.msgpack.decode(message, type=_Message)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return []
        return [one for one in entries if _is_sound(one)] if model == self._model else []


def holds(entry: Entry, mine: Mapping[str, Entry]) -> bool:
    """Whether it, of the list, takes the place of what a gateway has of its name, if anything."""
    other = mine.get(entry.name)
    return other is None or (entry != other and entry.version >= other.version)


def _is_lacking(entry: Entry, listed: Mapping[str, Entry]) -> bool:
    """Whether it, a gateway's, belongs into the list."""
    other = listed.get(entry.name)
    return other is None or entry.version > other.version


def _is_sound(entry: Entry) -> bool:
    is_whole = bool(entry.digest) == bool(entry.path)
    is_hex = _DIGEST.match(entry.digest) is not None
    return is_whole and is_hex and 0 < entry.version < _MAX_VERSION
