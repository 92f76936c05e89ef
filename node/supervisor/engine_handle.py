"""The supervisor's side of an engine process: its start, frames, end and replacement.

    members, orders ──► frames ──► engine process
    ledgers, journal, heartbeat ◄── frames ◄──┘

The first start must succeed, or the node does not start. Restarts are tried without limit: 0.5 s
after the first end, doubling to 60 s, and 0.5 s again after a minute of health. A restart that
takes several times as long as the first start is ended, and the next one may take twice as long.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from ...core.channels.frames import LENGTH_BYTES, decode_length, encode_payload
from ...core.config import NodeConfig
from ...core.errors import BatonError, NodeLost, StartupFailed
from ...core.ports import Clock
from ...core.process.children import bound_to_us
from ...prefix_index.journal import CacheJournal
from ...prefix_index.messages import split_hashes
from ...proto import codec
from ...proto.v1 import engine_pb2

HEARTBEATS_MISSED = 6  # without a heartbeat for so many intervals: not progressing
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 60.0
HEALTHY_S = 60.0
HUNG_S = 30.0  # no heartbeat for this long: a hang, the process is replaced
_SILENT_LOOKS = 10  # polls in this time, all without a heartbeat
START_S, SLOWER = 120.0, 5.0  # limits of a restart: seconds, multiple of the first start
KILLED_S = 10.0  # a process that was killed may take this long to end


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """How to start an engine process: a module with a main, its configuration and environment.

    `node`: the node's configuration for this engine; `device`: as given, or empty.
    """

    module: str
    configuration: str = field(repr=False)  # JSON with the keys, the first frame
    environment: Mapping[str, str]
    node: NodeConfig
    device: str = ""


@dataclass(eq=False)
class EngineHandle:
    """One engine process from its start to its end. Made by `start_engine`."""

    _process: asyncio.subprocess.Process
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    ready: engine_pb2.Ready
    command: EngineCommand
    _clock: Clock
    _ledgers: deque[asyncio.Future[str]] = field(default_factory=deque)  # asked for, in order
    _failure: BatonError | None = None
    _lost: NodeLost | None = None  # set once the frames have ended

    def __post_init__(self) -> None:
        self.incarnation = self.ready.welcome.incarnation
        self.cache_journal = CacheJournal(self.incarnation)
        self._last_heartbeat_s = self._clock.monotonic_s()

    @property
    def is_over(self) -> bool:
        """Whether the process has ended, or is about to."""
        return self._lost is not None

    @property
    def silent_s(self) -> float:
        """Seconds since its last heartbeat."""
        return self._clock.monotonic_s() - self._last_heartbeat_s

    @property
    def is_progressing(self) -> bool:
        limit_s = HEARTBEATS_MISSED * self.command.node.heartbeat_s
        return not self.is_over and self.silent_s < limit_s

    def send(self, message: engine_pb2.EngineInput) -> None:
        """Queue a frame. It is lost if the process is gone, which `run` detects."""
        if not self._writer.is_closing():
            self._writer.write(encode_payload(message.SerializeToString()))

    async def run(self, on_over: Callable[[], None] = lambda: None) -> BatonError | None:
        """Route frames until the process has ended; returns why, or None after an orderly end.

        `on_over` is called at the end of the frames: the process may end later.
        """
        try:
            while (payload := await read_frame(self._reader)) is not None:
                self._route(engine_pb2.EngineOutput.FromString(payload))
        finally:
            self._end_queries()
            on_over()
        self._writer.close()
        code = await self._process.wait()
        if self._failure is None and code != 0:
            return NodeLost(f"the engine process ended with {_describe(code)}")
        return self._failure

    def _route(self, message: engine_pb2.EngineOutput) -> None:
        match message.WhichOneof("body"):
            case "heartbeat":
                self._last_heartbeat_s = self._clock.monotonic_s()
            case "ledger":
                future = self._ledgers.popleft()
                if not future.done():  # cancelled, perhaps just now
                    future.set_result(message.ledger)
            case "cache_changes":
                changes = message.cache_changes
                lists = (changes.removed, changes.stored, changes.in_host)
                self.cache_journal.record(*map(split_hashes, lists))
            case "failed":
                self._failure = codec.error_from_wire(message.failed)

    def _end_queries(self) -> None:
        lost = self._lost = NodeLost("the engine process ended")
        for future in self._ledgers:
            if not future.done():
                future.set_exception(lost)

    async def ledger(self) -> str:
        """The engine's ledger as JSON. Raises NodeLost if the engine ends before it is received."""
        if self._lost:
            raise self._lost
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ledgers.append(future)
        self.send(engine_pb2.EngineInput(get_ledger=True))
        return await future

    # -- end -----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Accept no new requests; the process ends by itself once it has none left."""
        self.send(engine_pb2.EngineInput(drain=True))

    def shut_down(self) -> None:
        self.send(engine_pb2.EngineInput(shutdown=True))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


