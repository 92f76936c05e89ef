"""Child processes that run together: which are restarted, and when, and how all are stopped.

    started ── ready ──► keep: one that ends, or hangs, is started again ──► stop
`run` is the main coroutine of their parent process. A single child is in child.py.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...core.process.event_loop import StopSignals
from ...core.process.logs import print_line
from .child import Child, Report

_RESTART_S, _RESTART_MAX_S = 0.2, 5.0  # longer each time: a port may not be free at once
_WELL_S = 30.0  # after this uptime, an end counts as the first again


@dataclass(slots=True)
class ChildGroup:
    """`max_ends`: how often one child may end in quick succession before `keep` returns; None: no
    limit."""

    report: Report
    max_ends: int | None = None
    inherits_stderr: bool = False  # if not, a child's log lines go to `report`
    children: list[Child] = field(default_factory=list)

    async def launch(self, name: str, *configs: object) -> Child:
        child = await Child.start(name, configs, self.report, inherits_stderr=self.inherits_stderr)
        self.children.append(child)
        return child

    async def until_ready(self) -> None:
        """Wait until all are ready. Raises StartupFailed if one ends before."""
        await asyncio.gather(*(child.ready for child in self.children))

    def beside(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        """Further coroutines for `keep` to run, by name."""
        return {}

    async def keep(self) -> str:
        """Restart children that end by themselves, or whose event loop hangs. Returns the name of
        one that keeps ending."""
        keepers = {asyncio.create_task(self._keep(child)): child.name for child in self.children}
        for name, coroutine in self.beside().items():
            keepers[asyncio.create_task(coroutine)] = name
        try:
            done, _ = await asyncio.wait(keepers, return_when=asyncio.FIRST_COMPLETED)
            ended = done.pop()
            ended.result()
            return keepers[ended]
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)

    async def _keep(self, child: Child) -> None:
        """Restart one child until it has ended too often in quick succession."""
        num_ends = 0
        while True:
            await child.until_over(self.report)
            num_ends = 1 if time.monotonic() - child.began_s > _WELL_S else num_ends + 1
            if self.max_ends is not None and num_ends > self.max_ends:
                return
            self.report(child.name, f"ended with code {child.process.returncode}: restarting")
            await asyncio.sleep(min(_RESTART_S * (num_ends - 1), _RESTART_MAX_S))
            child = await self._start_again(child)

    async def _start_again(self, child: Child) -> Child:
        """The child's replacement, or `child` itself as if it had ended again, if this host is out
        of descriptors, processes or memory, perhaps temporarily."""
        await child.close()
        try:
            again = await self.launch(child.name, *child.configs_again())
        except OSError as error:
            self.report(child.name, f"cannot be started: {error}")
            child.began_s = time.monotonic()
            return child
        self.children.remove(child)
        return again

    def hurry(self) -> None:
        """While children are being stopped: stop all that are left now, in no order."""
        for child in self.children:
            child.request_stop()

    async def end(self, children: Sequence[Child], grace_s: float) -> None:
        """Stop these children, all at once; those that do not end within `grace_s` are killed."""
        for child in children:
            child.request_stop()
        for child in children:
            try:
                async with asyncio.timeout(grace_s):
                    await child.process.wait()
            except TimeoutError:
                child.process.kill()
                await child.process.wait()
            await child.close()
            self.children.remove(child)


K = TypeVar("K", bound=ChildGroup)


async def run(
    group: K,
    running: AbstractAsyncContextManager[object],
    announce: Callable[[K], Awaitable[None]],
) -> int:
    """Enter `running`, which starts the group, announce and keep the group, and exit on SIGINT or
    SIGTERM; a second signal hurries the exit. Returns the exit code."""
    signals = StopSignals()
    hurrying = asyncio.create_task(_hurry(signals, group))
    starting = asyncio.create_task(running.__aenter__())
    stopping = asyncio.create_task(signals.stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
        return 130
    await starting
    try:
        await announce(group)
        ended = asyncio.create_task(group.keep())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            print(f"error: {ended.result()} exits repeatedly: giving up", file=sys.stderr)
            print("  try: see its last lines above", file=sys.stderr)
            return 1
        ended.cancel()
        await asyncio.wait({ended})
        print_line("stopping: waiting for requests in flight; Ctrl-C again ends them")
        return 0
    finally:
        await running.__aexit__(None, None, None)
        hurrying.cancel()


async def _hurry(signals: StopSignals, group: ChildGroup) -> None:
    await signals.hurry.wait()
    group.hurry()
