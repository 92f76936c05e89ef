"""A lease on Redis: one holder at a time, by Redis' clock. Its epoch grows with each holder.

    baton:{cluster}:{name}:holder   the current holder, with a TTL
    baton:{cluster}:{name}:epoch    the epoch of the last holder

A paused process may believe that it holds an expired lease, and a Redis that lost its data grants
the lease again at once, perhaps with an epoch that another holder has. So orders carry the epoch,
and receivers refuse an older one, or an equal one of another holder; a holder that learns of such
an epoch takes a higher one (`take`). A writer to Redis without the secret can only prevent the
lease from being held: orders go over authenticated links.
"""

from __future__ import annotations

import logging

from ..core.ports import Clock
from .redis_client import RedisAway, RedisClient

log = logging.getLogger(__name__)

_MAX_EPOCH = 1 << 53  # the largest exact integer of Lua
# Take the lease with a new epoch, or renew it. `ARGV[3]`: the least acceptable epoch.
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
    """The access of one process to the lease."""

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
        """The epoch while the lease is held, as far as this process can know; else None."""
        return self._epoch if self._clock.monotonic_s() < self._until_s else None

    async def take(self, least_epoch: int) -> int | None:
        """Take or renew the lease: returns its epoch, at least `least_epoch`. None: another process
        holds it. While Redis is away, `epoch`. Its duration counts from the request."""
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
        """Release the lease at once, if it is held."""
        try:
            if self.epoch is not None:
                await self._redis.run(("EVAL", _LEAVE, 1, self._keys[0], self._holder))
        except RedisAway as error:
            log.debug("releasing the lease: %s", error)
        self._until_s = 0.0
