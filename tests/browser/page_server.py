"""The page's server, on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web
from browser.synthetic import SyntheticGateway


class PageServer:
    """A synthetic gateway that listens; it can be stopped and started on the same port."""

    def __init__(self, gateway: SyntheticGateway, rps: float | None) -> None:
        self.gateway = gateway
        self.port = 0
        self._rps = rps
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner: web.AppRunner | None = None

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.origin}/dashboard"

    def start(self) -> None:
        self._call(self._start())

    def stop(self) -> None:
        if self._runner is not None:
            self._call(self._runner.cleanup())
            self._runner = None

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def do(self, act: Callable[[], None]) -> None:
        """Run a change of the gateway on its own thread."""

        async def acting() -> None:
            act()

        self._call(acting())

    async def _start(self) -> None:
        app = self.gateway.app(self._rps)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    def _call(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=20)
