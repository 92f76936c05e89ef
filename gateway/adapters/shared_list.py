"""The list of LoRA adapters that all gateways of a cluster serve, on Redis.

    baton:{cluster}:adapters:{hash of model}   [model, [[name, version, digest, path], ...]], sealed

Of two entries with a name, the higher version wins, else the entry that was in the list first. An
unloaded adapter stays as an entry without a digest, so that no gateway that was disconnected and no
Redis that lost its data restores it. Entries are bounded and checked. Knows no engine.
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

_TTL_S = 3600  # for which the list outlives its gateways
_MAX_BYTES = 1 << 20
_MAX_VERSION = 1 << 53
_NUM_TRIES = 5  # against concurrent writers
_DIGEST = re.compile(r"([0-9a-f]{32})?\Z")
# Compare and set: returns 0 if the value differs from the one that was read.
_REPLACE = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
return 1
"""


class AdapterEntry(NamedTuple):
    """An adapter by name. Unloaded: `digest` and `path` are empty."""

    name: str
    version: int  # number of loads and unloads of the name
    digest: str
    path: str


_Message = tuple[str, list[AdapterEntry]]


class SharedList:
    """The access of one gateway to the list."""

    def __init__(self, redis: RedisClient, model: str) -> None:
        self._redis, self._model = redis, model
        of_model = hashlib.blake2b(model.encode(), digest_size=16).hexdigest()
        self._key = f"{redis.prefix}adapters:{of_model}"

    async def exchange(self, mine: Mapping[str, AdapterEntry]) -> list[AdapterEntry]:
        """Add the entries of `mine` that the list lacks; return its entries that take precedence
        over these. Does nothing while Redis is away."""
        held: list[AdapterEntry] = []
        try:
            for _ in range(_NUM_TRIES):
                # A foreign value may be huge: the read is bounded.
                last = _MAX_BYTES + TAG_BYTES
                [found] = await self._redis.run(("GETRANGE", self._key, 0, last))
                theirs = {entry.name: entry for entry in self._decode(found)}
                held = [one for one in theirs.values() if holds(one, mine)]
                versions = {one.name: one.version for one in theirs.values()}
                if all(one.version <= versions.get(one.name, 0) for one in mine.values()):
                    await self._redis.run(("EXPIRE", self._key, _TTL_S))
                    break
                merged = {**mine, **{one.name: one for one in held}}
                sealed = self._encode(merged.values())
                if len(sealed) > _MAX_BYTES:
                    log.error("too many LoRA adapters for one list: %d", len(merged))
                    break
                if found and not theirs:  # invalid, or sealed with an old secret
                    await self._redis.run(("SET", self._key, sealed, "EX", _TTL_S))
                    break
                replacing = ("EVAL", _REPLACE, 1, self._key, found, sealed, _TTL_S)
                if any(await self._redis.run(replacing)):
                    break
        except RedisAway as error:
            log.debug("the list of LoRA adapters: %s", error)
        return held

    def _encode(self, entries: Iterable[AdapterEntry]) -> bytes:
        return self._redis.secret.seal(msgspec.msgpack.encode((self._model, [*entries])))

    def _decode(self, found: object) -> list[AdapterEntry]:
        """The valid entries of a value."""
        if not isinstance(found, bytes) or not (message := self._redis.secret.unseal(found)):
            return []
        try:
            model, entries = msgspec.msgpack.decode(message, type=_Message)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return []
        return [one for one in entries if _is_sound(one)] if model == self._model else []


def holds(entry: AdapterEntry, mine: Mapping[str, AdapterEntry]) -> bool:
    """Whether this entry of the list takes precedence over the gateway's own of its name."""
    other = mine.get(entry.name)
    return other is None or (entry != other and entry.version >= other.version)


def _is_sound(entry: AdapterEntry) -> bool:
    is_whole = bool(entry.digest) == bool(entry.path)
    is_hex = _DIGEST.match(entry.digest) is not None
    return is_whole and is_hex and 0 < entry.version < _MAX_VERSION
