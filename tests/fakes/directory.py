"""A directory in memory: a fake of core.ports.Directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from baton.core.membership import Member


class FakeDirectory:
    """Entries stay until withdrawn: the time to live is not simulated."""

    is_away = False

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._changed = asyncio.Condition()

    async def announce(self, member: Member, ttl_s: float) -> None:
        self._members[member.incarnation] = member
        await self._tell()

    async def withdraw(self, incarnation: str) -> None:
        self._members.pop(incarnation, None)
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def watch(self) -> AsyncIterator[tuple[Member, ...]]:
        seen: tuple[Member, ...] | None = None
        while True:
            async with self._changed:
                while (members := tuple(self._members.values())) == seen:
                    await self._changed.wait()
            seen = members
            yield members

    async def close(self) -> None:
        pass
