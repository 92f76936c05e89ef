"""Where gateways leave their windows for each other: Redis, by commands of 5.0 or older.

    baton:{cluster}:windows                            sorted set: gateways by their last second
    baton:{cluster}:window:{gateway}                   its state, with a TTL of seconds
    baton:{cluster}:window:{gateway}:{row_s}:{second}  a row, which expires with its span

All expire by themselves. What is read is bounded, whoever wrote it; with a cluster secret it is
signed. Knows no message.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ....cluster.redis_client import REDIS_ERRORS, connect, key_prefix, reply
from ....cluster.secret import NO_SECRET, TAG_BYTES, ClusterSecret
from .row_message import MAX_ROW_BYTES
from .window import HOUR_ROW_S, HOUR_S, SPAN_S

log = logging.getLogger(__name__)

STATE_TTL_S = 5
MAX_GATEWAYS = 64  # that are known, those that are gone included
_TTL_S = {1: SPAN_S + 30, HOUR_ROW_S: HOUR_S + 60}
_GATEWAY = re.compile(rb"[0-9a-f]{32}\Z")


class WindowsAway(Exception):
    """Redis did not answer; what was to be written or read may be there, or not."""


@dataclass(frozen=True, slots=True, order=True)
class RowKey:
    """One row of a gateway: `row_s` seconds from `second` on."""

    gateway: str
    row_s: int
    second: int


class RedisWindows:
    """One for a gateway. Raises StartupFailed on a bad URL or cluster name."""

    def __init__(self, url: str, cluster: str, secret: ClusterSecret = NO_SECRET) -> None:
        self._redis: Any = connect(url)
        self._secret = secret
        self._max_bytes = MAX_ROW_BYTES + (TAG_BYTES if secret.current else 0)
        self._gateways = f"{key_prefix(cluster)}windows"
        self._prefix = f"{key_prefix(cluster)}window:"

    async def now_s(self) -> float:
        """The clock that all gateways share; raises WindowsAway."""
        try:
            seconds, microseconds = await reply(self._redis.time())
        except REDIS_ERRORS as error:
            raise WindowsAway(str(error)) from error
        return int(seconds) + int(microseconds) / 1e6

    async def write(
        self, gateway: str, through: int, state: bytes, rows: Mapping[RowKey, bytes]
    ) -> dict[str, int]:
        """Rows first, then that they are there. Returns all gateways with their last seconds, the
        latest MAX_GATEWAYS. Raises WindowsAway."""
        async with self._pipeline() as pipe:
            for key, packed in rows.items():
                pipe.set(self._row(key), self._secret.seal(packed), ex=_TTL_S[key.row_s])
            pipe.set(f"{self._prefix}{gateway}", self._secret.seal(state), ex=STATE_TTL_S)
            pipe.zadd(self._gateways, {gateway: through})
            pipe.zremrangebyscore(self._gateways, "-inf", through - HOUR_S)
            pipe.expire(self._gateways, HOUR_S)
            pipe.zrevrange(self._gateways, 0, MAX_GATEWAYS - 1, withscores=True)
            found = (await self._execute(pipe, raise_on_error=True))[-1]
        return {name.decode(): int(score) for name, score in found if _is_known(name, score)}

    async def read(
        self, gateways: Sequence[str], rows: Sequence[RowKey]
    ) -> tuple[list[bytes], list[bytes]]:
        """States and rows as they were written; empty where there is none, or junk. Raises
        WindowsAway."""
        async with self._pipeline() as pipe:
            names = [*(f"{self._prefix}{gateway}" for gateway in gateways), *map(self._row, rows)]
            for name in names:
                pipe.getrange(name, 0, self._max_bytes)  # junk may be huge: never read all of it
            found = await self._execute(pipe, raise_on_error=False)
        values = [self._secret.unseal(v) if isinstance(v, bytes) and v else b"" for v in found]
        return values[: len(gateways)], values[len(gateways) :]

    async def close(self, gateway: str) -> None:
        """Take the state back: this gateway is no more; its rows stay until they expire."""
        with suppress(*REDIS_ERRORS):
            await reply(self._redis.delete(f"{self._prefix}{gateway}"))
        with suppress(*REDIS_ERRORS):
            await self._redis.aclose()

    def _row(self, key: RowKey) -> str:
        return f"{self._prefix}{key.gateway}:{key.row_s}:{key.second}"

    def _pipeline(self) -> Any:
        return self._redis.pipeline(transaction=False)

    @staticmethod
    async def _execute(pipe: Any, *, raise_on_error: bool) -> list[Any]:
        try:
            found: list[Any] = await reply(pipe.execute(raise_on_error))
        except REDIS_ERRORS as error:
            raise WindowsAway(str(error) or type(error).__name__) from error
        return found


def _is_known(name: bytes, score: float) -> bool:
    return _GATEWAY.match(name) is not None and 0 <= score < 1 << 53
