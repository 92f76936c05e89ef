"""Processes in separate clusters that are announced to each other: each may see another at a
different address.

A process announced as being on another host is dialled by TCP, at the announced address; all run on
this host.
"""

from __future__ import annotations

import dataclasses
import time
from contextlib import AsyncExitStack

from node_driver import SECRET

from baton.cluster.redis_client import RedisClient
from baton.cluster.redis_directory import RedisDirectory
from baton.cluster.secret import ClusterSecret
from baton.core.membership import Member

ANOTHER_HOST = "f" * 32
_TTL_S = 60.0


class Introductions:
    """Announcements between clusters, by name. Closed with `stack`."""

    def __init__(self, redis_url: str, stack: AsyncExitStack) -> None:
        self._redis_url = redis_url
        self._stack = stack
        self._suffix = time.monotonic_ns()
        self._directories: dict[str, RedisDirectory] = {}

    def flags(self, name: str) -> tuple[str, str]:
        """Flags of a process in this cluster."""
        return ("--cluster", f"{name}-{self._suffix}")

    def _directory(self, name: str) -> RedisDirectory:
        if name not in self._directories:
            _, cluster = self.flags(name)
            directory = RedisDirectory(RedisClient(self._redis_url, cluster, ClusterSecret(SECRET)))
            self._stack.push_async_callback(directory.close)
            self._directories[name] = directory
        return self._directories[name]

    async def newcomer(self, name: str) -> Member:
        """The first member of a cluster."""
        async for members in self._directory(name).watch():
            if members:
                return members[0]
        raise AssertionError("the watch ended")

    async def show(self, member: Member, *to: str) -> None:
        """Announce it unchanged: reached by its unix socket."""
        for name in to:
            await self._directory(name).announce(member, _TTL_S)

    async def show_elsewhere(self, member: Member, *to: str) -> None:
        """Announce it as on another host, at the address that it advertises."""
        await self.show(dataclasses.replace(member, host_id=ANOTHER_HOST), *to)
