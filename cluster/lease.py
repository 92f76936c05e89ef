"""A lease on Redis: at most one process at a time, by Redis' clock, and an epoch that grows with
each holder.

    baton:{cluster}:{name}:holder   who has it, with a TTL
    baton:{cluster}:{name}:epoch    that of the last holder

Who was paused may believe in it for longer than it lasts, and a Redis that lost its data grants it
again at once, perhaps with an epoch that another holder has: what is ordered under a lease carries
its epoch, and whoever obeys refuses an older one, or the same of another holder. A holder that sees
one of these names an epoch above it (`take`). A writer of Redis without the secret can keep
everybody from having it, and no more: orders go over authenticated links.
"""

from __future__ import annotations

import logging

from ..core.ports import Clock
from .redis_client import RedisAway, RedisClient

log = logging.getLogger(__name__)

_MAX_EPOCH = 1 << 53  # what Lua's numbers count to
# Take it with a new epoch, or keep it. `ARGV[3]`: the least epoch that will do.
_TAKE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
local epoch = tonumber(redis.call('GET', KEYS[2]) or '0') or 0
local least = tonumber(ARGV[3])
if not holder or epoch < least then
  epoch = math.max(epoch + 1, least)
  redis.call('SET', KEYS[2], string.format('%.0f', epoch))
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return epoch
"""
_LEAVE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end return 0"


class RedisLease:
    """One process's part in it."""

    def __init__(
        self, redis: RedisClient, name: str, holder: str, ttl_s: float, clock: Clock
    ) -> None:
        self._redis = redis
        self._keys = (f"{redis.prefix}{name}:holder", f"{redis.prefix}{name}:epoch")
        self._holder = holder
        self._ttl_s = ttl_s
        self._clock = clock
        self._epoch = 0
        self._until_s = 0.0

    @property
    def epoch(self) -> int | None:
        """While it is held, for all that this process can know; else None."""
        return self._epoch if self._clock.monotonic_s() < self._until_s else None

    async def take(self, least_epoch: int) -> int | None:
        """Take it or renew it: its epoch, `least_epoch` at least; None: somebody else has it, or
        Redis does not answer. It lasts from when it was asked for."""
        asked_s = self._clock.monotonic_s()
        ttl_ms, least = int(self._ttl_s * 1000), min(least_epoch, _MAX_EPOCH)
        try:
            [answer] = await self._redis.run(
                ("EVAL", _TAKE, 2, *self._keys, self._holder, ttl_ms, least)
            )
        except RedisAway as error:
            log.debug("the lease was not renewed: %s", error)
            return self.epoch
        if not isinstance(answer, int) or not 0 < answer <= _MAX_EPOCH:
            self._until_s = 0.0
            return None
        self._epoch, self._until_s = answer, asked_s + self._ttl_s
        return self.epoch

    async def close(self) -> None:
        """Leave it to others at once, if it is held."""
        try:
            if self.epoch is not None:
                await self._redis.run(("EVAL", _LEAVE, 1, self._keys[0], self._holder))
        except RedisAway as error:
            log.debug("leaving the lease: %s", error)
        self._until_s = 0.0
