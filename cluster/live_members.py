"""The engines that the directory lists now, kept in memory: what a node asks about its callers."""

from __future__ import annotations

import asyncio

from ..core.ports import Directory

_WAIT_S = 1.0  # an engine may dial a moment before its entry is seen


class LiveMembers:
    """`run` follows the directory until cancelled."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._incarnations: frozenset[str] = frozenset()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        async for members in self._directory.watch():
            self._incarnations = frozenset(member.incarnation for member in members)
            self._changed.set()
            self._changed = asyncio.Event()

    async def has(self, incarnation: str) -> bool:
        """Whether the engine is listed, or is within a second.

        While Redis is away nobody can be: then who holds the cluster's key is believed.
        """
        try:
            async with asyncio.timeout(_WAIT_S):
                while incarnation not in self._incarnations:
                    if self._directory.is_away:
                        return True
                    await self._changed.wait()
        except TimeoutError:
            return self._directory.is_away
        return True
