"""The Redis client: values that expire, sealed with the cluster's secret, and channels.

Uses commands of Redis 5.0 or older. All reads are bounded. Knows no key. Serving never depends on
Redis: callers catch RedisAway and continue.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, TypeAlias, TypeVar

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from ..core.errors import StartupFailed
from .secret import NO_SECRET, TAG_BYTES, ClusterSecret

T = TypeVar("T")

_ERRORS = (RedisError, OSError, asyncio.TimeoutError)
_RETRY_MIN_S = 0.05
RETRY_MAX_S = 1.0

Command: TypeAlias = tuple[str | bytes | int, ...]

_TIMEOUT_S = 1.0
_MAX_AT_ONCE = 256  # messages of a channel in one batch
_CLUSTER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")  # no glob characters, no separators


def _connect(url: str) -> redis.Redis:
    """A client of redis://, rediss:// or unix://; raises StartupFailed on anything else."""
    try:
        return redis.Redis.from_url(
            url,
            protocol=2,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),  # callers retry, with their own back-off
        )
    except (ValueError, TypeError) as error:
        raise StartupFailed(
            f"--redis-url {url.split('@')[-1]!r} is not usable: {error}",
            hint="redis://host:port/db, rediss://..., unix:///path/to/redis.sock",
        ) from error


def _key_prefix(cluster: str) -> str:
    """The prefix of a deployment's keys and channels; raises StartupFailed on a bad name."""
    if not _CLUSTER_NAME.match(cluster):
        raise StartupFailed(
            f"--cluster {cluster!r} is not usable", hint="1 to 64 of A-Z a-z 0-9 _ . -"
        )
    return f"baton:{cluster}:"


async def _reply(command: Awaitable[T]) -> T:
    """The reply. Re-raises a cancellation while connecting, which redis-py swallows."""
    try:
        return await command
    except (RuntimeError, ValueError, IndexError) as error:
        # From uvloop on a write to a transport that has just closed; from the parser on bad data.
        raise ConnectionError(str(error)) from error
    finally:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError


class RedisAway(Exception):
    """Redis did not reply, or failed; the command may or may not have been executed."""


class RedisClient:
    """A deployment's client of Redis, shared within a process. All keys and channels begin with
    `prefix`. Raises StartupFailed on a bad URL or cluster name."""

    def __init__(self, url: str, cluster: str, secret: ClusterSecret = NO_SECRET) -> None:
        self.prefix = _key_prefix(cluster)
        self.secret = secret
        self._redis: Any = _connect(url)

    async def run(self, *commands: Command, is_strict: bool = True) -> list[Any]:
        """The replies, in one round trip. Raises RedisAway; with `is_strict` also if a command
        fails, else its reply is the error."""
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                answers: list[Any] = await _reply(pipe.execute(raise_on_error=False))
        except _ERRORS as error:
            raise _away(error) from error
        for answer in answers:
            if is_strict and isinstance(answer, RedisError):
                raise _away(answer) from answer
        return answers

    async def now_s(self) -> float:
        """Redis' clock, which all processes of a deployment share. Raises RedisAway."""
        [(seconds, microseconds)] = await self.run(("TIME",))
        return int(seconds) + int(microseconds) / 1e6

    def setting(self, key: str, value: bytes, ttl_s: float) -> Command:
        """The command that stores a sealed value with this TTL."""
        return ("SET", key, self.secret.seal(value), "PX", int(ttl_s * 1000))

    async def read(self, keys: Iterable[str], max_bytes: int) -> list[bytes]:
        """The values of these keys; empty where missing or invalid. Raises RedisAway."""
        last = max_bytes + TAG_BYTES  # an invalid value may be huge: bounded read
        found = await self.run(*(("GETRANGE", key, 0, last) for key in keys), is_strict=False)
        return [self.secret.unseal(v) if isinstance(v, bytes) else b"" for v in found]

    async def follow(
        self, channel: str, silence_s: float
    ) -> AsyncGenerator[list[bytes] | RedisAway]:
        """The raw messages of a channel, in batches. A batch is empty at the start and when
        Redis replies to a ping after `silence_s` without messages. Yields RedisAway at each
        failure, and reconnects."""
        delay_s = _RETRY_MIN_S
        while True:
            try:
                async with aclosing(self._listen(channel, silence_s)) as published:
                    async for came in published:
                        delay_s = _RETRY_MIN_S
                        yield came
            except RedisAway as error:
                yield error
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, RETRY_MAX_S)

    async def _listen(self, channel: str, silence_s: float) -> AsyncGenerator[list[bytes]]:
        """One subscription, until it breaks. Raises RedisAway."""
        try:
            async with self._redis.pubsub() as pubsub:
                await _reply(pubsub.subscribe(channel))
                is_probed = False
                while True:
                    patience_s = _TIMEOUT_S if is_probed else silence_s
                    message = await _reply(pubsub.get_message(timeout=patience_s))
                    if message is None:
                        if is_probed:
                            raise TimeoutError(f"no answer in {patience_s} s")
                        await _reply(pubsub.ping())
                        is_probed = True
                        continue
                    is_probed = False
                    came: list[bytes] = []
                    while message is not None and len(came) < _MAX_AT_ONCE:
                        if message["type"] == "message":
                            came.append(message["data"])
                        message = await _reply(pubsub.get_message(timeout=0.0))
                    yield came
        except _ERRORS as error:
            raise _away(error) from error

    async def close(self) -> None:
        """Close the connections."""
        with suppress(*_ERRORS):
            await self._redis.aclose()


@asynccontextmanager
async def answering_redis(
    url: str, cluster: str, secret: ClusterSecret = NO_SECRET
) -> AsyncIterator[RedisClient]:
    """A client for commands that need Redis: raises StartupFailed if it does not reply."""
    client = RedisClient(url, cluster, secret)
    try:
        await client.run(("PING",))
        yield client
    except RedisAway as error:
        raise StartupFailed(
            f"Redis does not answer: {error}",
            hint="start it, or correct --redis-url (`baton up` without one has a Redis of its own)",
        ) from error
    finally:
        await client.close()


def _away(error: Exception) -> RedisAway:
    return RedisAway(str(error) or type(error).__name__)
