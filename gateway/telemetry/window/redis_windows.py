"""Stores the windows that gateways share in Redis.

    baton:{cluster}:windows                            sorted set: gateways by their last second
    baton:{cluster}:window:{gateway}                   its state, with a TTL of seconds
    baton:{cluster}:window:{gateway}:{row_s}:{second}  a row, which expires with its span

All of them expire. Does not know what the messages contain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from ....cluster.entries import is_incarnation
from ....cluster.redis_client import RedisAway, RedisClient
from .row_message import MAX_ROW_BYTES, RowKey
from .window import HOUR_ROW_S, HOUR_S, SPAN_S

STATE_TTL_S = 5
MAX_GATEWAYS = 64  # including those that have ended
_TTL_S = {1: SPAN_S + 30, HOUR_ROW_S: HOUR_S + 60}


class RedisWindows:
    """The access of one gateway to the shared windows."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis
        self._gateways = f"{redis.prefix}windows"
        self._prefix = f"{redis.prefix}window:"
        self.now_s = redis.now_s

    async def write(
        self, gateway: str, through: int, state: bytes, rows: Mapping[RowKey, bytes]
    ) -> dict[str, int]:
        """Write the rows, then `through`, the last second that they cover. Returns the MAX_GATEWAYS
        most recent gateways with their last seconds. Raises RedisAway."""
        setting = self._redis.setting
        *_, found = await self._redis.run(
            *(setting(self._row(key), packed, _TTL_S[key.row_s]) for key, packed in rows.items()),
            setting(f"{self._prefix}{gateway}", state, STATE_TTL_S),
            ("ZADD", self._gateways, through, gateway),
            ("ZREMRANGEBYSCORE", self._gateways, "-inf", through - HOUR_S),
            ("EXPIRE", self._gateways, HOUR_S),
            ("ZREVRANGE", self._gateways, 0, MAX_GATEWAYS - 1, "WITHSCORES"),
        )
        scores = zip(found[::2], map(float, found[1::2]), strict=True)
        return {name.decode(): int(score) for name, score in scores if _is_known(name, score)}

    async def read(
        self, gateways: Sequence[str], rows: Sequence[RowKey]
    ) -> tuple[list[bytes], list[bytes]]:
        """States and rows as written; empty where missing, or not sealed with the cluster's secret.
        Raises RedisAway."""
        keys = [*(f"{self._prefix}{gateway}" for gateway in gateways), *map(self._row, rows)]
        values = await self._redis.read(keys, MAX_ROW_BYTES)
        return values[: len(gateways)], values[len(gateways) :]

    async def close(self, gateway: str) -> None:
        """Delete the state of a gateway that ends; its rows stay until they expire."""
        with suppress(RedisAway):
            await self._redis.run(("DEL", f"{self._prefix}{gateway}"))

    def _row(self, key: RowKey) -> str:
        return f"{self._prefix}{key.gateway}:{key.row_s}:{key.second}"


def _is_known(name: bytes, score: float) -> bool:
    return is_incarnation(name) and 0 <= score < 1 << 53
