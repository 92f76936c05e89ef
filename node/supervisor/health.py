"""The node's health as gRPC's health service tells it: ready means that every engine gets on.

A death is told at once; silence is found by looking. Knows no engine: it asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]

SERVICES = ("", "baton.v1.Node")


class NodeHealth:
    """Keeps `servicer` up to date with what `is_ready` says."""

    def __init__(self, is_ready: Callable[[], bool], look_s: float) -> None:
        self.servicer = health_aio.HealthServicer()
        self.changed = asyncio.Event()  # look now
        self._is_ready = is_ready
        self._look_s = look_s

    async def run(self) -> None:
        """Until cancelled."""
        told: bool | None = None
        while True:
            is_ready = self._is_ready()
            if is_ready != told:
                told = is_ready
                await self._tell(is_ready)
            try:
                async with asyncio.timeout(self._look_s):
                    await self.changed.wait()
            except TimeoutError:
                continue
            self.changed.clear()

    async def _tell(self, is_ready: bool) -> None:
        answer = health_pb2.HealthCheckResponse
        for service in SERVICES:
            await self.servicer.set(service, answer.SERVING if is_ready else answer.NOT_SERVING)
