"""The event loop of a process: its implementation, tasks that are restarted, stop signals, and a
watch for hangs.

    parent  LoopWatch ── a memfd of 8 bytes, by number in the environment ──► child  show_turns()

The child increments a counter, which its parent polls. The parent counts polls, not seconds: after
it was suspended itself, it has polled no more often than its child could count. A child that has
not begun to count, as it starts or loads, is not considered hung. Killing and restarting it is up
to the parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

HUNG_S = 2.0  # for a gateway, whose callers wait meanwhile

AGAIN_S = 1.0  # before a failed task is started again

_VARIABLE = "BATON_LOOP_WATCH_FD"
_NAME = "baton-loop-watch"
_TURN_S = 0.1
_NUM_BYTES = 8


def run(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Like asyncio.run, for the coroutine of `start`, which is called before there is a loop."""
    _open_standard_streams()
    main = start()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)


def _open_standard_streams() -> None:
    """Open standard streams that this process lacks as /dev/null: else the next files opened get
    their numbers, and uvloop, which refuses to close these, aborts."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # is `fd`, the lowest free


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, if it is installed; None: asyncio's default."""
    try:
        import uvloop  # optional: the extra `fast`
    except ImportError:
        return None
    return uvloop.new_event_loop


async def keep_running(what: str, run: Callable[[], Awaitable[None]]) -> None:
    """Call `run` until it returns or is cancelled. An exception is a bug in Baton: it is logged,
    once for each kind and place, and `run` is called again."""
    logged: set[str] = set()
    while True:
        try:
            return await run()
        except Exception as error:
            kind = _kind_and_place(error)
            if kind not in logged:
                logged.add(kind)
                log.exception("%s failed and is restarted", what)
        await asyncio.sleep(AGAIN_S)


def _kind_and_place(error: Exception) -> str:
    """The kind and place of `error`; for a group, as a TaskGroup raises it, of its first error."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error)} {traceback.extract_tb(error.__traceback__, -1)}"


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C interrupt long work on the main thread at once, also within a coroutine: asyncio
    cancels the main task instead, which takes effect only after that work."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class StopSignals:
    """SIGTERM and SIGINT: the first signal sets `stop`, the second `hurry`; with `sigint_hurries`,
    SIGINT sets both.
    """

    def __init__(self, *, sigint_hurries: bool = False) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self._sigint_hurries = sigint_hurries
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._receive, number)

    def _receive(self, number: signal.Signals) -> None:
        if self.stop.is_set() or (self._sigint_hurries and number == signal.SIGINT):
            self.hurry.set()
        self.stop.set()


class LoopWatch:
    """The parent's side for one child, which must get `fd` and `environment`."""

    def __init__(self, hung_s: float = HUNG_S) -> None:
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        self.environment = {_VARIABLE: str(self.fd)}
        self._max_silent_looks = round(hung_s / _TURN_S) - 1
        self.hung_s = hung_s

    async def until_hung(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Return once the child has counted, and has then stopped counting for `hung_s`."""
        last, num_silent = b"", 0
        while num_silent < self._max_silent_looks:
            await sleep(_TURN_S)
            count = os.pread(self.fd, _NUM_BYTES, 0)
            num_silent = num_silent + 1 if count and count == last else 0
            last = count

    def close(self) -> None:
        """No effect if it is closed already."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> LoopWatch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


async def show_turns() -> None:
    """The child's side: count until cancelled. Returns at once if no parent watches."""
    fd = _watched_fd()
    if fd is None:
        return
    num_turns = 0
    while True:
        num_turns += 1
        os.pwrite(fd, num_turns.to_bytes(_NUM_BYTES, "little"), 0)
        await asyncio.sleep(_TURN_S)


def _watched_fd() -> int | None:
    """The descriptor that the parent passed, once; None if only its number was inherited."""
    number = os.environ.pop(_VARIABLE, "")
    with contextlib.suppress(OSError):
        if number.isdecimal() and f"memfd:{_NAME}" in os.readlink(f"/proc/self/fd/{number}"):
            return int(number)
    return None
