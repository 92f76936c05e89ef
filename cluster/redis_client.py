"""Our client of Redis: the client's settings, its errors, and one repair of redis-py.

Knows no key. Redis is never load-bearing: whoever uses this catches `REDIS_ERRORS` and goes on.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from typing import TypeVar

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from ..core.errors import StartupFailed

T = TypeVar("T")

REDIS_ERRORS = (RedisError, OSError, asyncio.TimeoutError)
RETRY_MIN_S = 0.05
RETRY_MAX_S = 1.0

_TIMEOUT_S = 1.0
_CLUSTER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")  # no glob characters, no separators


def connect(url: str) -> redis.Redis:
    """A client of redis://, rediss:// or unix://; raises StartupFailed on anything else."""
    try:
        return redis.Redis.from_url(
            url,
            protocol=2,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),  # our loops retry, with their own back-off
        )
    except (ValueError, TypeError) as error:
        raise StartupFailed(
            f"--redis-url {url.split('@')[-1]!r} is not usable: {error}",
            hint="redis://host:port/db, rediss://..., unix:///path/to/redis.sock",
        ) from error


async def require_redis(url: str) -> None:
    """Raises StartupFailed unless it answers now: for what is of no use without it."""
    client = connect(url)
    try:
        await reply(client.ping())
    except REDIS_ERRORS as error:
        raise StartupFailed(
            f"Redis does not answer: {error or type(error).__name__}",
            hint="start it, or mend --redis-url (`baton up` without one has a Redis of its own)",
        ) from error
    finally:
        await client.aclose()


def key_prefix(cluster: str) -> str:
    """What all keys and channels of a deployment begin with; raises StartupFailed on a bad name."""
    if not _CLUSTER_NAME.match(cluster):
        raise StartupFailed(
            f"--cluster {cluster!r} is not usable", hint="1 to 64 of A-Z a-z 0-9 _ . -"
        )
    return f"baton:{cluster}:"


async def reply(command: Awaitable[T]) -> T:
    """What Redis answers. redis-py loses a cancellation that comes while it connects: kept here."""
    try:
        return await command
    finally:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
