"""A slot between two lives of its engine: what ends it, and what only delays the next start."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fakes.clock import FakeClock

from baton.core.config import NodeConfig
from baton.core.errors import StartupFailed
from baton.core.process.children import bound_to_us
from baton.node.supervisor import engine_handle
from baton.node.supervisor.engine_handle import (
    EngineCommand,
    EngineHandle,
    EngineSlot,
    start_engine,
)

COMMAND = EngineCommand("baton.none", "{}", {}, NodeConfig())


class FakeEngine:
    """`EngineHandle` that ends when the test or an order ends it."""

    incarnation, silent_s, is_progressing = "a" * 32, 0.0, True

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.orders: list[str] = []

    async def run(self, on_over: Callable[[], None]) -> None:
        await self.over.wait()
        on_over()

    def drain(self) -> None:
        self.orders.append("drain")
        self.over.set()

    def kill(self) -> None:
        self.orders.append("kill")
        self.over.set()


class World:
    """A slot whose engines start once `may_start` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.printed: list[str] = []
        self.engines: list[FakeEngine] = []
        self.failures: list[StartupFailed] = []  # raised by the next starts
        self.may_start, self.may_leave = asyncio.Event(), asyncio.Event()
        self.may_start.set()
        self.may_leave.set()
        self.num_cut_off = 0  # starts that were cancelled
        self.num_left = 0
        monkeypatch.setattr(engine_handle, "start_engine", self._start)
        self.clock = FakeClock()
        self.slot = EngineSlot(
            COMMAND, self.printed.append, lambda: None, self._presence, self.clock
        )

    async def _start(self, *_: Any) -> Any:
        try:
            await self.may_start.wait()
        except asyncio.CancelledError:
            self.num_cut_off += 1
            raise
        if self.failures:
            raise self.failures.pop()
        self.engines.append(FakeEngine())
        return self.engines[-1]

    @asynccontextmanager
    async def _presence(self, _: Any) -> AsyncIterator[None]:
        yield
        await self.may_leave.wait()
        self.num_left += 1

    async def begin(self) -> asyncio.Task[None]:
        await self.slot.start()
        running = asyncio.create_task(self.slot.run())
        await turns()
        return running


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


async def turns() -> None:
    """Let everything happen that needs no further event."""
    for _ in range(20):
        await asyncio.sleep(0)


async def end_of(running: asyncio.Task[None]) -> None:
    done, _ = await asyncio.wait({running}, timeout=0.2)
    assert done, "the slot goes on"


async def test_the_delay_doubles_up_to_a_limit_and_begins_anew_after_a_minute_of_health(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_handle, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(engine_handle, "LONGEST_DELAY_S", 0.006)
    running = await world.begin()
    for number, lived_s in enumerate((1.0, 1.0, 59.0, 1.0, 1.0, 60.0, 1.0)):
        while len(world.engines) <= number:
            await asyncio.wait({running}, timeout=0.001)
        world.clock.advance(lived_s)
        world.engines[number].over.set()
        await turns()
    delays = [line for line in world.printed if line.startswith("starting the engine again in")]
    in_ms = [round(1000 * float(line.split()[-2])) for line in delays]
    assert in_ms == [1, 2, 4, 6, 6, 1, 2]
    world.slot.drain(running)
    await asyncio.wait({running})


async def test_an_engine_that_drains_is_not_replaced(world: World) -> None:
    running = await world.begin()
    world.slot.drain(running)
    await end_of(running)
    assert world.engines[0].orders == ["drain"] and len(world.engines) == world.num_left == 1


async def test_a_slot_that_waits_for_its_next_start_drains_at_once(world: World) -> None:
    running = await world.begin()
    world.engines[0].over.set()
    await turns()
    assert world.printed[-1] == "starting the engine again in 0.5 s"
    world.slot.drain(running)
    await end_of(running)
    assert len(world.engines) == 1


async def test_an_engine_that_is_being_started_is_not_wanted_by_a_slot_that_drains(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_handle, "FIRST_DELAY_S", 0.0)
    running = await world.begin()
    world.may_start.clear()
    world.engines[0].over.set()
    await turns()
    world.slot.drain(running)
    await end_of(running)
    assert world.num_cut_off == len(world.engines) == 1


async def test_an_engine_that_hangs_while_it_starts_again_is_ended_and_tried_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_handle, "FIRST_DELAY_S", 0.0)
    monkeypatch.setattr(engine_handle, "START_S", 0.05)
    running = await world.begin()
    world.may_start.clear()
    world.engines[0].over.set()
    while world.num_cut_off < 3:
        await asyncio.wait({running}, timeout=0.01)
    await turns()
    assert "the engine did not start within 0 s" in world.printed
    assert world.slot._most_start_s == 8 * 0.05, "each may take twice as long as the last"
    world.may_start.set()
    while len(world.engines) == 1:
        await asyncio.wait({running}, timeout=0.01)
    assert world.slot.is_ready
    world.slot.drain(running)
    await end_of(running)


