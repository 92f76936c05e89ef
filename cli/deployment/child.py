"""One part of a deployment as a child process: its start, the lines that it prints, its end.

A child prints one line `ready: <role> <name> <addresses>` when it can serve. Its lines go to
`report`; a gateway's startup lines are also kept, to be printed once all is ready. The children of
a deployment are chosen in deployment.py and gateways.py, and restarted in child_group.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ...core import flags
from ...core.config import GatewayConfig
from ...core.errors import StartupFailed
from ...core.process.children import bound_to_us
from ...core.process.event_loop import HUNG_S, LoopWatch
from ...gateway.process.startup_message import READY, TRY

GATEWAY = "gateway"

_NODE_HUNG_S = 30.0  # as for engines; gateways avoid a hung node long before
_CAUSE, _HINT = "error: ", "  try: "  # how launch.py reports a failure
_MAX_LINE_BYTES = 1 << 20

# A part that is stopped during its imports ends by the signal, not with a traceback.
_PART = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
from baton.cli.launch import {role}
sys.exit({role}())
"""

Report = Callable[[str, str], None]  # (name of the child, one line)


@dataclass(slots=True)
class Child:
    """`ready`: its gRPC address; `addresses`: all those of its ready line, empty before that."""

    name: str
    configs: tuple[object, ...]
    process: asyncio.subprocess.Process
    watch: LoopWatch
    ready: asyncio.Future[str]
    began_s: float = field(default_factory=time.monotonic)
    reader: asyncio.Task[None] | None = None
    addresses: list[str] = field(default_factory=list)
    last_lines: list[str] = field(default_factory=list)
    startup_lines: list[str] = field(default_factory=list)
    are_startup_lines_complete: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    async def start(
        cls,
        name: str,
        configs: tuple[object, ...],
        report: Report,
        *,
        inherits_stderr: bool = False,
    ) -> Child:
        """Start launch_<role>, where the role is the first part of `name`."""
        role = role_of(name)
        argv = [
            flag
            for config in configs
            for flag in flags.to_argv(config, leave_out=flags.SECRET_FIELDS)
        ]
        watch = LoopWatch(HUNG_S if role == GATEWAY else _NODE_HUNG_S)
        command = [sys.executable, "-c", _PART.format(role=role), *argv]
        try:
            process = await asyncio.create_subprocess_exec(
                *bound_to_us(command, signal.SIGTERM),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=None if inherits_stderr else asyncio.subprocess.STDOUT,
                env=flags.environment_without(configs)
                | {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
                | flags.to_environment(configs)
                | watch.environment,
                pass_fds=[watch.fd],
                start_new_session=True,  # Ctrl-C reaches the parent only, which stops the parts
                limit=_MAX_LINE_BYTES,
            )
        except BaseException:  # also if cancelled
            watch.close()
            raise
        ready = asyncio.get_running_loop().create_future()
        child = cls(name, configs, process, watch, ready)
        child.reader = asyncio.create_task(child._read(report))
        return child

    async def _read(self, report: Report) -> None:
        """Report its lines until it ends, and evaluate its ready line."""
        assert self.process.stdout is not None
        async for line in lines_of(self.process.stdout):
            self.last_lines = [*self.last_lines[-9:], line]
            if line.startswith("ready: ") and not self.ready.done():
                self.addresses = line.split()[3:]
                self.ready.set_result(self.addresses[-1])
            if line.startswith((READY, TRY)):
                self.startup_lines.append(line)
            with contextlib.suppress(OSError, ValueError):  # keep emptying the pipe
                report(self.name, line)
            if line.startswith(TRY):
                self.are_startup_lines_complete.set()
        self.are_startup_lines_complete.set()
        await self.process.wait()
        if not self.ready.done():
            self.ready.set_exception(self.failure())

    def request_stop(self) -> None:
        """Send SIGINT, or SIGTERM if it is not ready: a starting interpreter would print a
        traceback for SIGINT."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGINT if self.addresses else signal.SIGTERM)

    async def until_over(self, report: Report) -> None:
        """Wait until its process has ended; if its event loop hangs, the process is killed."""
        ended = asyncio.create_task(self.process.wait())
        hung = asyncio.create_task(self.watch.until_hung())
        try:
            await asyncio.wait({ended, hung}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                stood_s = self.watch.hung_s
                report(self.name, f"its event loop was blocked for {stood_s:g} s: killed")
                self.process.kill()
                await self.process.wait()
        finally:
            ended.cancel()
            hung.cancel()

    async def close(self) -> None:
        """Call once its process has ended: reads its last lines."""
        self.watch.close()
        if self.reader is not None:
            await self.reader
        if self.ready.done():
            with contextlib.suppress(StartupFailed, asyncio.CancelledError):
                self.ready.result()  # else asyncio logs an exception that was never retrieved

    def failure(self) -> StartupFailed:
        """The error and hint that it printed, if any; else its exit code and last lines."""
        lines = self.last_lines
        causes = [number for number, line in enumerate(lines) if line.startswith(_CAUSE)]
        if causes:
            cause, after = lines[causes[-1]], "".join(lines[causes[-1] + 1 : causes[-1] + 2])
            hint = after.removeprefix(_HINT) if after.startswith(_HINT) else ""
            return StartupFailed(f"{self.name}: {cause.removeprefix(_CAUSE)}", hint=hint)
        message = "; its last lines:\n  " + "\n  ".join(lines) if lines else " without a message"
        return StartupFailed(f"{self.name} ended with code {self.process.returncode}{message}")

    def configs_again(self) -> tuple[object, ...]:
        """Its configurations for a restart; a gateway's with the ports that its clients use."""
        ports = [int(address.rpartition(":")[2]) for address in reversed(self.addresses)]
        names = ("grpc_port", "http_port", "own_http_port")
        found: dict[str, Any] = dict(zip(names, ports, strict=False))
        return tuple(
            replace(config, **found) if isinstance(config, GatewayConfig) else config
            for config in self.configs
        )


def role_of(name: str) -> str:
    """The role in a child's name: `prefill` for `prefill-0`."""
    return name.partition("-")[0]


async def lines_of(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines until the end. One that is too long is replaced: unread, it would block the child."""
    while True:
        try:
            raw = await stream.readline()
        except ValueError:
            raw = b"(a line that is too long to be shown)\n"
        if not raw:
            return
        yield raw.decode(errors="replace").rstrip()