async def start_engine(
    command: EngineCommand, report: Callable[[str], None], clock: Clock
) -> EngineHandle:
    """Start an engine process and wait until it is ready; `report` gets its progress lines.

    Raises StartupFailed with the engine's own text, or the system's. A cancel kills the process.
    """
    try:
        process, ours = await _spawn(command)
    except OSError as error:  # out of descriptors, processes or memory, perhaps temporarily
        raise StartupFailed(f"the engine process cannot be started: {error}") from error
    reader, writer = await asyncio.open_connection(sock=ours)
    first = engine_pb2.EngineInput(configure=command.configuration)
    writer.write(encode_payload(first.SerializeToString()))
    try:
        ready = await _wait_ready(reader, process, report)
    except BaseException:  # also if cancelled: nothing else would end the process
        writer.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):  # it may be blocked in the kernel
            await asyncio.wait_for(process.wait(), KILLED_S)
        raise
    return EngineHandle(process, reader, writer, ready, command, clock)


async def _spawn(command: EngineCommand) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """The process, and this process's end of its socket. Raises OSError."""
    ours, theirs = socket.socketpair()
    argv = [sys.executable, "-m", command.module, str(theirs.fileno())]
    with contextlib.ExitStack() as unless_it_runs, theirs:
        unless_it_runs.enter_context(ours)
        process = await asyncio.create_subprocess_exec(
            *bound_to_us(argv, signal.SIGKILL),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **command.environment},
        )
        unless_it_runs.pop_all()
    return process, ours


async def _wait_ready(
    reader: asyncio.StreamReader,
    process: asyncio.subprocess.Process,
    report: Callable[[str], None],
) -> engine_pb2.Ready:
    while (payload := await read_frame(reader)) is not None:
        message = engine_pb2.EngineOutput.FromString(payload)
        match message.WhichOneof("body"):
            case "progress":
                report(message.progress)
            case "ready":
                return message.ready
            case "failed":
                cause, _, hint = message.failed.message.partition("\n")
                raise StartupFailed(cause, hint=hint)
    code = await process.wait()
    raise StartupFailed(f"the engine process ended with {_describe(code)} while it was starting")


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next payload; None at the end of the stream, also after a failed write."""
    try:
        length = decode_length(await reader.readexactly(LENGTH_BYTES))
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _describe(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


@dataclass(eq=False)
class EngineSlot:
    """Holds the current engine.

    `_on_change` is called whenever it starts or ends; `_presence` is entered while it runs: its
    entries in the directory and the prefix index.
    """

    _command: EngineCommand
    _report: Callable[[str], None]
    _on_change: Callable[[], None]
    _presence: Callable[[EngineHandle], AbstractAsyncContextManager[None]]
    _clock: Clock
    engine: EngineHandle | None = None
    _is_stopping: bool = False
    _most_start_s: float = START_S

    @property
    def is_ready(self) -> bool:
        return self.engine is not None and self.engine.is_progressing

    async def start(self) -> None:
        """The first start. Raises StartupFailed."""
        began_s = self._clock.monotonic_s()
        self._replace(await self._start_engine())
        self._most_start_s = max(START_S, SLOWER * (self._clock.monotonic_s() - began_s))

    async def run(self) -> None:
        """Keep an engine in the slot until `stop`; call after `start`."""
        delay_s = FIRST_DELAY_S
        while True:
            if await self._live() >= HEALTHY_S:
                delay_s = FIRST_DELAY_S
            if self._is_stopping:
                return
            self._report(f"starting the engine again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)
            try:
                async with asyncio.timeout(self._most_start_s):
                    self._replace(await self._start_engine())
            except StartupFailed as failure:
                self._report(f"the engine did not start: {failure.message}")
            except TimeoutError:
                self._report(f"the engine did not start within {self._most_start_s:.0f} s")
                self._most_start_s *= 2

    async def _start_engine(self) -> EngineHandle:
        return await start_engine(self._command, self._report, self._clock)

    def _replace(self, engine: EngineHandle | None) -> None:
        self.engine = engine
        self._on_change()

    async def _live(self) -> float:
        """Run the current engine, if any, to its end; returns how long it lived."""
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
        """Run the engine; returns why it ended. An engine without heartbeats is killed.

        If this process itself was suspended, the engine's heartbeats are still unread: that counts
        as one poll, however long it took.
        """
        running = asyncio.create_task(engine.run(self._on_change))
        look_s, num_silent = HUNG_S / _SILENT_LOOKS, 0
        while not (await asyncio.wait({running}, timeout=look_s))[0]:
            num_silent = num_silent + 1 if engine.silent_s > look_s else 0
            if num_silent >= _SILENT_LOOKS:
                self._report(f"engine silent for {engine.silent_s:.0f} s: ending it")
                engine.kill()
        return running.result()

    def drain(self, running: asyncio.Task[None]) -> None:
        """Accept no new requests; the engine ends once it has none, and is not replaced. Then
        `running`, the task of `run`, ends too."""
        self._is_stopping = True
        if self.engine is None:
            running.cancel()  # between two engines: it waits or starts one
        else:
            self.engine.drain()

    async def stop(self, running: asyncio.Task[None], grace_s: float) -> None:
        """End the engine and the task of `run`: by a shutdown, then by force."""
        self.drain(running)
        for order, wait_s in ((EngineHandle.shut_down, grace_s), (EngineHandle.kill, KILLED_S)):
            if self.engine is not None and not running.done():
                order(self.engine)
                await asyncio.wait({running}, timeout=wait_s)
        if self.engine is not None and not running.done():
            self._report("the engine process does not end after SIGKILL")
            running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