async def test_a_process_that_cannot_be_killed_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stuck:
        async def wait(self) -> int:
            await asyncio.Event().wait()
            return 0

        def kill(self) -> None:
            pass

    ours, theirs = socket.socketpair()

    async def spawn(_: EngineCommand) -> Any:
        return Stuck(), ours

    monkeypatch.setattr(engine_handle, "_spawn", spawn)
    monkeypatch.setattr(engine_handle, "KILLED_S", 0.05)
    with theirs, pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await start_engine(COMMAND, print, FakeClock())


async def test_a_slot_stops_without_a_process_that_cannot_be_killed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_handle, "KILLED_S", 0.01)
    running = await world.begin()
    engine = world.engines[0]
    for order in ("shut_down", "kill"):
        monkeypatch.setattr(EngineHandle, order, lambda it, order=order: it.orders.append(order))
    monkeypatch.setattr(FakeEngine, "drain", lambda it: it.orders.append("drain"))
    async with asyncio.timeout(5):
        await world.slot.stop(running, grace_s=0.01)
    assert engine.orders == ["drain", "shut_down", "kill"]
    assert running.done() and "does not end after SIGKILL" in world.printed[-1]


async def test_an_engine_that_has_just_ended_leaves_the_directory_all_the_same(
    world: World,
) -> None:
    running = await world.begin()
    world.may_leave.clear()
    world.engines[0].over.set()
    await turns()
    world.slot.drain(running)
    await turns()
    world.may_leave.set()
    await end_of(running)
    assert world.num_left == len(world.engines) == 1


@pytest.mark.parametrize("what", ["socket.socketpair", "asyncio.create_subprocess_exec"])
async def test_an_engine_without_descriptors_or_processes_did_not_start(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed spawn counts as a failed start, which is tried again, and leaves no socket open."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(f"baton.node.supervisor.engine_handle.{what}", fail)
    with pytest.raises(StartupFailed, match=r"cannot be started: .* temporarily unavailable"):
        await start_engine(COMMAND, lambda line: None, FakeClock())


async def test_an_engine_ends_with_its_supervisor_while_it_still_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine is bound to its supervisor, as tests/unit/core/test_children.py checks."""
    commands: list[list[str]] = []

    def fail(*command: str, **_: Any) -> Any:
        commands.append([*command])
        raise OSError

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
    with pytest.raises(StartupFailed):
        await start_engine(COMMAND, lambda line: None, FakeClock())
    (command,) = commands
    own = command[command.index("-m") - 1 :]
    assert own[1:3] == ["-m", COMMAND.module]
    assert command == bound_to_us(own, signal.SIGKILL)


async def test_a_start_that_fails_is_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_handle, "FIRST_DELAY_S", 0.0)
    running = await world.begin()
    world.failures.append(StartupFailed("no memory"))
    world.engines[0].over.set()
    await turns()
    assert world.printed[-2:] == [
        "the engine did not start: no memory",
        "starting the engine again in 0 s",
    ]
    assert len(world.engines) == 2 and world.slot.is_ready
    world.slot.drain(running)
    await end_of(running)


async def test_an_engine_that_goes_silent_is_ended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_handle, "HUNG_S", 0.05)
    running = await world.begin()
    world.engines[0].silent_s = 1.0
    while not world.engines[0].orders:
        await asyncio.wait({running}, timeout=0.005)
    await turns()
    assert world.printed == [
        "engine silent for 1 s: ending it",
        "engine lost: the process ended",
        "starting the engine again in 0.5 s",
    ]
    world.slot.drain(running)
    await end_of(running)


async def test_an_engine_is_not_silent_for_as_long_as_its_supervisor_stood_still(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time for which the supervisor itself stood still does not count as silence: with the whole
    host frozen, heartbeats are still on their way."""
    monkeypatch.setattr(engine_handle, "HUNG_S", 0.5)
    running = await world.begin()
    world.engines[0].silent_s = 60.0
    await asyncio.wait({running}, timeout=0.12)
    world.engines[0].silent_s = 0.0
    await asyncio.wait({running}, timeout=0.12)
    assert not world.engines[0].orders
    world.slot.drain(running)
    await end_of(running)
