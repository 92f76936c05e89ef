"""When a child's event loop is considered hung, with simulated observations; the wrapping of a
loop, and the parts that it keeps running.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.core.process import event_loop as loop_watch
from baton.core.process.event_loop import LoopWatch, interruptible

PARENT = """
import asyncio
from asyncio.subprocess import DEVNULL, PIPE
from baton.core.process import event_loop

async def main():
    child = await asyncio.create_subprocess_exec(
        *("sh", "-c", "echo heard; echo lost >&2"), stdin=DEVNULL, stdout=PIPE
    )
    said, _ = await child.communicate()
    assert (said, child.returncode) == (b"heard\\n", 0)

event_loop.run(main)
"""


class Child:
    """A child's counter, which is incremented or not before each check of its parent."""

    def __init__(self, watch: LoopWatch) -> None:
        self._fd = watch.fd
        self._count = 0

    def turn(self) -> None:
        self._count += 1
        os.pwrite(self._fd, self._count.to_bytes(8, "little"), 0)


async def looks_until_hung(watch: LoopWatch, before: Callable[[int], None]) -> int:
    """The number of checks until the loop counts as hung; 1000 are an error."""
    num_looks = 0

    async def sleep(seconds: float) -> None:
        nonlocal num_looks
        before(num_looks)
        num_looks += 1
        if num_looks == 1000:
            raise TimeoutError

    await watch.until_hung(sleep)
    return num_looks


async def test_one_that_stands_still_is_hung_within_two_seconds() -> None:
    with LoopWatch() as watch:
        child = Child(watch)
        found = await looks_until_hung(watch, lambda look: child.turn() if look < 50 else None)
        assert 50 + 15 <= found <= 50 + 19


async def test_one_that_starts_counts_slowly_or_fails_to_count_once_is_not_hung() -> None:
    with LoopWatch() as watch:
        child = Child(watch)
        with pytest.raises(TimeoutError):
            await looks_until_hung(watch, lambda look: None)
        with pytest.raises(TimeoutError):
            await looks_until_hung(watch, lambda look: child.turn() if look % 18 == 0 else None)


async def test_a_node_has_more_time() -> None:
    with LoopWatch(30.0) as watch:
        child = Child(watch)
        found = await looks_until_hung(watch, lambda look: child.turn() if look < 1 else None)
        assert 290 <= found <= 300


async def test_the_child_counts_in_the_file_that_was_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_watch, "_TURN_S", 0.001)
    with LoopWatch() as watch:
        monkeypatch.setattr(os, "environ", dict(watch.environment))
        turning = asyncio.create_task(loop_watch.show_turns())
        seen = set()
        while len(seen) < 3:
            await asyncio.sleep(0.001)
            seen.add(os.pread(watch.fd, 8, 0))
        turning.cancel()
        assert not os.environ, "or its own children would take it for theirs"


@pytest.mark.parametrize("number", ["", "0", "99999", "-1", "x"])
async def test_nothing_is_written_where_no_parent_watches(
    number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_LOOP_WATCH_FD", number)
    async with asyncio.timeout(1):
        await loop_watch.show_turns()


def test_ctrl_c_ends_what_a_coroutine_does_on_the_main_thread() -> None:
    handlers = []

    async def work() -> None:
        with interruptible():
            pass
        handlers.append(signal.getsignal(signal.SIGINT))
        try:
            with interruptible():
                os.kill(os.getpid(), signal.SIGINT)
                handlers.append("it went on")
        finally:
            handlers.append(signal.getsignal(signal.SIGINT))

    with pytest.raises(KeyboardInterrupt):
        loop_watch.run(work)
    first, last = handlers
    assert first is last is not signal.default_int_handler, "the loop's own is back"


def test_a_thread_beside_the_main_one_has_no_ctrl_c() -> None:
    before = signal.getsignal(signal.SIGINT)

    def work() -> None:
        with interruptible():
            assert signal.getsignal(signal.SIGINT) is before

    with ThreadPoolExecutor() as threads:
        threads.submit(work).result()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_process_without_standard_streams_has_children(closed: str) -> None:
    start = f'exec "$0" -c "$1" {closed}'
    assert subprocess.run(["sh", "-c", start, sys.executable, PARENT]).returncode == 0


class Part:
    """Raises `errors` one after the other, and then waits."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = [*errors]
        self.breaks, self.waits = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        self.breaks.set()
        if self._errors:
            error = self._errors.pop(0)
            if error.args == ("elsewhere",):  # another line of code
                raise error
            raise error
        self.waits.set()
        await asyncio.Event().wait()


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watch, "AGAIN_S", 0.0)


@pytest.mark.usefixtures("no_pause")
async def test_a_part_that_breaks_begins_again_and_each_kind_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    part = Part(*map(KeyError, range(5)), ValueError(), KeyError("elsewhere"), KeyError(5))
    running = asyncio.create_task(loop_watch.keep_running("the part", part.run))
    async with asyncio.timeout(5):
        await part.waits.wait()
    found = [type(line.exc_info[1]) for line in caplog.records if line.exc_info]
    assert found == [KeyError, ValueError, KeyError]
    assert all("the part" in line.message for line in caplog.records)
    running.cancel()
    await asyncio.wait({running}, timeout=5)
    assert running.cancelled()


@pytest.mark.usefixtures("no_pause")
async def test_of_a_group_of_errors_the_first_says_the_kind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A group of errors counts as its first error's kind: a TaskGroup raises all its tasks' errors
    at one place, as one kind."""
    kinds = (KeyError, KeyError, ValueError)
    part = Part(*(ExceptionGroup("", [ExceptionGroup("", [kind()])]) for kind in kinds))
    running = asyncio.create_task(loop_watch.keep_running("the part", part.run))
    async with asyncio.timeout(5):
        await part.waits.wait()
    assert len(caplog.records) == 2
    running.cancel()
    await asyncio.wait({running}, timeout=5)


async def test_a_cancel_between_two_tries_ends_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watch, "AGAIN_S", 1000.0)
    part = Part(ValueError())
    running = asyncio.create_task(loop_watch.keep_running("the part", part.run))
    async with asyncio.timeout(5):
        await part.breaks.wait()
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running}, timeout=5)
    assert running.cancelled() and not part.waits.is_set()


async def test_a_part_that_ends_in_order_is_over() -> None:
    async def run() -> None: ...

    async with asyncio.timeout(5):
        await loop_watch.keep_running("the part", run)
