"""One place for an engine on a node: starts it, replaces it when it dies, with growing patience.

The first start must succeed, or the node does not start. Later ones are tried for ever: 0.5 s after
the first death, doubling to 60 s, and from the beginning after a minute of health.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress

from ...core.errors import BatonError, StartupFailed
from ...core.ports import Clock
from .engine_handle import EngineCommand, EngineHandle, start_engine

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 60.0
HEALTHY_S = 60.0
HUNG_S = 30.0  # no heartbeat for so long: not a pause, the process is replaced


class Backoff:
    """How long to wait before the next start."""

    def __init__(self) -> None:
        self._delay_s = FIRST_DELAY_S

    def after(self, lived_s: float) -> float:
        """The delay after an engine that lived for `lived_s`."""
        if lived_s >= HEALTHY_S:
            self._delay_s = FIRST_DELAY_S
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, LONGEST_DELAY_S)
        return delay_s


class EngineSlot:
    """Holds the engine of the moment.

    `on_change` is called whenever it comes or goes; `presence` is entered while it lives: what
    others are told of it.
    """

    def __init__(
        self,
        command: EngineCommand,
        report: Callable[[str], None],
        on_change: Callable[[], None],
        presence: Callable[[EngineHandle], AbstractAsyncContextManager[None]],
        clock: Clock,
    ) -> None:
        self.engine: EngineHandle | None = None
        self._command = command
        self._report = report
        self._on_change = on_change
        self._presence = presence
        self._clock = clock
        self._is_stopping = False

    @property
    def is_ready(self) -> bool:
        return self.engine is not None and self.engine.is_progressing

    async def start(self) -> None:
        """The first start. Raises StartupFailed."""
        self._replace(await self._start_engine())

    async def run(self) -> None:
        """Keep an engine in the slot until `stop`; call after `start`."""
        backoff = Backoff()
        while True:
            lived_s = await self._live()
            if self._is_stopping:
                return
            delay_s = backoff.after(lived_s)
            self._report(f"starting the engine again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            try:
                self._replace(await self._start_engine())
            except StartupFailed as failure:
                self._report(f"the engine did not start: {failure.message}")

    async def _start_engine(self) -> EngineHandle:
        return await start_engine(self._command, self._report, self._clock)

    def _replace(self, engine: EngineHandle | None) -> None:
        self.engine = engine
        self._on_change()

    async def _live(self) -> float:
        """Run the engine of the moment to its end, if there is one; returns how long it lived."""
        if self.engine is None:
            return 0.0
        started_s = self._clock.monotonic_s()
        async with self._presence(self.engine):
            error = await self._run_engine(self.engine)
            self._replace(None)
        if not self._is_stopping:
            self._report(f"engine lost: {error.message if error else 'the process ended'}")
        return self._clock.monotonic_s() - started_s

    async def _run_engine(self, engine: EngineHandle) -> BatonError | None:
        """Why it ended; a process that went silent is ended."""
        running = asyncio.create_task(engine.run(self._on_change))
        while not (await asyncio.wait({running}, timeout=HUNG_S / 10))[0]:
            if engine.silent_s > HUNG_S:
                self._report(f"engine silent for {engine.silent_s:.0f} s: ending it")
                engine.kill()
        return running.result()

    def drain(self) -> None:
        """Take nothing new; the engine ends when it holds nothing, and is not replaced."""
        self._is_stopping = True
        if self.engine is not None:
            self.engine.drain()

    async def stop(self, running: asyncio.Task[None], grace_s: float) -> None:
        """End the engine and the task of `run`: told to, then killed."""
        self._is_stopping = True
        if self.engine is None:
            running.cancel()  # between two lives: nothing to end but the waiting
        for order in (EngineHandle.shut_down, EngineHandle.kill):
            if self.engine is not None and not running.done():
                order(self.engine)
                await asyncio.wait({running}, timeout=grace_s)
        with suppress(asyncio.CancelledError):
            await running
